"""`attnflow knowledge ...` on a store: build, search, insert, delete, stats."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from attnflow.cli._arguments import require
from attnflow.cli._output import BadUsage, JsonFlag, console, print_json, print_result, say, show, working

if TYPE_CHECKING:
    from attnflow.knowledge.store import Store

app = typer.Typer(help="Stores of entries: build, search, edit, watch.", rich_markup_mode=None)

_LARGEST: Final = 2**63 - 1
_StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="A store.")]
_TextsArgument = Annotated[str, typer.Argument(metavar="STORE", help="A store of texts.")]
_EncoderOption = Annotated[
    str | None, typer.Option("--encoder", metavar="MODEL", help="Default: the one that made the entries.")
]


@app.command("build")
def build(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A new folder, or s3://BUCKET/PATH.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A text file, or .jsonl with text and source.")
    ] = None,
    from_model: Annotated[
        str | None, typer.Option("--from-model", metavar="MODEL", help="Its feed-forward entries, in place of FILE.")
    ] = None,
    encoder: Annotated[
        str, typer.Option("--encoder", metavar="MODEL", help="What embeds texts: minilm, a folder or a hub id.")
    ] = "minilm",
    json_output: JsonFlag = False,
) -> None:
    """Build a store.

    Each line of a text file becomes an entry with its embedding. All are written in one step, at the end.
    """
    if (file is None) == (from_model is None):
        raise BadUsage("give a FILE or --from-model, one of them")
    require(encoder if from_model is None else from_model)
    from attnflow.knowledge.hf import texts
    from attnflow.knowledge.store.table import check_uri

    _refuse_memory(store)
    check_uri(store)
    with working(f"reading {file or from_model}") as spinner:
        if file is not None:
            written = texts.build(store, file, encoder, progress=spinner)
        else:
            written = texts.build_from_model(store, str(from_model), progress=spinner)
    _note_truncated(written.truncated, written.entries)
    show(written, json_output)


@app.command("search")
def search(
    store: _TextsArgument,
    query: Annotated[str, typer.Argument(metavar="TEXT", help="What to look for.")],
    k: Annotated[int, typer.Option("-k", metavar="N", min=1, help="At most so many entries.")] = 10,
    encoder: _EncoderOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Search a store.

    Embeds the text by the encoder that made the entries, and lists those with the highest scores: ids, scores, texts,
    sources, and whether the search was exact.
    """
    from attnflow.knowledge.hf import texts

    with working(f"opening {store}"), opened(store) as held:
        matches = texts.search(held, query, k, encoder=encoder)
    show(matches, json_output)
    if matches.other_encoders:
        print(
            f"attnflow: {matches.other_encoders:,} of {matches.total:,} entries were made by another encoder, and "
            f"their scores do not compare: build a store of all texts by one encoder",
            file=sys.stderr,
        )


@app.command("insert")
def insert(
    store: _TextsArgument,
    text: Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help="A text; may be repeated.")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="Texts, as build reads them.")] = None,
    source: Annotated[str | None, typer.Option("--source", metavar="TEXT", help="Where they come from.")] = None,
    ids: Annotated[
        list[int] | None,
        typer.Option("--id", metavar="ID", min=0, max=_LARGEST, help="Correct the entry with this id, once for each."),
    ] = None,
    encoder: _EncoderOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Insert entries into a store.

    New ones get ids that were never used before; with --id, the entry keeps its id and gets the next version.
    """
    from attnflow.knowledge.hf import texts

    if (file is None) == (not text):
        raise BadUsage("give --text or --file, one of them")
    new, sources = (text or [], [source] * len(text or [])) if file is None else texts.read_texts(file, source)
    with working(f"opening {store}") as spinner, opened(store, read_only=False) as held:
        written = texts.insert(held, new, sources, ids or None, encoder=encoder, progress=spinner)
    _note_truncated(written.truncated, len(new))
    if json_output:
        print_result(written)
        return
    screen = console()
    for key, one in zip(written.ids, new, strict=True):
        say(screen, f"{key}  {one}")
    say(screen, f"{store} holds {written.entries:,} entries")


@app.command("delete")
def delete(
    store: _StoreArgument,
    ids: Annotated[list[int], typer.Argument(metavar="ID...", min=0, max=_LARGEST, help="Ids of entries.")],
    json_output: JsonFlag = False,
) -> None:
    """Delete entries of a store.

    All of them, or none if one is unknown. Their ids are not given out again.
    """
    unique = list(dict.fromkeys(ids))
    with working(f"opening {store}"), opened(store, read_only=False) as held:
        held.delete(unique)
        left = len(held)
    if json_output:
        print_json("attnflow.knowledge.delete/1", {"store": store, "ids": unique, "entries": left})
        return
    say(console(), f"{store} holds {left:,} entries")


@app.command("stats")
def stats(
    store: _StoreArgument,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Look for entries that say the same.")] = False,
    threshold: Annotated[float, typer.Option("--threshold", metavar="X", help="The cosine of duplicates.")] = 0.95,
    json_output: JsonFlag = False,
) -> None:
    """Show a store in numbers.

    How many entries, by version and by encoder. Exits with 1 if it was asked for duplicates and found some.
    """
    with working(f"opening {store}") as spinner, opened(store) as held:
        numbers, same, texts = held.stats(), None, list[str | None]()
        if duplicates:
            from attnflow.knowledge.duplication import duplicates as find

            same = find(held, threshold, progress=spinner)
            texts = [entry.text for entry in held.get([group[0] for group in same.groups[:20]])]
    show(same or numbers, json_output, "" if same is None else f"{numbers}\n\nduplicates {same.listed(texts)}")
    raise typer.Exit(0 if same is None or same.ok else 1)


@contextmanager
def opened(uri: str, *, read_only: bool = True) -> Generator[Store, None, None]:
    """Opens an existing store and closes it; raises BadUsage without one, or for an unknown id."""
    from attnflow.knowledge.store import Store

    _refuse_memory(uri)
    path = Path(uri)
    if "://" not in uri and not (path.is_dir() and any(path.iterdir())):
        raise BadUsage(f"there is no store at {uri}: `attnflow knowledge build {uri} FILE` makes one")
    try:
        with Store.open(uri, read_only=read_only) as store:
            yield store
    except KeyError as error:
        raise BadUsage(str(error.args[0])) from error


def _refuse_memory(uri: str) -> None:
    if uri == "memory":
        raise BadUsage("a store in memory is gone when the command ends: name a folder")


def _note_truncated(places: Sequence[str], total: int) -> None:
    if places:
        more = ", ..." if len(places) > 5 else ""
        print(
            f"attnflow: {len(places):,} of {total:,} texts are longer than the encoder reads, and their ends are not "
            f"embedded: {', '.join(places[:5])}{more}",
            file=sys.stderr,
        )
