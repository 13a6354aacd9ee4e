"""`attnflow knowledge insert STORE`: add entries to a store, or correct some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


def knowledge_insert(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store of texts.")],
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="TEXT", help="A text, or the key of one; may be repeated.")
    ] = None,
    value: Annotated[
        list[str] | None, typer.Option("--value", metavar="TEXT", help="What belongs to the key; once for each.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="Texts, as build reads them.")] = None,
    source: Annotated[str | None, typer.Option("--source", metavar="TEXT", help="Where they come from.")] = None,
    ids: Annotated[
        list[int] | None,
        typer.Option(
            "--id", metavar="ID", min=0, max=2**63 - 1, help="Correct the entry with this id; once for each text."
        ),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="MODEL", help="Default: the one that made the entries.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Insert entries into a store.

    New ones get ids that were never used before; with --id, the entry keeps its id and gets the next version.
    """
    from attnflow.cli import _knowledge, _stores

    new = _stores.given(text, value, file, source)
    with working(f"opening {store}") as spinner:
        written, version, total = _knowledge.insert(store, new, ids, encoder, spinner)
    if json_output:
        about = {"store": store, "ids": written, "encoder": version, "entries": total}
        print_json("attnflow.knowledge.insert/1", about)
        return
    screen = console()
    for key, record in zip(written, new, strict=True):
        say(screen, f"{key}  {_stores.shown(record.text)}")
    say(screen, f"{store} holds {total:,} entries")
