"""Batches of whole entries, column by column: what engines write and read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnflow._core.checks import IntArray
from attnflow.knowledge.store.entry import Entry

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Strings = npt.NDArray[Any]  # dtype object: str or None


@dataclass(frozen=True, eq=False)
class Rows:
    """Whole entries, column by column; times are microseconds since 1970, UTC.

    Attributes:
        ids: int64 [n], no two alike.
        vectors: [embedding | thresholds], float32 [n, dim + num_thresholds].
        texts: object [n], str or None.
        sources: likewise.
        encoders: likewise.
        versions: int64 [n].
        created: int64 [n].
        updated: int64 [n]; an id and its `updated` name one content.
    """

    ids: IntArray
    vectors: Floats
    texts: Strings
    sources: Strings
    encoders: Strings
    versions: IntArray
    created: IntArray
    updated: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def none(cls, width: int) -> Rows:
        """No rows."""
        numbers, objects = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=object)
        vectors = np.zeros((0, width), dtype=np.float32)
        return cls(numbers, vectors, objects, objects, objects, numbers, numbers, numbers)


class Stamped(NamedTuple):
    """The part of rows that a search needs: ids int64 [n], updated int64 [n], vectors float32 [n, width]."""

    ids: IntArray
    updated: IntArray
    vectors: Floats


def written(
    ids: IntArray, vectors: Floats, texts: Strings, sources: Strings, encoder: str | None, now: int, old: Rows
) -> Rows:
    """Rows to write now, where `old` are those of them that exist: they keep what is not given, and get a version more.

    `texts` and `sources` are filled in place.
    """
    count = len(ids)
    versions, created = np.ones(count, dtype=np.int64), np.full(count, now)
    if len(old):
        _, new, place = np.intersect1d(ids, old.ids, assume_unique=True, return_indices=True)
        versions[new], created[new] = old.versions[place] + 1, old.created[place]
        for new_texts, old_texts in ((texts, old.texts), (sources, old.sources)):
            absent = np.array([value is None for value in new_texts[new]], dtype=np.bool_)
            new_texts[new[absent]] = old_texts[place[absent]]
    encoders = np.full(count, encoder, dtype=object)
    return Rows(ids, vectors, texts, sources, encoders, versions, created, np.full(count, now))


def entries(rows: Rows, dim: int) -> list[Entry]:
    """One `Entry` for each row."""
    vectors = torch.from_numpy(rows.vectors)
    return [
        Entry(
            id=int(rows.ids[i]),
            text=rows.texts[i],
            source=rows.sources[i],
            version=int(rows.versions[i]),
            embedding=vectors[i, :dim].clone(),
            thresholds=vectors[i, dim:].clone(),
            encoder=rows.encoders[i],
            created=_EPOCH + timedelta(microseconds=int(rows.created[i])),
            updated=_EPOCH + timedelta(microseconds=int(rows.updated[i])),
        )
        for i in range(len(rows))
    ]
