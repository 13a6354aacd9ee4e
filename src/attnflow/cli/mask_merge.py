"""`attnflow mask merge FAMILY --tokens N`: the one mask that trains a family of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, output_path, print_json, say, working


def mask_merge(
    name: Annotated[str, typer.Argument(metavar="FAMILY", help="causal_lm, block_two_stream, butterfly, ...")],
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, max=10_000, help="Number of tokens of the sample.")
    ],
    block: Annotated[
        int | None, typer.Option("--block", metavar="N", min=1, help="Tokens per block: --set block=...")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter, as in --set horizon=3.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write a .svg, .png or .html file.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Merge a family of tasks and prove the result.

    Derives the smallest sequence and mask that train every task of the family in one forward pass, compares the mask
    with its closed form, and proves that no label leaks (otherwise exits with 1).
    """
    from attnflow.cli import _pictures
    from attnflow.cli._catalogue import settings_from
    from attnflow.cli._families import make_family, merge_facts
    from attnflow.report import mask_text

    target = None if output is None else output_path(output, _pictures.SUFFIXES)
    given = settings_from([*(settings or []), *([] if block is None else [f"block={block}"])])
    named = make_family(name, tokens, given)
    with working(f"merging {named.call}"):
        facts = merge_facts(named)
        if target is not None:
            _pictures.write(facts.merged.task.mask, target)
    if json_output:
        written = None if output is None else str(output)
        print_json("attnflow.mask.merge/1", {**facts.to_dict(), "written": written})
    else:
        screen = console()
        say(screen, named.call, "bold")
        say(screen, mask_text(facts.merged.task.mask, max(20, min(100, screen.width))) + "\n")
        for label, text in facts.lines():
            say(screen, f"{label:<16}{text}")
        if output is not None:
            say(screen, f"{'written':<16}{output}")
    raise typer.Exit(0 if facts.ok else 1)
