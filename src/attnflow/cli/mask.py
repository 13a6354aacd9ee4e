"""`attnflow mask list`, `show`, `check`, `merge`: the catalogue, one mask, one task, a family of tasks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from attnflow.cli._arguments import EXAMPLES, MaskLength, OutputOption, Settings, mask_argument, settings_from
from attnflow.cli._output import JsonFlag, console, output_path, print_json, print_result, say, style, working

if TYPE_CHECKING:
    from attnflow.masks import Mask

_SUFFIXES: Final = (".svg", ".png", ".html")


def mask_list(json_output: JsonFlag = False) -> None:
    """List the masks of the catalogue.

    For each: its parameters and its relation; q is the query, k the key, both counted from 0.
    """
    from attnflow.masks.spec import named_masks

    if json_output:
        masks = [
            {
                "name": entry.name,
                "signature": entry.signature,
                "relation": entry.summary,
                "parameters": [asdict(parameter) for parameter in entry.parameters],
                "example": f"attnflow mask show {entry.name} {EXAMPLES[entry.name]}",
            }
            for entry in named_masks().values()
        ]
        print_json("attnflow.mask.list/1", {"masks": masks})
        return
    screen = console()
    for entry in named_masks().values():
        say(screen, entry.signature, "bold")
        say(screen, textwrap.fill(entry.summary, screen.width, initial_indent="    ", subsequent_indent="    "))
    say(screen, "\nShow one: attnflow mask show sliding_window --n 16 --set window=4")
    say(screen, "A mask of your own goes into a JSON file that takes the place of the name.")


def mask_show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A mask of the catalogue, or a JSON file with a mask or a task.")
    ],
    n: MaskLength = None,
    settings: Settings = None,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", metavar="N", min=1, help="Block of the block sparsity (default: a few)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write FILE.svg, .png or .html; bare svg: NAME.svg."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show a mask as a picture and in numbers.

    In the picture a row is a query, a column a key. The numbers: depth (layers until all information has flowed),
    density, classes and Hasse diagram of the order, block sparsity.
    """
    from attnflow.report.mask import summarise

    if output is not None and f".{output}" in _SUFFIXES:  # a bare format names the file after the mask
        output = Path(f"{Path(name).stem}.{output}")
    target = None if output is None else output_path(output, _SUFFIXES)
    mask = mask_argument(name, n, settings or [])
    with working(f"analysing {mask.name}"):
        summary = summarise(mask, block_size)
        if target is not None:
            _write(mask, target)
    if json_output:
        print_result(summary)
    else:
        _say(mask, summary.lines(), output)


def mask_check(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC.json", help='A JSON file with inputs, labels and mask; "-" reads stdin.')
    ],
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", min=0, help="Layers of the model (default: any number).")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Prove that no label of a task leaks, or show how.

    A leak is shown with the path of the information, layer by layer, and exits with 1.
    """
    from attnflow._core.plain import read_json
    from attnflow.tasks import Task, check

    task = Task.from_dict(read_json(spec), spec)
    with working(f"checking {task.size} positions"):
        report = check(task, layers)
    if json_output:
        print_result(report)
    else:
        verdict, *rest = str(report).splitlines()
        screen = console()
        say(screen, verdict, style(report.ok))
        for line in rest:
            say(screen, line)
    raise typer.Exit(0 if report.ok else 1)


def mask_merge(
    name: Annotated[str, typer.Argument(metavar="FAMILY", help="causal_lm, block_two_stream, butterfly, ...")],
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, max=10_000, help="Number of tokens of the sample.")
    ],
    block: Annotated[
        int | None, typer.Option("--block", metavar="N", min=1, help="Tokens per block: --set block=...")
    ] = None,
    settings: Settings = None,
    output: OutputOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Merge a family of tasks and prove the result.

    Derives the smallest sequence and mask that train every task of the family in one forward pass, compares the mask
    with its closed form, and proves that no label leaks (otherwise exits with 1). -o writes .svg, .png or .html.
    """
    from attnflow._core.parameters import find
    from attnflow.tasks.derivation import derive, named_families

    target = None if output is None else output_path(output, _SUFFIXES)
    texts = settings_from([*(settings or []), *([] if block is None else [f"block={block}"])])
    family = find(name, named_families(), "family")
    with working(f"merging {name} of {tokens} tokens"):
        derivation = derive(family, tokens, family.read(texts))
        merged = derivation.merged
        mask = merged.task.mask
        if target is not None:
            _write(mask, target)
    if json_output:
        facts = {name: getattr(derivation, name) for name in ("ok", "call", "closed_form", "equals_closed_form")}
        facts |= {"subtasks": len(merged.positions), "nodes": merged.num_nodes, "is_minimal": merged.is_minimal}
        print_json(
            "attnflow.mask.merge/1", {**facts, "check": derivation.report.to_dict(), "task": merged.task.to_dict()}
        )
    else:
        say(console(), derivation.call, "bold")
        _say(mask, derivation.lines(), output)
    raise typer.Exit(0 if derivation.ok else 1)


def _write(mask: Mask, path: Path) -> None:
    """The picture, or for `.html` the report, that the suffix of `path` asks for; whole or not at all."""
    from attnflow.report import figure, page

    if path.suffix.lower() == ".html":
        page(mask).save(path)
    else:
        figure(mask).savefig(path)


def _say(mask: Mask, lines: Sequence[tuple[str, str]], written: Path | None) -> None:
    """A mask as text, with what is known of it."""
    from attnflow.report.mask_picture import mask_text

    screen = console()
    say(screen, mask_text(mask, width=max(20, min(100, screen.width))) + "\n")
    for label, value in [*lines, *([] if written is None else [("written", str(written))])]:
        say(screen, f"{label:<16}{value}")
