"""Entries one by one, as a store gives them back, and column by column, as backends keep them; a store in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow._core.markup import plural, shorten
from attnflow._core.results import Result

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Strings = npt.NDArray[Any]  # dtype object: str or None

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBERS: Final = ("id", "version", "created", "updated")
_TEXTS: Final = ("text", "source", "encoder")


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
        reason: why; where searches are approximate, with the recall that they have now, on queries like all entries,
            like the latest, and unlike them.
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


@dataclass(frozen=True, eq=False)
class Rows:
    """Whole entries, column by column; times are microseconds since 1970, UTC.

    Attributes:
        id: int64 [n], no two alike.
        text: object [n], str or None.
        source: likewise.
        encoder: likewise.
        version: int64 [n].
        created: int64 [n].
        updated: int64 [n]; an id and its `updated` name one content.
        vector: [embedding | thresholds], float32 [n, dim + num_thresholds].
    """

    id: IntArray
    text: Strings
    source: Strings
    encoder: Strings
    version: IntArray
    created: IntArray
    updated: IntArray
    vector: Floats

    def __len__(self) -> int:
        return len(self.id)

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], width: int) -> Rows:
        """From one mapping for each entry."""
        columns = {name: column(records, name) for name in _NUMBERS}
        columns |= {name: column(records, name, object) for name in _TEXTS}
        return cls(**columns, vector=column(records, "vector", np.float32).reshape(-1, width))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """One after the other; at least one part."""
        return cls(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})

    def take(self, places: Sequence[int]) -> Rows:
        """Some of them, in this order."""
        return Rows(**{name: values[places] for name, values in vars(self).items()})

    def records(self) -> list[dict[str, Any]]:
        """One dictionary for each entry; vectors are views."""
        columns = {name: getattr(self, name).tolist() for name in (*_NUMBERS, *_TEXTS)} | {"vector": list(self.vector)}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def entries(self, dim: int) -> list[Entry]:
        """One `Entry` for each row."""
        records = self.records()
        for record in records:
            vector = torch.from_numpy(record.pop("vector"))
            record |= {"embedding": vector[:dim].clone(), "thresholds": vector[dim:].clone()}
            record |= {name: _EPOCH + timedelta(microseconds=record[name]) for name in ("created", "updated")}
        return [Entry(**record) for record in records]

    def after(self, old: Rows) -> Rows:
        """These rows, new ones, over `old`, those that exist: they keep what is not given, and get a version more."""
        _, new, place = np.intersect1d(self.id, old.id, assume_unique=True, return_indices=True)
        version, created, text, source = (one.copy() for one in (self.version, self.created, self.text, self.source))
        version[new], created[new] = old.version[place] + 1, old.created[place]
        for column, before in ((text, old.text), (source, old.source)):
            absent = np.array([value is None for value in column[new]], dtype=np.bool_)
            column[new[absent]] = before[place[absent]]
        return replace(self, version=version, created=created, text=text, source=source)


class Stamped(NamedTuple):
    """The part of rows that a search needs: ids, updated and checks int64 [n], vectors float32 [n, width]."""

    ids: IntArray
    updated: IntArray
    vectors: Floats
    checks: IntArray


class Summary(NamedTuple):
    """Counts of rows by version and by encoder, and bytes on disk (None: on a server)."""

    versions: Mapping[int, int]
    encoders: Mapping[str | None, int]
    bytes_on_disk: int | None


def column(records: Sequence[Mapping[str, Any]], name: str, kind: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
    """One field of all records."""
    return np.array([record[name] for record in records], dtype=kind)
