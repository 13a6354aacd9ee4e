"""Embeddings of a store against the encoder that would make them now: how far they are off, and making them anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from attnflow._core.checks import IntArray, index_array, integer, preview
from attnflow._core.markup import aligned
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.encoder import Encoder
from attnflow.knowledge.store import Entry, Store

SAME: Final = 0.999  # the same encoder reproduces an embedding to rounding, in half precision to about this cosine
_SCAN: Final = 1024  # entries that are read from the store at once
_WORST: Final = 5


@dataclass(frozen=True)
class VersionDrift:
    """The entries that one encoder version made, against the present encoder.

    Attributes:
        encoder: the version that is stored with them; "": unknown.
        current: whether it is that of the present encoder.
        entries: how many there are.
        compared: how many were encoded again.
        without_text: of those that were looked at, how many have no text, and cannot be.
        mean: cosine between the stored embedding and the present one; None if none was compared.
        minimum: the least cosine.
        worst: ids of those with the least cosines, the least first.
    """

    encoder: str
    current: bool
    entries: int
    compared: int
    without_text: int
    mean: float | None
    minimum: float | None
    worst: tuple[int, ...]

    @property
    def drifted(self) -> bool:
        """Whether its embeddings are not those of the present encoder: another version, or other vectors."""
        return not self.current or (self.minimum is not None and self.minimum < SAME)


@dataclass(frozen=True)
class Drift(Result):
    """How far the embeddings of a store are from those of an encoder.

    Attributes:
        encoder: its version.
        versions: the entries by the version that is stored with them, the most frequent first.
    """

    encoder: str
    versions: tuple[VersionDrift, ...]

    @property
    def ok(self) -> bool:
        """Whether no entries have drifted."""
        return not any(one.drifted for one in self.versions)

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each version."""
        return [
            {**asdict(one), "worst": " ".join(map(str, one.worst)), "drifted": one.drifted} for one in self.versions
        ]

    def __str__(self) -> str:
        head = ["entries made by", "entries", "compared", "without text", "mean cosine", "least", ""]
        rows = [
            [
                one.encoder or "(unknown)",
                f"{one.entries:,}",
                f"{one.compared:,}",
                f"{one.without_text:,}",
                *("" if value is None else f"{value:.4f}" for value in (one.mean, one.minimum)),
                "drifted" if one.drifted else "",
            ]
            for one in self.versions
        ]
        return f"against {self.encoder}\n" + aligned([head, *rows], left=[0, 6])


@dataclass(frozen=True)
class Reembedded(Result):
    """What `reembed` did.

    Attributes:
        encoder: the version that all entries with a text now have.
        total: entries of the store.
        done: entries that were embedded anew.
        current: entries that had this version already.
        without_text: ids of the entries that have no text, and were left as they are.
    """

    encoder: str
    total: int
    done: int
    current: int
    without_text: tuple[int, ...]

    def __str__(self) -> str:
        said = f"{self.done:,} of {self.total:,} entries embedded anew by {self.encoder}; {self.current:,} were already"
        if self.without_text:
            count = len(self.without_text)
            said += f"; {count:,} have no text and were left as they are: {preview(self.without_text)}"
        return said


def drift(
    store: Store, encoder: Encoder, sample: int = 256, *, seed: int = 0, progress: Progress | None = None
) -> Drift:
    """Cosine between stored embeddings and those that an encoder makes of the same texts now, by encoder version.

    Entries of the present version whose cosine is low have a text that was changed without its embedding.

    Args:
        store: with texts.
        encoder: the present one.
        sample: at most so many entries of each version are encoded.
        seed: of the sample.
        progress: called as progress(done, total, what) after each version.

    Raises:
        ValueError: an encoder of another width.

    Cost: encoding the sample; entries are read in random order until it is complete.
    """
    integer("sample", sample, 1)
    _same_width(store, encoder)
    version, counts = encoder.version, dict(store.stats().encoders)
    chosen: dict[str, list[Entry]] = {name: [] for name in counts}
    empty = dict.fromkeys(counts, 0)
    wanted = {name: min(sample, count) for name, count in counts.items()}
    order = np.random.default_rng(seed).permutation(index_array("ids", store.ids()))
    for entries in _batches(store, order, _SCAN):
        for entry in entries:
            name = entry.encoder or ""
            if len(chosen[name]) + empty[name] >= wanted[name]:
                continue
            if entry.text:
                chosen[name].append(entry)
            else:
                empty[name] += 1
        if all(len(chosen[name]) + empty[name] >= wanted[name] for name in counts):
            break
    versions: list[VersionDrift] = []
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        entries = chosen[name]
        cosines = _cosines(entries, encoder)
        least = sorted(range(len(entries)), key=lambda place: cosines[place])
        versions.append(
            VersionDrift(
                name,
                name == version,
                count,
                len(entries),
                empty[name],
                sum(cosines) / len(cosines) if cosines else None,
                min(cosines, default=None),
                tuple(entries[place].id for place in least[:_WORST]),
            )
        )
        if progress is not None:
            progress(len(versions), len(counts), "versions")
    return Drift(version, tuple(versions))


def reembed(store: Store, encoder: Encoder, batch_size: int = 512, *, progress: Progress | None = None) -> Reembedded:
    """Embed anew, from their texts, all entries that another encoder version made.

    Each batch is one atomic write: killed at any moment and called again, it goes on with the entries that still have
    another version. Ids, texts, sources and thresholds stay; versions count up. Nothing else may write meanwhile.

    Args:
        store: open for writing.
        encoder: the present one.
        batch_size: entries of a write.
        progress: called as progress(done, total, what) after each batch of entries.

    Raises:
        ValueError: an encoder of another width, for which a new store has to be built.

    Cost: encoding; memory of one batch.
    """
    integer("batch_size", batch_size, 1)
    _same_width(store, encoder)
    version = encoder.version
    ids = np.sort(index_array("ids", store.ids()))
    done = current = seen = 0
    without: list[int] = []
    for entries in _batches(store, ids, batch_size):
        others = [entry for entry in entries if entry.encoder != version]
        texts = {entry.id: entry.text for entry in others if entry.text}
        if texts:
            store.upsert(ids=list(texts), embeddings=encoder(list(texts.values())), encoder=version)
        done, current, seen = done + len(texts), current + len(entries) - len(others), seen + len(entries)
        without += [entry.id for entry in others if not entry.text]
        if progress is not None:
            progress(seen, len(ids), "entries")
    return Reembedded(version, len(ids), done, current, tuple(without))


def _batches(store: Store, ids: IntArray, size: int) -> Iterator[list[Entry]]:
    for start in range(0, len(ids), size):
        yield store.get(ids[start : start + size])


def _cosines(entries: list[Entry], encoder: Encoder) -> list[float]:
    if not entries:
        return []
    now = encoder([entry.text or "" for entry in entries]).float().cpu()
    stored = torch.stack([entry.embedding for entry in entries])
    cosines: list[float] = functional.cosine_similarity(stored, now, dim=1).tolist()
    return cosines


def _same_width(store: Store, encoder: Encoder) -> None:
    if encoder.dim != store.dim:
        raise ValueError(
            f"{encoder.version} makes embeddings of width {encoder.dim}, and the store holds {store.dim}: build a new "
            "store from the texts"
        )
