"""`attnflow knowledge stats STORE`: a store in numbers, its duplicates, and how far its embeddings have drifted."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_result, say, working


def knowledge_stats(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store.")],
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Look for entries that say the same.")] = False,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="X", help="The cosine from which two are duplicates.")
    ] = 0.95,
    drift: Annotated[bool, typer.Option("--drift", help="Embed a sample again, and compare.")] = False,
    sample: Annotated[
        int, typer.Option("--sample", metavar="N", min=1, help="Entries of each encoder version to compare.")
    ] = 256,
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="MODEL", help="Default: the one that made the entries.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show a store in numbers.

    How many entries, by version and by encoder. Exits with 1 if it was asked for duplicates or drift and found some.
    """
    from attnflow.cli._knowledge import opened, shown
    from attnflow.knowledge import texts

    with working(f"opening {store}") as spinner, opened(store) as held, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts that are too long were reported when they were written
        inspection = texts.inspect(
            held,
            threshold=threshold if duplicates else None,
            sample=sample if drift else None,
            encoder=encoder,
            progress=shown(spinner, "comparing"),
        )
    if json_output:
        print_result(inspection)
    else:
        say(console(), str(inspection))
    raise typer.Exit(0 if inspection.ok else 1)
