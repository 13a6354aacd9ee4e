"""Unions over consecutive rows of an interval relation: intervals of neighbouring rows that touch make chains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.order.bits import range_reduce

_PIECES: Final = 1 << 20  # intervals that are sorted at a time


@dataclass(frozen=True, eq=False)
class Chains:
    """The intervals of a relation chain by chain: each touches the one before, which lies in the row before."""

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
            indptr = np.concatenate([[0], np.cumsum(linked)])
            graph = csr_array((np.ones(int(indptr[-1]), np.int8), follower[linked], indptr), shape=(count, count))
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
        """Number of chains in each range of rows."""
        alive = np.diff(self.rows.indptr)[starts]
        return alive + np.searchsorted(self.head_row, ends) - np.searchsorted(self.head_row, starts, side="right")

    def unions(self, starts: IntArray, ends: IntArray) -> IntervalRows:
        """Row r is the union of the rows [starts[r], ends[r])."""
        total = np.concatenate([[0], np.cumsum(self.count(starts, ends))])
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
        """(range, start, end) of the union of each chain over each range, range by range."""
        alive = np.diff(self.rows.indptr)[starts]
        low, high = np.searchsorted(self.head_row, starts, side="right"), np.searchsorted(self.head_row, ends)
        count = alive + high - low
        which = np.repeat(np.arange(len(starts)), count)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
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
    """For each interval one of the next row that it touches or overlaps, none for two; -1 where there is none left."""
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
    """Consecutive rows with about `_PIECES` pieces each (at least one row); `total[r]` are the pieces before row r."""
    first, last = 0, len(total) - 1
    while first < last:
        upto = max(first + 1, int(np.searchsorted(total, total[first] + _PIECES, side="right")) - 1)
        yield slice(first, upto)
        first = upto
