"""Boolean products of row intervals: the flow through two layers, in time and memory of the intervals.

A chain is a run of touching intervals in consecutive rows; over a range of these rows its union is one interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows, offsets, ragged

LONG: Final = 1 << 11  # positions from which on intervals, where they stay few, take less time than bits
_PIECES: Final = 1 << 20  # intervals that are sorted at a time


def stays_few(rows: IntervalRows) -> bool:
    return rows.num_rows > LONG and len(rows.starts) <= 32 * rows.num_rows


def reads_only_before(rows: IntervalRows) -> bool:
    """Whether a square relation with its diagonal is triangular: every key at or before its query."""
    return bool((rows.ends[rows.indptr[1:] - 1] == np.arange(rows.num_rows) + 1).all())


def room(rows: IntervalRows) -> int:
    """How many intervals a product of these rows may have before bit matrices take over."""
    return max(4 * (rows.num_rows + len(rows.starts)), 16 * rows.num_rows)


def compose(rows: IntervalRows, before: IntervalRows, limit: int) -> IntervalRows | None:
    """The Boolean product: row i is the union of the rows k of `before` over its keys k; None if over `limit`."""
    if not len(rows.starts) or not len(before.starts):
        empty = np.zeros(0, np.int64)
        return IntervalRows.build(empty, empty, empty, rows.num_rows, before.num_keys) if limit >= 0 else None
    chains, which = Chains.of(before), None
    starts, ends = rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    if len(starts) != rows.num_rows or (np.diff(rows.indptr) != 1).any():  # else row r has the r-th range
        ranges, which = np.unique(starts * (rows.num_keys + 1) + ends, return_inverse=True)
        starts, ends = np.divmod(ranges, rows.num_keys + 1)
    if chains.count(starts, ends).sum() > 4 * limit:
        return None
    unions = chains.unions(starts, ends)
    if which is None:
        return unions if len(unions.starts) <= limit else None
    return _gathered(rows.indptr, which, unions, limit)


def _gathered(indptr: IntArray, which: IntArray, unions: IntervalRows, limit: int) -> IntervalRows | None:
    """Row i is the union of the rows `which[indptr[i]:indptr[i + 1]]` of `unions`; None if over `limit`."""
    length = offsets(np.diff(unions.indptr)[which])
    parts: list[IntervalRows] = []
    total = 0
    for rows in pieces_at_a_time(length[indptr]):
        first, last = int(indptr[rows.start]), int(indptr[rows.stop])
        part = unions.take(which[first:last])
        row = np.repeat(np.arange(rows.stop - rows.start), np.diff(length[indptr[rows.start : rows.stop + 1]]))
        parts.append(IntervalRows.build(row, part.starts, part.ends, rows.stop - rows.start, unions.num_keys))
        total += len(parts[-1].starts)
        if total > limit:
            return None
    return IntervalRows.stack(parts, unions.num_keys)


def closure_of(rows: IntervalRows) -> IntervalRows | None:
    """The transitive closure of a square relation with its diagonal; None if a power takes too many intervals."""
    limit = room(rows)
    while True:
        square = compose(rows, rows, limit)
        if square is None or square.equals(rows):
            return square
        rows = square


@dataclass(frozen=True, eq=False)
class Chains:
    """The intervals of a relation by chain: each touches its predecessor, one row earlier."""

    rows: IntervalRows
    place: IntArray  # of each interval of `rows`, in `lows` and `highs`
    last: IntArray  # of each interval of `rows`: the place after the last of its chain
    head: IntArray  # of each chain: its first interval; their rows ascend
    head_row: IntArray
    lows: IntArray
    highs: IntArray
    ascending: tuple[bool, bool]  # whether starts only grow along each chain, and whether ends do

    @classmethod
    def of(cls, rows: IntervalRows) -> Chains:
        """The chains of a relation. Cost: O(intervals log n)."""
        starts, ends = rows.starts.astype(np.int64), rows.ends.astype(np.int64)
        count, row = len(starts), rows.row_index()
        follower = _followers(rows, row, starts, ends)
        place = np.arange(count)
        leads = np.zeros(count, dtype=np.bool_)  # whether it begins a chain
        if (follower[:-1] == place[1:]).all():
            order, leads[0] = place, True
        else:
            linked = follower >= 0
            leads[:] = True
            leads[follower[linked]] = False
            edges = np.ones(int(linked.sum()), np.int8), follower[linked], offsets(linked)
            graph = csr_array(edges, shape=(count, count))
            label = connected_components(graph, directed=False)[1]
            head_of = np.empty(int(label.max()) + 1, dtype=np.int64)
            head_of[label[leads]] = np.flatnonzero(leads)
            order = np.argsort(head_of[label], kind="stable")  # by the first interval of each one's chain
            place = np.empty(count, dtype=np.int64)
            place[order] = np.arange(count)
        head = np.flatnonzero(leads)
        first = place[head]  # ascends
        chain = np.searchsorted(first, place, side="right") - 1
        last = np.append(first[1:], count)[chain]
        lows, highs = starts[order], ends[order]
        inside = ~leads[order[1:]]
        ascending = (bool((np.diff(lows)[inside] >= 0).all()), bool((np.diff(highs)[inside] >= 0).all()))
        return cls(rows, place, last, head, row[head], lows, highs, ascending)

    def count(self, starts: IntArray, ends: IntArray) -> IntArray:
        alive = np.diff(self.rows.indptr)[starts]
        return alive + np.searchsorted(self.head_row, ends) - np.searchsorted(self.head_row, starts, side="right")

    def unions(self, starts: IntArray, ends: IntArray) -> IntervalRows:
        """Row r is the union of the rows [starts[r], ends[r])."""
        total = offsets(self.count(starts, ends))
        if (np.diff(total) == 1).all():
            _, low, high = self._pieces(starts, ends)
            return IntervalRows(total, low.astype(np.int32), high.astype(np.int32), self._keys)
        parts: list[IntervalRows] = []
        for part in pieces_at_a_time(total):
            pieces = self._pieces(starts[part], ends[part])
            parts.append(IntervalRows.build(*pieces, part.stop - part.start, self._keys))
        return IntervalRows.stack(parts, self._keys)

    @property
    def _keys(self) -> int:
        return self.rows.num_keys

    def _pieces(self, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        alive = np.diff(self.rows.indptr)[starts]
        low, high = np.searchsorted(self.head_row, starts, side="right"), np.searchsorted(self.head_row, ends)
        count = alive + high - low
        which, nth = ragged(np.zeros_like(count), count)
        begun = nth < alive[which]  # before the range, or with it
        interval = self.rows.indptr[starts[which]] + nth
        interval[~begun] = self.head[(low - alive)[which[~begun]] + nth[~begun]]
        row = starts[which]
        row[~begun] = self.head_row[(low - alive)[which[~begun]] + nth[~begun]]
        first = self.place[interval]
        last = np.minimum(first + ends[which] - row, self.last[interval])
        lows = self.lows[first] if self.ascending[0] else range_reduce(np.minimum, self.lows, first, last)
        highs = self.highs[last - 1] if self.ascending[1] else range_reduce(np.maximum, self.highs, first, last)
        return which, lows, highs


def _followers(rows: IntervalRows, row: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """For each interval a touching or overlapping one of the next row, used only once; -1 if none is left."""
    stride = rows.num_keys + 2  # one more than keys and the end, so that the last end of a row touches nothing
    ahead = (row + 1) * stride
    line_starts, line_ends = starts + row * stride, ends + row * stride
    follower = np.searchsorted(line_ends, starts + ahead)
    inside = np.minimum(follower, len(starts) - 1)
    touches = (follower < len(starts)) & (line_starts[inside] <= ends + ahead) & (row[inside] == row + 1)
    follower = np.where(touches, follower, -1)
    where = np.flatnonzero(touches)  # followers ascend there: the first of equal ones keeps it
    again = where[1:][follower[where[1:]] == follower[where[:-1]]]
    follower[again] = -1
    return follower


def pieces_at_a_time(total: IntArray) -> Iterator[slice]:
    """Consecutive rows with about `_PIECES` pieces each; `total[r]` counts those before row r."""
    first, last = 0, len(total) - 1
    while first < last:
        upto = max(first + 1, int(np.searchsorted(total, total[first] + _PIECES, side="right")) - 1)
        yield slice(first, upto)
        first = upto


def range_reduce(
    ufunc: np.ufunc, values: npt.NDArray[Any], starts: npt.NDArray[Any], ends: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """`ufunc.reduce(values[starts[t]:ends[t]])`, idempotent: a range is two overlapping powers of two."""
    starts, ends = starts.astype(np.int64), ends.astype(np.int64)
    level = np.frexp((ends - starts).astype(np.float64))[1] - 1
    out = np.empty((len(starts), *values.shape[1:]), dtype=values.dtype)
    table = values
    for size in range(int(level.max(initial=-1)) + 1):
        chosen = np.flatnonzero(level == size)
        out[chosen] = ufunc(table[starts[chosen]], table[ends[chosen] - (1 << size)])
        table = ufunc(table[: -(1 << size)], table[1 << size :])
    return out
