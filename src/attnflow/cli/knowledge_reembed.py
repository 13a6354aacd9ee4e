"""`attnflow knowledge reembed STORE`: embed anew what another encoder version made."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


def knowledge_reembed(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store of texts.")],
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="MODEL", help="Default: the one that made the entries, as it is.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Embed entries anew.

    Those that another encoder version made, from their texts, batch by batch. If it is interrupted, the same command
    goes on where it was.
    """
    from attnflow.cli import _knowledge

    with working(f"opening {store}") as spinner:
        done = _knowledge.reembed(store, encoder, spinner)
    if json_output:
        print_json("attnflow.knowledge.reembed/1", {"store": store, **asdict(done)})
        return
    say(console(), f"{store}: {done}")
