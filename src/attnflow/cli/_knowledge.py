"""What the `attnflow knowledge` commands do with a store."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnflow._core.checks import preview
from attnflow._core.markup import plural, shorten
from attnflow._core.tables import aligned
from attnflow.cli import _models, _stores
from attnflow.cli._output import BadUsage, Spinner
from attnflow.cli._stores import Record

if TYPE_CHECKING:
    from attnflow.knowledge.hf.encoder import TextEncoder
    from attnflow.knowledge.monitor.duplication import Duplicates
    from attnflow.knowledge.monitor.reembedding import Drift, Reembedded
    from attnflow.knowledge.store import Store, StoreStats


_GROUPS: Final = 20  # of duplicates that are shown


@dataclass(frozen=True)
class Built:
    """A store that was filled.

    Attributes:
        store: where it is.
        backend: "lancedb" or "milvus".
        entries: that it holds.
        dim: width of an embedding.
        written: entries that this run wrote; fewer where it went on after an interruption.
        encoder: version of what made the embeddings.
        truncated: sources of the texts whose ends are not embedded.
        seconds: that it took.
    """

    store: str
    backend: str
    entries: int
    dim: int
    written: int
    encoder: str
    truncated: tuple[str | None, ...]
    seconds: float

    @property
    def line(self) -> str:
        """In one line."""
        before = self.entries - self.written
        again = f" ({before:,} were there already)" if before else ""
        return (
            f"{self.store}: {plural(self.entries, 'entry', 'entries')} of width {self.dim} by {self.encoder}{again}, "
            f"in {self.seconds:.1f} s"
        )


def build(uri: str, file: Path, encoder: str, split: str, spinner: Spinner) -> Built:
    """A new store of a file's texts; the same call goes on where it was interrupted.

    Raises:
        BadUsage: no such file or encoder, or a store with other entries.
    """
    began, new = time.monotonic(), _stores.records(file, split, None)
    separator = _stores.SEPARATOR if any(_stores.SEPARATOR in record.text for record in new) else None
    spinner(f"loading {encoder}")
    maker = _stores.load_encoder(encoder, separator)
    with _stores.opened(uri, dim=maker.dim, read_only=False, search="exact") as store:
        done = _begun(store, new, maker)
        ids = range(done, len(new))
        written, cut = _stores.add(store, maker, new[done:], spinner, ids)
        _stores.note_truncated(cut, new[done:], maker)
        sources = tuple(new[done + place].source for place in cut)
        seconds = time.monotonic() - began
        return Built(uri, store.backend, len(store), store.dim, len(written), maker.version, sources, seconds)


def build_from_model(uri: str, name: str, spinner: Spinner) -> Built:
    """A new store of a model's feed-forward entries; the same call goes on where it was interrupted.

    Raises:
        BadUsage: no such model, or a store with other entries.
    """
    from attnflow.knowledge.hf.convert import from_ffn
    from attnflow.knowledge.hf.sync import save_entries

    began = time.monotonic()
    model: Any = from_ffn(_models.load(name, tokenizer=False).model)
    base = model.knowledge
    widths = {"dim": base.entry_dim, "num_thresholds": base.num_layers}

    def progress(done: int, total: int) -> None:
        spinner(f"writing {done:,} of {total:,}")

    with _stores.opened(uri, **widths, read_only=False, search="exact") as store:
        stats, encoder = store.stats(), f"from_ffn:{name}"
        if stats.count and (
            set(stats.encoders) != {encoder} or set(stats.versions) != {1} or stats.count >= base.num_entries
        ):
            raise BadUsage(_taken(uri, stats.count))
        changes = save_entries(model, store, name=name, progress=progress)
        seconds = time.monotonic() - began
        return Built(uri, store.backend, len(store), store.dim, changes.inserted, encoder, (), seconds)


@dataclass(frozen=True)
class Hit:
    """An entry that a search found."""

    id: int
    score: float
    text: str | None
    source: str | None
    version: int
    encoder: str | None


@dataclass(frozen=True)
class Search:
    """The entries that a search found, best first.

    Attributes:
        encoder: what embedded the query.
        label: "exact", or "approximate": others may score more.
        total: entries that were searched.
        other_encoders: how many of them another encoder made: their scores do not compare.
        seconds: of the search alone.
        results: what was found.
    """

    encoder: str
    label: str
    total: int
    other_encoders: int
    seconds: float
    results: tuple[Hit, ...]

    def lines(self) -> list[str]:
        """For the terminal."""
        about = f"{plural(len(self.results), 'entry', 'entries')} of {self.total:,}, {self.label} search"
        said = [f"{about} in {1000 * self.seconds:.1f} ms, scores by {self.encoder}"]
        rows = [
            [str(hit.id), f"{hit.score:.3f}", shorten(_stores.shown(hit.text), 100), shorten(hit.source or "", 40)]
            for hit in self.results
        ]
        return [*said, *([aligned([["id", "score", "text", "source"], *rows], left=[2, 3])] if rows else [])]


def search(
    uri: str, query: str, k: int, least: float | None, mode: str | None, encoder: str | None, spinner: Spinner
) -> Search:
    """The entries of a store that are nearest to a text.

    Raises:
        BadUsage: no such store, or its encoder cannot be found.
    """
    if not query.strip():
        raise BadUsage("the query is empty")
    how: Any = mode or "auto"
    with _stores.opened(uri, search=how) as store:
        maker = _stores.encoder_for(store, encoder, spinner)
        asked, version = maker([query])[0], maker.version
        began = time.monotonic()
        found = store.search(asked, k) if least is None else store.range(asked, least)
        seconds = time.monotonic() - began
        pairs = [(int(i), float(s)) for i, s in zip(found.ids, found.scores, strict=True) if int(i) >= 0][:k]
        entries = store.get([i for i, _ in pairs])
        hits = tuple(
            Hit(e.id, score, e.text, e.source, e.version, e.encoder)
            for e, (_, score) in zip(entries, pairs, strict=True)
        )
        return Search(version, found.certificate.label, len(store), _stores.others(store, version), seconds, hits)


def insert(
    uri: str, new: Sequence[Record], ids: Sequence[int] | None, encoder: str | None, spinner: Spinner
) -> tuple[list[int], str, int]:
    """(ids, encoder version, entries of the store now): add texts, or correct the entries of ids.

    Raises:
        BadUsage: no such store or encoder, or another number of ids than of texts.
    """
    if ids is not None and len(ids) != len(new):
        raise BadUsage(f"give one --id for each text: got {len(ids)} and {plural(len(new), 'text')}")
    if not _stores.exists(uri):
        raise BadUsage(f"there is no store at {uri}: `attnflow knowledge build {uri} FILE` makes one")
    with _stores.opened(uri, read_only=False, search="exact") as store:
        maker = _stores.encoder_for(store, encoder, spinner)
        if any(_stores.SEPARATOR in record.text for record in new) and maker.separator is None:
            maker = _with_keys(store, maker)
        written, cut = _stores.add(store, maker, new, spinner, ids)
        _stores.note_truncated(cut, new, maker)
        return written, maker.version, len(store)


def delete(uri: str, ids: Sequence[int]) -> int:
    """Entries left after some were deleted: all of these, or none if one is unknown.

    Raises:
        BadUsage: no such store, or unknown ids.
    """
    if not _stores.exists(uri):
        raise BadUsage(f"there is no store at {uri}")
    with _stores.opened(uri, read_only=False, search="exact") as store:
        store.delete(ids)
        return len(store)


@dataclass(frozen=True)
class Stats:
    """A store in numbers, with what was asked for besides.

    Attributes:
        store: the numbers.
        duplicates: groups of entries that say the same, or None.
        texts: of the first entry of each of the first groups.
        drift: or None.
    """

    store: StoreStats
    duplicates: Duplicates | None
    texts: tuple[str | None, ...]
    drift: Drift | None

    @property
    def found(self) -> bool:
        """Whether there are duplicates, or entries have drifted."""
        return bool(self.duplicates and self.duplicates.groups) or bool(self.drift and not self.drift.ok)

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        store = asdict(self.store)
        drift = self.drift and asdict(self.drift)
        return {**store, "duplicates": self.duplicates and asdict(self.duplicates), "drift": drift}

    def lines(self) -> list[str]:
        """For the terminal."""
        one = self.store
        size = "" if one.bytes_on_disk is None else f", {one.bytes_on_disk / 2**10:,.0f} KiB"
        columns = f" and {plural(one.num_thresholds, 'threshold column')}" if one.num_thresholds else ""
        said = [
            f"{one.uri} ({one.backend}): {plural(one.count, 'entry', 'entries')} of width {one.dim}{columns}{size}",
            f"search     {one.mode}: {one.reason}",
            *(f"made by    {name or '(unknown)'}: {count:,}" for name, count in sorted_counts(one.encoders)),
            "versions   " + (", ".join(f"{v}: {n:,}" for v, n in sorted(one.versions.items())) or "none"),
            "snapshots  " + (", ".join(one.snapshots) or "none"),
        ]
        if self.duplicates is not None:
            said += ["", f"duplicates {self.duplicates.summary}"]
            rows = [
                [str(len(group)), preview(group, 6), shorten(_stores.shown(text), 60)]
                for group, text in zip(self.duplicates.groups, self.texts, strict=False)
            ]
            more = len(self.duplicates.groups) - len(rows)
            said += [aligned([["entries", "ids", "text of the first"], *rows], left=[1, 2])] if rows else []
            said += [f"and {plural(more, 'more group')}"] if more else []
        if self.drift is not None:
            said += ["", f"drift {self.drift}"]
        return said


def stats(
    uri: str, threshold: float | None, drifting: bool, encoder: str | None, sample: int, spinner: Spinner
) -> Stats:
    """A store in numbers; with duplicates where a threshold is given, and with drift where asked for.

    Raises:
        BadUsage: no such store or encoder.
    """
    from attnflow.knowledge.monitor.duplication import duplicates
    from attnflow.knowledge.monitor.reembedding import drift

    def progress(done: int, total: int) -> None:
        spinner(f"comparing {done:,} of {total:,}")

    with _stores.opened(uri) as store:
        same = None if threshold is None else duplicates(store, threshold, progress=progress)
        moved = None
        if drifting:
            maker = _stores.encoder_for(store, encoder, spinner, fresh=True)
            spinner("embedding a sample")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # texts that are too long were reported when they were written
                moved = drift(store, maker, sample)
        first = [group[0] for group in same.groups[:_GROUPS]] if same else []
        texts = tuple(entry.text for entry in store.get(first))
        return Stats(store.stats(), same, texts, moved)


def reembed(uri: str, encoder: str | None, spinner: Spinner) -> Reembedded:
    """Embed anew what another encoder version made.

    Raises:
        BadUsage: no such store or encoder.
    """
    from attnflow.knowledge.monitor.reembedding import reembed as embed

    if not _stores.exists(uri):
        raise BadUsage(f"there is no store at {uri}")

    def progress(done: int, total: int) -> None:
        spinner(f"embedding {done:,} of {total:,}")

    with _stores.opened(uri, read_only=False, search="exact") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return embed(store, _stores.encoder_for(store, encoder, spinner, fresh=True), progress=progress)


def sorted_counts(counts: Any) -> list[tuple[str | None, int]]:
    """The most frequent first."""
    return sorted(counts.items(), key=lambda item: -item[1])


def _begun(store: Store, new: Sequence[Record], maker: TextEncoder) -> int:
    """How many of the entries an interrupted run has written."""
    done = len(store)
    if not done:
        return 0
    ids = store.ids().tolist()
    held = store.get(ids) if done <= len(new) and ids == list(range(done)) else []
    same = [(e.text, e.source, e.encoder, e.version) for e in held] == [
        (record.text, record.source, maker.version, 1) for record in new[:done]
    ]
    if not same or done == len(new):
        raise BadUsage(_taken(store.uri, done))
    return done


def _taken(uri: str, count: int) -> str:
    held = plural(count, "entry", "entries")
    return f"{uri} holds {held} already: `attnflow knowledge insert` adds to it; build makes a new one"


def _with_keys(store: Store, maker: TextEncoder) -> TextEncoder:
    """An encoder of keys, if nothing was made by one of whole texts."""
    if len(store):
        raise BadUsage(
            f"the entries of {store.uri} are embedded whole, without values: put key and value into one text, or build "
            "a store from a .jsonl file with keys and values"
        )
    return _stores.load_encoder(maker.name, _stores.SEPARATOR)
