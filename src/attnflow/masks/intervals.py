"""Sets of keys per query as sorted, disjoint, half-open intervals: the internal form of every mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray

BoolArray = npt.NDArray[np.bool_]


def ragged(starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
    """Ragged ranges end to end: (t, value) for each value in `[starts[t], starts[t] + lengths[t])`, for each t."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return owner, np.arange(len(owner)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def offsets(lengths: npt.NDArray[Any]) -> IntArray:
    """Start of each part when parts of these lengths lie end to end, and the end: int64[parts + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class IntervalRows:
    """Row r holds `[starts[t], ends[t])` for t in `[indptr[r], indptr[r + 1])`, sorted, never touching."""

    indptr: IntArray
    starts: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]
    num_keys: int

    def __post_init__(self) -> None:
        for array in (self.indptr, self.starts, self.ends):
            array.setflags(write=False)

    @classmethod
    def build(cls, rows: object, starts: object, ends: object, num_rows: int, num_keys: int) -> IntervalRows:
        """From any intervals `[starts[t], ends[t])` of row `rows[t]`, clipped to the keys and merged."""
        return cls.of(num_rows, num_keys, (rows, starts, ends))

    @classmethod
    def of(cls, num_rows: int, num_keys: int, *groups: tuple[object, object, object]) -> IntervalRows:
        """From groups of intervals (rows, starts, ends), each broadcast; clipped to the keys and merged."""
        columns = [np.broadcast_arrays(*(np.asarray(values, np.int64) for values in group)) for group in groups]
        row, start, end = (np.concatenate([np.ravel(part) for part in parts]) for parts in zip(*columns, strict=True))
        start, end = np.maximum(start, 0), np.minimum(end, num_keys)
        keep = start < end
        offset = row[keep] * (num_keys + 1)
        return cls._from_line(*_union(start[keep] + offset, end[keep] + offset), num_rows, num_keys)

    @classmethod
    def from_bool(cls, table: BoolArray) -> IntervalRows:
        num_rows, num_keys = table.shape
        edges = np.zeros((num_rows, num_keys + 2), dtype=np.int8)
        edges[:, 1:-1] = table
        step = np.diff(edges, axis=1)  # shape [rows, keys + 1]: flat positions are already those of the line
        return cls._from_line(np.flatnonzero(step == 1), np.flatnonzero(step == -1), num_rows, num_keys)

    @classmethod
    def stack(cls, parts: Sequence[IntervalRows], num_keys: int) -> IntervalRows:
        empty = np.zeros(0, np.int32)
        sizes = np.concatenate([empty, *(np.diff(part.indptr) for part in parts)])
        starts, ends = (np.concatenate([empty, *(getattr(p, side) for p in parts)]) for side in ("starts", "ends"))
        return cls(offsets(sizes), starts, ends, num_keys)

    @classmethod
    def _from_line(cls, starts: IntArray, ends: IntArray, num_rows: int, num_keys: int) -> IntervalRows:
        stride = num_keys + 1
        indptr = np.searchsorted(starts, np.arange(num_rows + 1, dtype=np.int64) * stride).astype(np.int64)
        offset = np.repeat(np.arange(num_rows, dtype=np.int64) * stride, np.diff(indptr))
        return cls(indptr, (starts - offset).astype(np.int32), (ends - offset).astype(np.int32), num_keys)

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    def equals(self, other: IntervalRows) -> bool:
        mine, others = ((rows.indptr, rows.starts, rows.ends) for rows in (self, other))
        return all(map(np.array_equal, mine, others))

    def row_index(self) -> IntArray:
        """The row of each interval, int64[intervals]."""
        return np.repeat(np.arange(self.num_rows, dtype=np.int64), np.diff(self.indptr))

    def width(self) -> int:
        return int(np.diff(self.indptr).max(initial=0))

    def counts(self) -> IntArray:
        """Number of keys in each row, int64[rows]."""
        return self.sums(np.arange(self.num_keys + 1))

    def sums(self, upto: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sums values over the keys of each row; `upto[k]` is the sum over the first k keys."""
        total = np.concatenate([upto[:1], np.cumsum(upto[self.ends] - upto[self.starts], dtype=upto.dtype)])
        return total[self.indptr[1:]] - total[self.indptr[:-1]]

    def cover(self, weight: IntArray | None = None) -> IntArray:
        """How many rows hold each key, or the sum of their intervals' weights: exact below 2^53, O(intervals)."""
        size = self.num_keys + 1
        begun, ended = (np.bincount(at, weight, size).astype(np.int64) for at in (self.starts, self.ends))
        return np.cumsum(begun - ended)[:-1]

    def row(self, index: int) -> list[tuple[int, int]]:
        part = slice(int(self.indptr[index]), int(self.indptr[index + 1]))
        return list(zip(self.starts[part].tolist(), self.ends[part].tolist(), strict=True))

    def holds(self, rows: IntArray, keys: IntArray) -> BoolArray:
        """bool[pairs]: whether row `rows[t]` holds `keys[t]`. Cost: O(intervals + pairs log intervals)."""
        if not len(self.starts):
            return np.zeros(len(rows), dtype=np.bool_)
        starts, ends = self._line()
        point = rows * (self.num_keys + 1) + keys
        return np.append(ends, -1)[np.searchsorted(starts, point, side="right") - 1] > point

    def take(self, rows: IntArray) -> IntervalRows:
        length = np.diff(self.indptr)[rows]
        source = ragged(self.indptr[:-1][rows], length)[1]
        return IntervalRows(offsets(length), self.starts[source], self.ends[source], self.num_keys)

    def in_blocks(self, block: int) -> IntervalRows:
        """Each row and each key stand for `block` neighbours."""
        rows = self.take(np.repeat(np.arange(self.num_rows), block))
        return IntervalRows(
            rows.indptr, rows.starts * np.int32(block), rows.ends * np.int32(block), rows.num_keys * block
        )

    def with_diagonal(self) -> IntervalRows:
        """Adds to each row its own number; rows must be as many as keys."""
        node = np.arange(self.num_rows)
        if self.holds(node, node).all():
            return self
        return self.union(IntervalRows.build(node, node, node + 1, self.num_rows, self.num_keys))

    def union(self, other: IntervalRows) -> IntervalRows:
        starts, ends = (np.concatenate(parts) for parts in zip(self._line(), other._line(), strict=True))
        return self._from_line(*_union(starts, ends), self.num_rows, self.num_keys)

    def intersection(self, other: IntervalRows) -> IntervalRows:
        (starts, ends), (other_starts, other_ends) = self._line(), other._line()
        first = np.searchsorted(other_ends, starts, side="right")  # the first that ends behind the start
        count = np.maximum(np.searchsorted(other_starts, ends) - first, 0)
        mine, its = ragged(first, count)
        starts, ends = np.maximum(starts[mine], other_starts[its]), np.minimum(ends[mine], other_ends[its])
        return self._from_line(starts, ends, self.num_rows, self.num_keys)

    def complement(self) -> IntervalRows:
        starts, ends = self._line()
        base = np.arange(self.num_rows, dtype=np.int64) * (self.num_keys + 1)
        gap_starts = np.sort(np.concatenate([base, ends]))
        gap_ends = np.sort(np.concatenate([starts, base + self.num_keys]))
        keep = gap_starts < gap_ends
        return self._from_line(gap_starts[keep], gap_ends[keep], self.num_rows, self.num_keys)

    def to_bool(self, rows: IntArray | slice | None = None) -> BoolArray:
        """Dense table [rows, keys] of the chosen rows (default all). Cost: one byte per pair."""
        part = self if rows is None else self.take(np.arange(self.num_rows)[rows] if isinstance(rows, slice) else rows)
        step = np.zeros((part.num_rows, part.num_keys + 1), dtype=np.int8)
        starts, ends = part._line()
        flat = step.reshape(-1)
        flat[starts] = 1
        flat[ends] = -1  # never collides with a start: intervals of a row do not touch, rows lie apart
        return np.cumsum(step, axis=1, dtype=np.int8)[:, :-1].view(np.bool_)

    def keys_of(self, index: int) -> IntArray:
        part = slice(int(self.indptr[index]), int(self.indptr[index + 1]))
        return ragged(self.starts[part], self.ends[part] - self.starts[part])[1]

    def expand(self) -> tuple[IntArray, IntArray]:
        """Every (row, key) pair, sorted. Cost: O(pairs)."""
        interval, keys = ragged(self.starts, (self.ends - self.starts).astype(np.int64))
        return self.row_index()[interval], keys

    def _line(self) -> tuple[IntArray, IntArray]:
        offset = self.row_index() * (self.num_keys + 1)
        return self.starts + offset, self.ends + offset


def _union(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The maximal stretches of the line that intervals cover; those that touch are merged."""
    if not len(starts):
        return starts, ends
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")  # linear in the runs that ascend already
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    apart = starts[1:] > reach[:-1]
    return starts[np.append(True, apart)], reach[np.append(apart, True)]
