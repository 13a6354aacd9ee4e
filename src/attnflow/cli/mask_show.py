"""`attnflow mask show NAME`: a picture of a mask and its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._masks import PICTURES, mask_argument, write_picture
from attnflow.cli._output import JsonFlag, console, output_path, print_result, say, working


def mask_show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A mask of the catalogue, or a JSON file with a mask or a task.")
    ],
    n: Annotated[int | None, typer.Option("--n", metavar="N", min=0, help="Number of tokens (default 16).")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter, as in --set window=4.")
    ] = None,
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
    from attnflow import report
    from attnflow.report.mask_summary import summarise

    if output is not None and f".{output}" in PICTURES:  # a bare format names the file after the mask
        output = Path(f"{Path(name).stem}.{output}")
    target = None if output is None else output_path(output, PICTURES)
    mask = mask_argument(name, n, settings or [])
    with working(f"analysing {mask.name}"):
        summary = summarise(mask, block_size)
        if target is not None:
            write_picture(mask, target)
    if json_output:
        print_result(summary)
        return
    screen = console()
    say(screen, report.text(mask, width=max(20, min(100, screen.width))) + "\n")
    for label, text in summary.lines():
        say(screen, f"{label:<16}{text}")
    if output is not None:
        say(screen, f"{'written':<16}{output}")
