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
from attnflow.knowledge.records import SEPARATOR, Record, Split, read_records, readable
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


def build(
    uri: str,
    file: str | Path,
    encoder: str = "minilm",
    *,
    split: Split = "line",
    progress: Progress | None = None,
) -> Written:
    """A new store of texts. If it was interrupted, the same call goes on where it was.

    Raises:
        FileNotFoundError: no such file or encoder.
        ValueError: no text, a model that is no encoder, or a store with other entries.
    """
    new = read_records(file, split)
    separator = SEPARATOR if any(SEPARATOR in record.text for record in new) else None
    maker = TextEncoder(encoder, separator=separator)
    with Store.open(uri, dim=maker.dim) as store:
        done, version = len(store), maker.version
        if done:  # of an interrupted build, the first records
            ids = store.ids().tolist()
            held = store.get(ids) if done < len(new) and ids == list(range(done)) else []
            same = [(record.text, record.source, version, 1) for record in new[:done]]
            if [(entry.text, entry.source, entry.encoder, entry.version) for entry in held] != same:
                raise ValueError(_taken(store))
        return _write(store, maker, new[done:], range(done, len(new)), progress)


def build_from_model(uri: str, model: str, *, progress: Progress | None = None) -> Written:
    """A new store of the feed-forward entries of a model: a short name, a folder, a GGUF file or a hub id.

    If it was interrupted, the same call goes on where it was.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a store with other entries.
    """
    converted: Any = from_ffn(load_model(model, tokenizer=False))
    base, encoder = converted.knowledge, f"{MADE_BY}:{model}"
    with Store.open(uri, dim=base.entry_dim, num_thresholds=base.num_thresholds) as store:
        stats, before = store.stats(), set(store.ids().tolist())
        begun = set(stats.encoders) == {encoder} and set(stats.versions) == {1} and stats.count < base.num_entries
        if before and not begun:
            raise ValueError(_taken(store))
        save_entries(converted, store, name=model, progress=progress)
        ids = tuple(key for key in store.ids().tolist() if key not in before)
        return Written(uri, len(store), store.dim, ids, encoder, ())


def insert(
    store: Store,
    new: Sequence[Record],
    ids: Sequence[int] | None = None,
    *,
    correct: bool = False,
    encoder: str | None = None,
    progress: Progress | None = None,
) -> Written:
    """Add texts to a store, embedded as its entries are; or correct entries, which get the next version.

    There is an id for each text; by default they are the next integers. With `correct`, they are of entries that exist.
    `encoder` names another one than that which made the entries.

    Raises:
        ValueError: ids that exist, or do not, values in a store of whole texts, or as `TextEncoder.of`. Nothing is
            written.
    """
    if ids is not None:
        if len(ids) != len(new):
            raise ValueError(f"give one id for each text: got {len(ids)} and {plural(len(new), 'text')}")
        wrong = [key for key in ids if (key in store) != correct]
        if wrong and correct:
            raise ValueError(
                f"{store.uri} has no entries with ids {preview(wrong)} to correct; a new entry gets its id by itself"
            )
        if wrong:
            raise ValueError(f"entries {preview(wrong)} exist already: correct them, or choose other ids")
    maker = TextEncoder.of(store, encoder)
    if maker.separator is None and any(SEPARATOR in record.text for record in new):
        if len(store):
            raise ValueError(
                f"the entries of {store.uri} are embedded whole, without values: put key and value into one text, or "
                "build a store from a .jsonl file with keys and values"
            )
        maker = TextEncoder(maker.name, separator=SEPARATOR)
    return _write(store, maker, new, ids, progress, correct)


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
    store: Store,
    maker: TextEncoder,
    new: Sequence[Record],
    ids: Sequence[int] | None,
    progress: Progress | None,
    correct: bool = False,
) -> Written:
    version, written, cut = maker.version, list[int](), list[str]()
    for start in range(0, len(new), _WINDOW):
        batch = new[start : start + _WINDOW]
        texts = [record.text for record in batch]
        shown = None if progress is None else partial(_shifted, progress, start, len(new))
        embeddings, truncated = maker.encode(texts, shown)
        cut += [batch[place].place for place in truncated]
        columns: dict[str, Any] = {
            "ids": None if ids is None else list(ids[start : start + _WINDOW]),
            "embeddings": embeddings,
            "texts": texts,
            "sources": [record.source for record in batch],
            "encoder": version,
        }
        if correct:
            store.upsert(**columns)
        written += columns["ids"] if correct else store.insert(**columns).tolist()
    return Written(store.uri, len(store), store.dim, tuple(written), version, tuple(cut))


def _shifted(progress: Progress, start: int, total: int, done: int, _: int, what: str) -> None:
    progress(start + done, total, what)


def _taken(store: Store) -> str:
    held = plural(len(store), "entry", "entries")
    return f"{store.uri} holds {held} already: `attnflow knowledge insert` adds to it; build makes a new one"
