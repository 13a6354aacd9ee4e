"""`attnflow mask check SPEC.json`: does a label leak?"""

from __future__ import annotations

from typing import Annotated

import typer

from attnflow.cli._masks import task_argument
from attnflow.cli._output import JsonFlag, console, print_result, say, working


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
    from attnflow.tasks import check

    task = task_argument(spec)
    with working(f"checking {task.size} positions"):
        report = check(task, layers)
    if json_output:
        print_result(report)
    else:
        verdict, *rest = str(report).splitlines()
        screen = console()
        say(screen, verdict, "bold green" if report.ok else "bold red")
        for line in rest:
            say(screen, line)
    raise typer.Exit(0 if report.ok else 1)
