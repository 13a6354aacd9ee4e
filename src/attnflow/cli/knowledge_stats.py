"""`attnflow knowledge stats STORE`: a store in numbers, its duplicates, and how far its embeddings have drifted."""

from __future__ import annotations

from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


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
    from attnflow.cli import _knowledge

    with working(f"opening {store}") as spinner:
        found = _knowledge.stats(store, threshold if duplicates else None, drift, encoder, sample, spinner)
    if json_output:
        print_json("attnflow.knowledge.stats/1", found.to_dict())
    else:
        screen = console()
        for line in found.lines():
            say(screen, line)
    raise typer.Exit(1 if found.found else 0)
