"""A store of texts: built from a file, searched, added to and corrected by words, with the encoder that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from attnflow._core.checks import preview
from attnflow._core.markup import aligned, plural, shorten
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.hf.convert import from_ffn
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.stored_layers import MADE_BY, save_entries
from attnflow.knowledge.records import SEPARATOR, Record, read_records, readable
from attnflow.knowledge.store import Store
from attnflow.models.loader import load_model

_WINDOW: Final = 1024  # entries of one write


@dataclass(frozen=True)
class Written(Result):
    """Entries that were written to a store."""

    store: str  # where it is
    entries: int  # that it holds now
    dim: int  # width of an embedding
    ids: tuple[int, ...]  # of what was written; fewer than it holds where a build went on after an interruption
    encoder: str  # version of what made the embeddings
    truncated: tuple[str, ...]  # sources of texts that are longer than the encoder reads: their ends are not embedded

    def __str__(self) -> str:
        before = self.entries - len(self.ids)
        again = f" ({before:,} were there already)" if before else ""
        held = plural(self.entries, "entry", "entries")
        return f"{self.store}: {held} of width {self.dim} by {self.encoder}{again}"


@dataclass(frozen=True)
class Match:
    """An entry that a search of texts gives, with its score."""

    id: int
    score: float
    text: str | None
    source: str | None
    version: int
    encoder: str | None


@dataclass(frozen=True)
class Matches(Result):
    """The entries of a store that are nearest to a text, best first."""

    store: str  # where it is
    query: str  # the text
    encoder: str  # what embedded it
    label: str  # "exact", or "approximate": others may score more
    total: int  # entries that were searched
    other_encoders: int  # how many of them another encoder made: their scores do not compare
    matches: tuple[Match, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each entry."""
        return [asdict(one) for one in self.matches]

    def __str__(self) -> str:
        found = plural(len(self.matches), "entry", "entries")
        said = [f"{found} of {self.total:,}, {self.label} search, scores by {self.encoder}"]
        rows = [
            [str(one.id), f"{one.score:.3f}", shorten(readable(one.text), 100), shorten(one.source or "", 40)]
            for one in self.matches
        ]
        if rows:
            said.append(aligned([["id", "score", "text", "source"], *rows], left=[2, 3]))
        return "\n".join(said)


def build(uri: str, file: str | Path, encoder: str = "minilm", *, progress: Progress | None = None) -> Written:
    """A new store of texts. If it was interrupted, the same call goes on where it was.

    Raises:
        FileNotFoundError: no such file or encoder.
        ValueError: no text, a model that is no encoder, or a store with other entries.
    """
    new = read_records(file)
    maker = TextEncoder(encoder, separator=SEPARATOR if any(SEPARATOR in record.text for record in new) else None)
    version = maker.version
    with Store.open(uri, dim=maker.dim) as store:
        held = store.get(store.ids())
        done = [(record.text, record.source, version, 1) for record in new[: len(held)]]  # of an interrupted build
        there = [(entry.text, entry.source, entry.encoder, entry.version) for entry in held]
        if there and (there != done or len(held) == len(new)):
            raise ValueError(_taken(store))
        return _write(store, maker, new[len(held) :], None, progress)


def build_from_model(uri: str, model: str, *, progress: Progress | None = None) -> Written:
    """A new store of the feed-forward entries of a model: a short name, a folder, a GGUF file or a hub id.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a store that holds entries already.
    """
    converted: Any = from_ffn(load_model(model, tokenizer=False))
    base = converted.knowledge
    with Store.open(uri, dim=base.entry_dim, num_thresholds=base.num_thresholds) as store:
        if len(store):
            raise ValueError(_taken(store))
        save_entries(converted, store, name=model, progress=progress)
        return Written(uri, len(store), store.dim, tuple(store.ids().tolist()), f"{MADE_BY}:{model}", ())


def insert(
    store: Store,
    new: Sequence[Record],
    ids: Sequence[int] | None = None,
    *,
    encoder: str | None = None,
    progress: Progress | None = None,
) -> Written:
    """Add texts to a store, embedded as its entries are; or correct the entries with these ids, one for each text.

    `encoder` names another one than that which made the entries.

    Raises:
        ValueError: ids that do not exist, values in a store of whole texts, or as `TextEncoder.of`. Nothing is written.
    """
    if ids is not None:
        if len(ids) != len(new):
            raise ValueError(f"give one id for each text: got {len(ids)} and {plural(len(new), 'text')}")
        if unknown := [key for key in ids if key not in store]:
            raise ValueError(
                f"{store.uri} has no entries with ids {preview(unknown)} to correct; a new entry gets its id by itself"
            )
    maker = TextEncoder.of(store, encoder)
    if maker.separator is None and any(SEPARATOR in record.text for record in new):
        if len(store):
            raise ValueError(
                f"the entries of {store.uri} are embedded whole, without values: put key and value into one text, or "
                "build a store from a .jsonl file with keys and values"
            )
        maker = TextEncoder(maker.name, separator=SEPARATOR)
    return _write(store, maker, new, ids, progress)


def search(store: Store, query: str, k: int = 10, *, encoder: str | None = None) -> Matches:
    """The k entries of a store that are nearest to a text.

    Raises:
        ValueError: an empty query, or as `TextEncoder.of`.
    """
    if not query.strip():
        raise ValueError("the query is empty")
    maker = TextEncoder.of(store, encoder)
    near, version = store.search(maker([query])[0], k), maker.version
    found = near.ids >= 0
    matches = tuple(
        Match(entry.id, score, entry.text, entry.source, entry.version, entry.encoder)
        for entry, score in zip(store.get(near.ids[found]), near.scores[found].tolist(), strict=True)
    )
    others = sum(count for name, count in store.stats().encoders.items() if name != version)
    return Matches(store.uri, query, version, near.certificate.label, len(store), others, matches)


def _write(
    store: Store, maker: TextEncoder, new: Sequence[Record], ids: Sequence[int] | None, progress: Progress | None
) -> Written:
    """Insert texts, or correct the entries with these ids."""
    version, written, cut = maker.version, list[int](), list[str]()
    for start in range(0, len(new), _WINDOW):
        batch = new[start : start + _WINDOW]
        texts, sources = [record.text for record in batch], [record.source for record in batch]
        shown = None if progress is None else partial(_shifted, progress, start, len(new))
        embeddings, truncated = maker.encode(texts, shown)
        cut += [sources[place] or repr(texts[place][:20]) for place in truncated]
        columns: dict[str, Any] = {"embeddings": embeddings, "texts": texts, "sources": sources, "encoder": version}
        if ids is None:
            written += store.insert(**columns).tolist()
        else:
            store.upsert(ids=ids[start : start + _WINDOW], **columns)
            written += ids[start : start + _WINDOW]
    return Written(store.uri, len(store), store.dim, tuple(written), version, tuple(cut))


def _shifted(progress: Progress, start: int, total: int, done: int, _: int, what: str) -> None:
    progress(start + done, total, what)


def _taken(store: Store) -> str:
    held = plural(len(store), "entry", "entries")
    return f"{store.uri} holds {held} already: `attnflow knowledge insert` adds to it; build makes a new one"
