"""`attnflow report MODEL_OR_MASK -o out.html`: everything about a mask, a task or a model on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, output_path, print_json, say, working


def report(
    subject: Annotated[
        str, typer.Argument(metavar="MODEL_OR_MASK", help="A mask, a JSON file with a mask or a task, or a model.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The .html file to write.")],
    n: Annotated[int | None, typer.Option("--n", metavar="N", min=0, help="Tokens of the mask (default 16).")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the mask.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="The text that a model reads.")] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=2, help="Tokens that a model reads at most.")
    ] = 64,
    json_output: JsonFlag = False,
) -> None:
    """Write a report, one self-contained HTML page.

    On a mask: picture, Hasse diagram, depth, receptive fields, block sparsity, cost. On a task: its leaks too. On a
    model: its audit and the order that it declares. Exits with 1 if a leak is reported.
    """
    from attnflow.cli import _reports
    from attnflow.cli._output import console

    target = output_path(output, [".html"])
    with working(f"reading {subject}") as spinner:
        made = _reports.make(subject, n, settings or [], text, tokens, spinner)
        made.page.save(target)
    size = target.stat().st_size
    if json_output:
        sections = [section.name for section in made.page.sections]
        found = {"kind": made.kind, "title": made.page.title, "ok": made.ok, "sections": sections, "bytes": size}
        print_json("attnflow.report/1", {"subject": subject, **found, "written": str(output)})
    else:
        verdict = "" if made.ok else " It reports a leak."
        say(console(), f"{made.page.title}: {output} ({size / 1024:.0f} KiB).{verdict}", "" if made.ok else "bold red")
    raise typer.Exit(0 if made.ok else 1)
