"""`attnflow knowledge search STORE TEXT`: the entries that are nearest to a text."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


class Mode(StrEnum):
    """How a search is made."""

    auto = "auto"
    exact = "exact"
    approximate = "approximate"


def knowledge_search(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store of texts.")],
    query: Annotated[str, typer.Argument(metavar="TEXT", help="What to look for.")],
    k: Annotated[int, typer.Option("-k", metavar="N", min=1, help="At most so many entries.")] = 10,
    least: Annotated[
        float | None, typer.Option("--above", metavar="SCORE", help="Only entries that score more than this.")
    ] = None,
    mode: Annotated[Mode, typer.Option("--mode", help="How to search (auto: what pays).")] = Mode.auto,
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="MODEL", help="Default: the one that made the entries.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Search a store.

    Embeds the text by the encoder that made the entries, and lists those with the highest scores: ids, scores, texts,
    sources, and whether the search was exact.
    """
    from attnflow.cli import _knowledge
    from attnflow.cli._stores import note

    with working(f"opening {store}") as spinner:
        found = _knowledge.search(store, query, k, least, mode.value, encoder, spinner)
    if json_output:
        print_json("attnflow.knowledge.search/1", {"store": store, "query": query, "k": k, **asdict(found)})
    else:
        screen = console()
        for line in found.lines():
            say(screen, line)
    if found.other_encoders:
        note(
            f"{found.other_encoders:,} of {found.total:,} entries were made by another encoder, and their scores do "
            f"not compare: `attnflow knowledge reembed {store}`"
        )
