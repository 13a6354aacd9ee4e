"""What a store gives back: entries, results of searches, statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

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
    """The entries that a search found, best first.

    Attributes:
        ids: int64 [queries, k], or [k] for a single query; -1 where there are fewer.
        scores: float32 of the same shape; -inf where there are fewer.
        certificate: what the search promises about the entries that it left out.
    """

    ids: Tensor
    scores: Tensor
    certificate: Certificate

    def only(self) -> Found:
        """The result of the only query, without its dimension."""
        active = self.certificate.active
        certificate = replace(
            self.certificate, last=self.certificate.last[0], active=None if active is None else active[0]
        )
        return Found(self.ids[0], self.scores[0], certificate)


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
    versions: Mapping[int, int]
    encoders: Mapping[str | None, int]
    snapshots: Sequence[str]
