"""`attnflow knowledge ...` on a store: build, stats."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from attnflow._core.markup import plural
from attnflow.cli._arguments import require
from attnflow.cli._output import BadUsage, JsonFlag, show, working

if TYPE_CHECKING:
    from attnflow.knowledge.store import Store

app = typer.Typer(help="Feed-forward entries: keep, edit and trace them.", rich_markup_mode=None)


@app.command("build")
def build(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A new folder, or s3://BUCKET/PATH.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A short name, a folder, a GGUF file or a hub id.")],
    json_output: JsonFlag = False,
) -> None:
    """Build a store of the feed-forward entries of a model.

    The converted model reads them from the store: `knowledge.attach(converted, store)`.
    """
    require(model)
    from attnflow.knowledge.hf.convert import from_ffn
    from attnflow.knowledge.hf.stored_layers import save_entries
    from attnflow.knowledge.store import Store
    from attnflow.knowledge.store.table import check_uri
    from attnflow.models.loader import load_model

    _refuse_memory(store)
    check_uri(store)
    with working(f"reading {model}") as spinner:
        converted = from_ffn(load_model(model, tokenizer=False))
        base = cast(Any, converted).knowledge
        with Store.open(store, dim=base.entry_dim, num_thresholds=base.num_thresholds) as held:
            if len(held):
                raise BadUsage(f"{store} holds {plural(len(held), 'entry', 'entries')} already: name a new store")
            save_entries(converted, held, name=model, progress=spinner)
            numbers = held.stats()
    show(numbers, json_output)


@app.command("stats")
def stats(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store.")],
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
def opened(uri: str) -> Generator[Store, None, None]:
    """Opens an existing store to read it, and closes it; raises BadUsage without one."""
    from attnflow.knowledge.store import Store

    _refuse_memory(uri)
    path = Path(uri)
    if "://" not in uri and not (path.is_dir() and any(path.iterdir())):
        raise BadUsage(f"there is no store at {uri}: `attnflow knowledge build {uri} MODEL` makes one")
    with Store.open(uri, read_only=True) as store:
        yield store


def _refuse_memory(uri: str) -> None:
    if uri == "memory":
        raise BadUsage("a store in memory is gone when the command ends: name a folder")
