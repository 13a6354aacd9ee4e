"""`attnflow knowledge search STORE TEXT`: the entries that are nearest to a text."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_result, say, working


class Mode(StrEnum):
    """How a search is made."""

    auto = "auto"
    exact = "exact"
    approximate = "approximate"


def knowledge_search(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store of texts.")],
    query: Annotated[str, typer.Argument(metavar="TEXT", help="What to look for.")],
    k: Annotated[int, typer.Option("-k", metavar="N", min=1, help="At most so many entries.")] = 10,
    above: Annotated[
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
    from attnflow.cli._knowledge import note, opened
    from attnflow.knowledge import texts

    with working(f"opening {store}"), opened(store, search=mode.value) as held:
        matches = texts.search(held, query, k, above=above, encoder=encoder)
    if json_output:
        print_result(matches)
    else:
        say(console(), str(matches))
    if matches.other_encoders:
        note(
            f"{matches.other_encoders:,} of {matches.total:,} entries were made by another encoder, and their scores "
            f"do not compare: `attnflow knowledge reembed {store}`"
        )
