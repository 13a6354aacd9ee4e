"""`attnflow knowledge insert STORE`: add entries to a store, or correct some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import BadUsage, JsonFlag, console, print_result, say, working

_LARGEST = 2**63 - 1


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
        typer.Option("--id", metavar="ID", min=0, max=_LARGEST, help="Correct the entry with this id, once for each."),
    ] = None,
    new_ids: Annotated[
        list[int] | None,
        typer.Option("--new-id", metavar="ID", min=0, max=_LARGEST, help="Give a new entry this id, once for each."),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="MODEL", help="Default: the one that made the entries.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Insert entries into a store.

    New ones get ids that were never used before, or those of --new-id; with --id, the entry keeps its id and gets the
    next version.
    """
    from attnflow.cli._knowledge import note_truncated, opened, shown
    from attnflow.knowledge import texts
    from attnflow.knowledge.records import read_records, readable, records

    if (file is None) == (not text):
        raise BadUsage("give --text or --file, one of them")
    if ids and new_ids:
        raise BadUsage("--id corrects entries, --new-id makes new ones: give one of them")
    new = records(text or [], value, source) if file is None else read_records(file, source=source)
    with working(f"opening {store}") as spinner, opened(store, read_only=False, search="exact") as held:
        progress = shown(spinner, "embedding")
        if ids:
            written = texts.correct(held, ids, new, encoder=encoder, progress=progress)
        else:
            written = texts.insert(held, new, ids=new_ids or None, encoder=encoder, progress=progress)
    note_truncated(written.truncated, len(new))
    if json_output:
        print_result(written)
        return
    screen = console()
    for key, record in zip(written.ids, new, strict=True):
        say(screen, f"{key}  {readable(record.text)}")
    say(screen, f"{store} holds {written.entries:,} entries")
