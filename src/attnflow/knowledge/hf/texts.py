"""A store of texts: built from a file, searched, added to and corrected by words, with the encoder that made it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from attnflow._core.checks import Indices, preview
from attnflow._core.markup import aligned, plural, shorten
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.certificate import Neighbours
from attnflow.knowledge.hf.convert import from_ffn
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.stored_layers import MADE_BY, save_entries
from attnflow.knowledge.index import Mode
from attnflow.knowledge.records import SEPARATOR, Record, Split, read_records, readable
from attnflow.knowledge.store import Store
from attnflow.models.loader import load_model

_WINDOW: Final = 1024  # entries of one write


@dataclass(frozen=True)
class Written(Result):
    """Entries that were written to a store.

    Attributes:
        store: where it is.
        backend: "lancedb", or "memory".
        entries: that it holds now.
        dim: width of an embedding.
        ids: of the entries that were written; fewer than it holds where a build went on after an interruption.
        encoder: version of what made the embeddings.
        truncated: sources of the texts that are longer than the encoder reads, whose ends are not embedded.
        seconds: that it took.
    """

    store: str
    backend: str
    entries: int
    dim: int
    ids: tuple[int, ...]
    encoder: str
    truncated: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        before = self.entries - len(self.ids)
        again = f" ({before:,} were there already)" if before else ""
        return (
            f"{self.store}: {plural(self.entries, 'entry', 'entries')} of width {self.dim} by {self.encoder}{again}, "
            f"in {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Match:
    """An entry that a search of texts gives, with its score."""

    id: int
    score: float
    text: str | None
    source: str | None
    version: int
    encoder: str | None

    @classmethod
    def of(cls, store: Store, near: Neighbours, k: int) -> tuple[Match, ...]:
        """The k best entries, at most, that a search for one query gave, best first."""
        scored = zip(near.ids.tolist(), near.scores.tolist(), strict=True)
        pairs = [(key, score) for key, score in scored if key >= 0][:k]
        return tuple(
            cls(entry.id, score, entry.text, entry.source, entry.version, entry.encoder)
            for entry, (_, score) in zip(store.get([key for key, _ in pairs]), pairs, strict=True)
        )


@dataclass(frozen=True)
class Matches(Result):
    """The entries of a store that are nearest to a text, best first.

    Attributes:
        store: where it is.
        query: the text.
        encoder: what embedded it.
        label: "exact", or "approximate": others may score more.
        total: entries that were searched.
        other_encoders: how many of them another encoder made: their scores do not compare.
        seconds: of the search alone.
        matches: the entries.
    """

    store: str
    query: str
    encoder: str
    label: str
    total: int
    other_encoders: int
    seconds: float
    matches: tuple[Match, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each entry."""
        return [asdict(one) for one in self.matches]

    def __str__(self) -> str:
        about = f"{plural(len(self.matches), 'entry', 'entries')} of {self.total:,}, {self.label} search"
        lines = [f"{about} in {1000 * self.seconds:.1f} ms, scores by {self.encoder}"]
        rows = [
            [str(one.id), f"{one.score:.3f}", shorten(readable(one.text), 100), shorten(one.source or "", 40)]
            for one in self.matches
        ]
        return "\n".join(
            [*lines, *([aligned([["id", "score", "text", "source"], *rows], left=[2, 3])] if rows else [])]
        )


def build(
    uri: str,
    source: str | Path | Sequence[Record],
    encoder: str = "minilm",
    *,
    split: Split = "line",
    values: bool = False,
    progress: Progress | None = None,
) -> Written:
    """A new store of texts. If it was interrupted, the same call goes on where it was.

    Args:
        uri: of the store, see `Store.open`.
        source: a text file, or .jsonl with text, or key and value, and source; or `records(...)`.
        encoder: what embeds the texts: a short name, a folder or a hub id.
        split: what of a text file is one entry.
        values: embed values beside keys, in a half of their own, as a reader of a language model needs them.
        progress: called as progress(done, total, what).

    Raises:
        FileNotFoundError: no such file or encoder.
        ValueError: no text, a model that is no encoder, or a store with other entries.
    """
    began, new = time.monotonic(), read_records(source, split) if isinstance(source, str | Path) else list(source)
    separator = SEPARATOR if values or any(SEPARATOR in record.text for record in new) else None
    maker = TextEncoder(encoder, separator=separator, values=values)
    with Store.open(uri, dim=maker.dim, search="exact") as store:
        done, version = len(store), maker.version
        if done:  # of an interrupted build, the first records
            ids = store.ids().tolist()
            held = store.get(ids) if done < len(new) and ids == list(range(done)) else []
            same = [(record.text, record.source, version, 1) for record in new[:done]]
            if [(entry.text, entry.source, entry.encoder, entry.version) for entry in held] != same:
                raise ValueError(_taken(uri, done))
        return _write(store, maker, new[done:], began, ids=range(done, len(new)), progress=progress)


def build_from_model(uri: str, model: str, *, progress: Progress | None = None) -> Written:
    """A new store of the feed-forward entries of a model: a short name, a folder, a GGUF file or a hub id.

    If it was interrupted, the same call goes on where it was.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a store with other entries.
    """
    began, encoder = time.monotonic(), f"{MADE_BY}:{model}"
    converted: Any = from_ffn(load_model(model, tokenizer=False))
    base = converted.knowledge
    with Store.open(uri, dim=base.entry_dim, num_thresholds=base.num_thresholds, search="exact") as store:
        stats = store.stats()
        begun = set(stats.encoders) == {encoder} and set(stats.versions) == {1} and stats.count < base.num_entries
        if stats.count and not begun:
            raise ValueError(_taken(uri, stats.count))
        before = set(store.ids().tolist())
        save_entries(converted, store, name=model, progress=progress)
        ids = tuple(key for key in store.ids().tolist() if key not in before)
        return Written(uri, store.backend, len(store), store.dim, ids, encoder, (), time.monotonic() - began)


def insert(
    store: Store,
    new: Sequence[Record],
    *,
    ids: Indices | None = None,
    encoder: str | None = None,
    progress: Progress | None = None,
) -> Written:
    """Add texts to a store, embedded as its entries are.

    Args:
        store: of texts.
        new: what `records` or `read_records` returns.
        ids: new ones; by default the next integers above all that the store has held.
        encoder: its name; by default the one that made the entries.
        progress: called as progress(done, total, what).

    Raises:
        ValueError: ids that exist, values in a store of whole texts, or as `TextEncoder.of`.
    """
    began = time.monotonic()
    taken = [] if ids is None else [key for key in _one_id_each(ids, new) if key in store]
    if taken:
        raise ValueError(f"entries {preview(taken)} exist already: correct them, or choose other ids")
    return _write(store, _encoder(store, new, encoder), new, began, ids=ids, progress=progress)


def correct(
    store: Store,
    ids: Sequence[int],
    new: Sequence[Record],
    *,
    encoder: str | None = None,
    progress: Progress | None = None,
) -> Written:
    """Replace the texts of entries that exist, one for each id; each keeps its id and gets the next version.

    Raises:
        ValueError: unknown ids, values in a store of whole texts, or as `TextEncoder.of`. Nothing is written.
    """
    began = time.monotonic()
    unknown = [key for key in _one_id_each(ids, new) if key not in store]
    if unknown:
        raise ValueError(
            f"{store.uri} has no entries with ids {preview(unknown)} to correct; a new entry gets its id by itself"
        )
    return _write(store, _encoder(store, new, encoder), new, began, ids=ids, replace=True, progress=progress)


def search(
    store: Store,
    query: str,
    k: int = 10,
    *,
    above: float | None = None,
    mode: Mode | None = None,
    encoder: str | None = None,
) -> Matches:
    """The k entries of a store that are nearest to a text.

    Args:
        store: of texts.
        query: the text.
        k: at most so many entries.
        above: only those that score more.
        mode: "exact" or "approximate"; by default as the store was opened.
        encoder: its name; by default the one that made the entries.

    Raises:
        ValueError: an empty query, or as `TextEncoder.of`.
    """
    if not query.strip():
        raise ValueError("the query is empty")
    maker = TextEncoder.of(store, encoder)
    asked, version = maker.query(query), maker.version
    began = time.monotonic()
    near = store.search(asked, k, mode=mode) if above is None else store.range(asked, above, mode=mode)
    seconds = time.monotonic() - began
    others = sum(count for name, count in store.stats().encoders.items() if name != version)
    return Matches(
        store.uri, query, version, near.certificate.label, len(store), others, seconds, Match.of(store, near, k)
    )


def _write(
    store: Store,
    maker: TextEncoder,
    new: Sequence[Record],
    began: float,
    *,
    ids: Indices | None,
    replace: bool = False,
    progress: Progress | None,
) -> Written:
    """Embed and write, batch by batch."""
    version, written, cut = maker.version, list[int](), list[str]()
    for start in range(0, len(new), _WINDOW):
        batch = new[start : start + _WINDOW]
        texts = [record.text for record in batch]
        encoded = maker.encode(texts, None if progress is None else partial(_shifted, progress, start, len(new)))
        cut += [batch[place].place for place in encoded.truncated]
        chosen: Any = None if ids is None else np.asarray(ids)[start : start + _WINDOW]
        columns: dict[str, Any] = {
            "ids": chosen,
            "embeddings": encoded.embeddings,
            "texts": texts,
            "sources": [record.source for record in batch],
            "encoder": version,
        }
        if replace:
            store.upsert(**columns)
        written += (chosen if replace else store.insert(**columns)).tolist()
    seconds = time.monotonic() - began
    return Written(store.uri, store.backend, len(store), store.dim, tuple(written), version, tuple(cut), seconds)


def _shifted(progress: Progress, start: int, total: int, done: int, _: int, what: str) -> None:
    progress(start + done, total, what)


def _encoder(store: Store, new: Sequence[Record], name: str | None) -> TextEncoder:
    """The encoder of a store; of keys where there are values."""
    maker = TextEncoder.of(store, name)
    if maker.separator is None and any(SEPARATOR in record.text for record in new):
        if len(store):
            raise ValueError(
                f"the entries of {store.uri} are embedded whole, without values: put key and value into one text, or "
                "build a store from a .jsonl file with keys and values"
            )
        return TextEncoder(maker.name, separator=SEPARATOR)
    return maker


def _one_id_each(ids: Indices, new: Sequence[Record]) -> list[int]:
    listed = cast("list[int]", np.asarray(ids).tolist())
    if len(listed) != len(new):
        raise ValueError(f"give one id for each text: got {len(listed)} and {plural(len(new), 'text')}")
    return listed


def _taken(uri: str, count: int) -> str:
    held = plural(count, "entry", "entries")
    return f"{uri} holds {held} already: `attnflow knowledge insert` adds to it; build makes a new one"
