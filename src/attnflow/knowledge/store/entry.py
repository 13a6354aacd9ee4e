"""What a store gives back: entries, and itself in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from torch import Tensor

from attnflow._core.markup import plural, shorten
from attnflow._core.results import Result


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

    def __repr__(self) -> str:
        text = "" if self.text is None else f" {shorten(self.text, 60)!r}"
        source = f", {self.source}" if self.source else ""
        return f"Entry({self.id}:{text}{source}, version {self.version}, width {len(self.embedding)})"


@dataclass(frozen=True)
class StoreStats(Result):
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
        encoders: number of entries by encoder; "" where none is recorded.
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
    encoders: Mapping[str, int]
    snapshots: tuple[str, ...]

    def __str__(self) -> str:
        size = "" if self.bytes_on_disk is None else f", {self.bytes_on_disk / 2**10:,.0f} KiB"
        columns = f" and {plural(self.num_thresholds, 'threshold column')}" if self.num_thresholds else ""
        held = f"{plural(self.count, 'entry', 'entries')} of width {self.dim}{columns}{size}"
        counts = sorted(self.encoders.items(), key=lambda item: -item[1])
        return "\n".join(
            [
                f"{self.uri} ({self.backend}): {held}",
                f"search     {self.mode}: {self.reason}",
                *(f"made by    {name or '(unknown)'}: {count:,}" for name, count in counts),
                "versions   " + (", ".join(f"{v}: {n:,}" for v, n in sorted(self.versions.items())) or "none"),
                "snapshots  " + (", ".join(self.snapshots) or "none"),
            ]
        )
