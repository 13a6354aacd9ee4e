"""Embeddings of a store against the encoder that would make them now: how far they are off, and making them anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import IntArray, index_array, integer, preview
from attnflow._core.markup import aligned
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.store import Entry, Store

SAME: Final = 0.999  # the same encoder reproduces an embedding to rounding, in half precision to about this cosine
_SCAN: Final = 1024  # entries that are read from the store at once
_WORST: Final = 5


@runtime_checkable
class Encoder(Protocol):
    """Texts to embeddings: a pretrained sentence encoder, or a model that is trained jointly with the reader.

    The version names the encoder and its weights: two that embed differently have different versions. It is stored with
    each entry, so that a base knows which of its embeddings another encoder made.
    """

    @property
    def dim(self) -> int:
        """Width of an embedding."""
        ...

    @property
    def version(self) -> str:
        """See above."""
        ...

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "texts dim"]:
        """One embedding for each text."""
        ...


@dataclass(frozen=True)
class VersionDrift:
    """The entries that one encoder version made, against the present encoder."""

    encoder: str  # the version that is stored with them; "": unknown
    current: bool  # whether it is that of the present encoder
    entries: int  # how many there are
    compared: int  # how many were encoded again
    without_text: int  # of those that were looked at, how many have no text, and cannot be
    mean: float | None  # cosine between the stored embedding and the present one; None if none was compared
    minimum: float | None  # the least cosine
    worst: tuple[int, ...]  # ids of those with the least cosines, the least first

    @property
    def drifted(self) -> bool:
        """Whether its embeddings are not those of the present encoder: another version, or other vectors."""
        return not self.current or (self.minimum is not None and self.minimum < SAME)


@dataclass(frozen=True)
class Drift(Result):
    """How far the embeddings of a store are from those of an encoder, by stored version, the most frequent first."""

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
    """What `reembed` did: all entries with a text now have the version `encoder`.

    Of `total` entries, `done` were embedded anew, `current` had this version already, and those with the ids
    `without_text` have no text and were left as they are.
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
    same_width(store, encoder)
    version, counts = encoder.version, dict(store.stats().encoders)
    sampled: dict[str, list[Entry]] = {name: [] for name in counts}
    wanted = {name: min(sample, count) for name, count in counts.items()}
    order = np.random.default_rng(seed).permutation(index_array("ids", store.ids()))
    for entries in _batches(store, order, _SCAN):
        for entry in entries:
            if len(same := sampled[entry.encoder or ""]) < wanted[entry.encoder or ""]:
                same.append(entry)
        if all(len(sampled[name]) == wanted[name] for name in counts):
            break
    versions: list[VersionDrift] = []
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        entries = [entry for entry in sampled[name] if entry.text]
        least = sorted(zip(_cosines(entries, encoder), (entry.id for entry in entries), strict=True), key=itemgetter(0))
        mean = sum(cosine for cosine, _ in least) / len(least) if least else None
        minimum = least[0][0] if least else None
        worst = tuple(key for _, key in least[:_WORST])
        without = len(sampled[name]) - len(entries)
        versions.append(VersionDrift(name, name == version, count, len(entries), without, mean, minimum, worst))
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
    same_width(store, encoder)
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
    return functional.cosine_similarity(torch.stack([entry.embedding for entry in entries]), now, dim=1).tolist()


def same_width(store: Store, encoder: Encoder) -> None:
    """Refuse an encoder of another width than the store's."""
    if encoder.dim != store.dim:
        raise ValueError(
            f"{encoder.version} makes embeddings of width {encoder.dim}, and the store holds {store.dim}: build a new "
            "store from the texts"
        )
