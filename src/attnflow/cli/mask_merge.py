"""`attnflow mask merge FAMILY --tokens N`: the one mask that trains a family of tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from attnflow.cli._masks import PICTURES, write_picture
from attnflow.cli._options import OutputOption, settings_from
from attnflow.cli._output import JsonFlag, console, output_path, print_result, say, working


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
    output: OutputOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Merge a family of tasks and prove the result.

    Derives the smallest sequence and mask that train every task of the family in one forward pass, compares the mask
    with its closed form, and proves that no label leaks (otherwise exits with 1). -o writes .svg, .png or .html.
    """
    from attnflow import report
    from attnflow._core.parameters import find
    from attnflow.tasks import derive
    from attnflow.tasks.derivation import named_families

    target = None if output is None else output_path(output, PICTURES)
    texts = settings_from([*(settings or []), *([] if block is None else [f"block={block}"])])
    values = find(name, named_families(), "family").read(texts)
    with working(f"merging {name} of {tokens} tokens"):
        derivation = derive(name, tokens, **values)
        mask = derivation.merged.task.mask
        if target is not None:
            write_picture(mask, target)
    if json_output:
        print_result(derivation)
    else:
        screen = console()
        say(screen, derivation.call, "bold")
        say(screen, report.text(mask, width=max(20, min(100, screen.width))) + "\n")
        for label, text in derivation.lines():
            say(screen, f"{label:<16}{text}")
        if output is not None:
            say(screen, f"{'written':<16}{output}")
    raise typer.Exit(0 if derivation.ok else 1)
