"""What a store gives back: entries, results of searches, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from jaxtyping import Float32, Int64
from torch import Tensor

from attnflow.knowledge.certificate import Certificate


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of a store.

    Attributes:
        id: what it is called, for good.
        text: what it says, if that is known.
        source: where it comes from.
        version: 1 when inserted, and one more with every upsert.
        embedding: e, float32 [dim].
        thresholds: what is added to its score, one number per threshold column, float32 [num_thresholds].
        encoder: name and version of what made the embedding.
        created: when it was inserted, UTC.
        updated: when it was written last, UTC.
    """

    id: int
    text: str | None
    source: str | None
    version: int
    embedding: Tensor
    thresholds: Tensor
    encoder: str | None
    created: datetime
    updated: datetime


@dataclass(frozen=True, eq=False)
class Found:
    """The entries that a search found, best first; -1 and -inf where there were fewer.

    `found[i]` and iteration give what one query found, without that padding.

    Attributes:
        ids: of the entries.
        scores: query . embedding + threshold.
        certificate: what the search promises about the entries that it left out.
    """

    ids: Int64[Tensor, "*queries found"]
    scores: Float32[Tensor, "*queries found"]
    certificate: Certificate

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, query: int) -> Found:
        if self.ids.ndim == 1:
            raise TypeError("this is what one query found: read .ids and .scores, or search for queries [n, dim]")
        found = self.ids[query] >= 0
        return Found(self.ids[query][found], self.scores[query][found], self.certificate[query])

    def __iter__(self) -> Iterator[Found]:
        return (self[query] for query in range(len(self)))


@dataclass(frozen=True)
class StoreStats:
    """A store in numbers.

    Attributes:
        uri: where it is.
        backend: "lancedb", "memory" or "milvus".
        count: number of entries.
        dim: width of an embedding.
        num_thresholds: threshold columns.
        bytes_on_disk: of its files with snapshots and old versions; None where they are on a server.
        mode: how it is searched: "exact" or "approximate".
        reason: why, with what was measured.
        versions: number of entries by version.
        encoders: number of entries by encoder.
        snapshots: their names, oldest first.
    """

    uri: str
    backend: str
    count: int
    dim: int
    num_thresholds: int
    bytes_on_disk: int | None
    mode: str
    reason: str
    versions: Mapping[int, int]
    encoders: Mapping[str | None, int]
    snapshots: Sequence[str]
