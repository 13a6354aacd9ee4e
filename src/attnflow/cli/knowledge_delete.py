"""`attnflow knowledge delete STORE ID...`: remove entries from a store."""

from __future__ import annotations

from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


def knowledge_delete(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store.")],
    ids: Annotated[list[int], typer.Argument(metavar="ID...", min=0, max=2**63 - 1, help="Ids of entries.")],
    json_output: JsonFlag = False,
) -> None:
    """Delete entries of a store.

    All of them, or none if one is unknown. Their ids are not given out again.
    """
    from attnflow.cli._knowledge import opened

    unique = list(dict.fromkeys(ids))
    with working(f"opening {store}"), opened(store, read_only=False, search="exact") as held:
        held.delete(unique)
        left = len(held)
    if json_output:
        print_json("attnflow.knowledge.delete/1", {"store": store, "ids": unique, "entries": left})
        return
    say(console(), f"{store} holds {left:,} entries")
