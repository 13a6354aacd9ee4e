"""Relations with internal position numbers: combined and compared in the numbering that keeps them small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows, ragged

RENAMED: Final = 1 << 24  # intervals that a change of numbers may make: about 20 seconds and 2 GB while it runs
SCANNED: Final = 1 << 31  # pairs that are looked at one by one: about 10 seconds
LARGEST: Final = 1 << 25  # intervals of a mask: 268 MB, and 3 GB while two such masks are combined
_CHUNK_BYTES: Final = 1 << 23
_SAMPLE: Final = 64  # intervals from which the number of all stretches is guessed
_LONG: Final = 1 << 16  # stretches: about as much work as to guess their number
_CHUNK: Final = 1 << 13  # intervals that are renumbered at a time

Pair = tuple[IntArray, IntArray]
Pieces = tuple[IntArray, IntArray, IntArray]


def invert(rank: IntArray) -> IntArray:
    inverse = np.empty_like(rank)
    inverse[rank] = np.arange(len(rank))
    return inverse


def same_rank(a: IntArray | None, b: IntArray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def too_many(what: str, intervals: int) -> ValueError:
    return ValueError(
        f"{what} takes about {intervals:,} intervals of keys ({8 * intervals / 1e9:,.1f} GB), more than {LARGEST:,} "
        f"of a mask ({RENAMED:,} where positions are numbered anew): take a slice, a shorter sequence, "
        "or masks that keep neighbouring positions together"
    )


@dataclass(frozen=True, eq=False, slots=True)
class Numbered:
    """`allow[q, k]` iff key number `key_rank[k]` is in row `query_rank[q]`; a rank of None is the identity."""

    rows: IntervalRows
    query_rank: IntArray | None = None
    key_rank: IntArray | None = None

    def in_query_order(self) -> IntervalRows:
        """Row q for query q, as intervals of internal key numbers. Cost: O(intervals)."""
        return self.rows if self.query_rank is None else self.rows.take(self.query_rank)

    def numbered_as(self, other: Numbered) -> bool:
        return same_rank(self.query_rank, other.query_rank) and same_rank(self.key_rank, other.key_rank)

    def renumbered(self, other: Numbered, limit: int) -> IntervalRows | None:
        """The rows in the numbering of `other`; None if they need more than `limit` intervals."""
        if same_rank(self.query_rank, other.query_rank):
            rows = self.rows
        else:
            rows = self.in_query_order()
            rows = rows if other.query_rank is None else rows.take(invert(other.query_rank))
        new_key = self._new_keys(other)
        if new_key is None:
            return rows
        pieces = pieces_of(rows, new_key, limit)
        return None if pieces is None else IntervalRows.build(*pieces, rows.num_rows, rows.num_keys)

    def expected(self, other: Numbered) -> int:
        """A guess at how many intervals the rows have in the numbering of `other`."""
        new_key = self._new_keys(other)
        if new_key is None:
            return len(self.rows.starts)
        return expected(self.rows.starts.astype(np.int64), self.rows.ends.astype(np.int64), new_key)

    def tables(self, chunk: int | None = None) -> Iterator[tuple[int, BoolArray]]:
        """(first query, bool[queries, keys]) for consecutive blocks of queries, about 8 MB each."""
        chunk = chunk or max(1, _CHUNK_BYTES // max(1, self.rows.num_keys))
        for start in range(0, self.rows.num_rows, chunk):
            queries = np.arange(start, min(start + chunk, self.rows.num_rows))
            part = self.rows.to_bool(queries if self.query_rank is None else self.query_rank[queries])
            yield start, part if self.key_rank is None else part[:, self.key_rank]

    def intervals(self, what: str) -> IntervalRows:
        """The relation in plain positions; raises ValueError, naming `what`, if it has too many intervals."""
        plain = Numbered(self.rows)
        rows = self.renumbered(plain, max(4 * self.rows.num_rows, _many(self.rows)))
        if rows is not None:
            return rows
        what = f"{what}, in the order of its keys,"
        if _pairs(self.rows) > SCANNED or self.expected(plain) > 2 * LARGEST:  # the guess may be half too high
            raise too_many(what, self.expected(plain))
        parts: list[IntervalRows] = []
        count = 0
        for _, part in self.tables():
            parts.append(IntervalRows.from_bool(part))
            count += len(parts[-1].starts)
            if count > LARGEST:
                raise too_many(what, self.expected(plain))
        return IntervalRows.stack(parts, self.rows.num_keys)

    def sums(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The sum, modulo 2^64, of the values of each query's keys."""
        if self.key_rank is not None:
            values = values[invert(self.key_rank)]
        sums = self.rows.sums(np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)]))
        return sums if self.query_rank is None else sums[self.query_rank]

    def _new_keys(self, other: Numbered) -> IntArray | None:
        """The number in `other` of each key number of this relation; None if the numberings agree."""
        if same_rank(self.key_rank, other.key_rank):
            return None
        keys = np.arange(self.rows.num_keys) if self.key_rank is None else invert(self.key_rank)
        return keys if other.key_rank is None else other.key_rank[keys]


def _pairs(rows: IntervalRows) -> int:
    return rows.num_rows * rows.num_keys


def _many(rows: IntervalRows) -> int:
    """Intervals that a relation may take before its pairs, if they are few enough, are looked at one by one."""
    return min(RENAMED, _pairs(rows) // 64) if _pairs(rows) <= SCANNED else RENAMED


def combined(a: Numbered, b: Numbered, sign: str, what: str) -> Numbered:
    """Intersection ("&") or union ("|"), in the cheapest numbering; O(log n) per interval of the result."""
    joined = IntervalRows.intersection if sign == "&" else IntervalRows.union
    if a.numbered_as(b):
        return Numbered(joined(a.rows, b.rows), a.query_rank, a.key_rank)
    plain = Numbered(a.rows)
    costs = [(a.expected(n) + b.expected(n), n) for n in (plain, a, b, *_fronted(a, b), *_fronted(b, a))]
    costs.sort(key=lambda pair: pair[0])
    # The positions come first where they keep both small. A cost is a guess; the limit is kept exactly.
    attempts = [(plain, 2 * (len(a.rows.starts) + len(b.rows.starts) + a.rows.num_rows))]
    attempts += [(numbers, max(1, _many(a.rows))) for cost, numbers in costs if cost <= 4 * RENAMED]
    for numbers, limit in attempts:
        left = a.renumbered(numbers, limit)
        right = None if left is None else b.renumbered(numbers, limit)
        if left is not None and right is not None:
            return Numbered(joined(left, right), numbers.query_rank, numbers.key_rank)
    if _pairs(a.rows) > SCANNED:
        raise too_many(what, costs[0][0])
    return Numbered(joined(a.intervals(what), b.intervals(what)))


def _fronted(a: Numbered, b: Numbered) -> Iterator[Numbered]:
    """Yields the numbering of `a` with the keys shared by most rows of `b` (its global tokens) as one interval."""
    size = a.rows.num_keys
    if a.rows.num_rows != size or not all(same_rank(side.query_rank, side.key_rank) for side in (a, b)):
        return
    starts, ends = b.rows.starts.astype(np.int64), b.rows.ends.astype(np.int64)
    inner = (ends - starts > 1) & (ends - starts < size)
    pairs, count = np.unique(starts[inner] * (size + 1) + ends[inner], return_counts=True)
    if not len(pairs) or 4 * count.max() < size:
        return
    start, end = divmod(int(pairs[count.argmax()]), size + 1)
    a_rank, b_rank = (np.arange(size) if side.key_rank is None else side.key_rank for side in (a, b))
    rank = invert(np.lexsort((a_rank, (b_rank < start) | (b_rank >= end))))
    yield Numbered(a.rows, rank, rank)


def differing(a: Numbered, b: Numbered) -> IntArray:
    """Queries whose keys have other sums of random 64-bit numbers, drawn twice: missed with probability 2^-128."""
    generator, unlike = np.random.default_rng(), np.zeros(a.rows.num_rows, dtype=np.bool_)
    for _ in range(2):
        values = generator.integers(1 << 64, size=a.rows.num_keys, dtype=np.uint64)
        unlike |= a.sums(values) != b.sums(values)
    return np.flatnonzero(unlike)


def pieces_of(rows: IntervalRows, new_key: IntArray | None, limit: int) -> Pieces | None:
    """(row, start, end), unordered, with key k renumbered `new_key[k]`, disjoint if distinct; None if over `limit`."""
    row, starts, ends = rows.row_index(), rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    if new_key is None or not len(starts):
        return row, starts, ends
    # Neighbouring keys whose numbers all go up, or all down, by one are a run; an interval becomes parts of runs.
    step = np.diff(new_key, prepend=new_key[:1])
    first = np.flatnonzero((np.abs(step) != 1) | (step * np.roll(step, 1) == -1))
    run = np.searchsorted(first, np.stack([starts, ends - 1]), side="right") - 1
    count = run[1] - run[0] + 1
    total = int(count.sum())
    if total > min(limit, 2 * len(starts)) and (neighbours := _neighbours(new_key)):  # parts may lie together
        joined = _joined(starts, ends, new_key, neighbours, limit)
        return None if joined is None else (row[joined[0]], *joined[1:])
    if total > limit:
        return None
    interval, which = ragged(run[0], count)
    low = new_key[np.maximum(starts[interval], first[which])]
    high = new_key[np.minimum(ends[interval], np.append(first, len(new_key))[which + 1]) - 1]
    return row[interval], np.minimum(low, high), np.maximum(low, high) + 1


def expected(starts: IntArray, ends: IntArray, new_key: IntArray, sample: int = _SAMPLE) -> int:
    """The number of maximal stretches, guessed from a sample of the intervals; no number stands twice."""
    neighbours = _neighbours(new_key)
    if not len(starts) or neighbours is None:
        return 0
    chosen = np.random.default_rng(0).integers(len(starts), size=min(len(starts), sample))
    begun: list[int] = []
    for start, end in zip(starts[chosen], ends[chosen], strict=True):
        below = neighbours[0][start:end]
        begun.append(int(np.count_nonzero((below < start) | (below >= end))))
    return round(np.mean(begun) * len(starts))


def _neighbours(new_key: IntArray) -> Pair | None:
    """The keys that are numbered just below and just above each key, -1 for none; None if a number stands twice."""
    key_of = np.full(int(new_key.max(initial=-1)) + 3, -1)
    key_of[new_key + 1] = np.arange(len(new_key))
    unique = np.array_equal(key_of[new_key + 1], np.arange(len(new_key)))
    return (key_of[new_key], key_of[new_key + 2]) if unique else None


def _joined(starts: IntArray, ends: IntArray, new_key: IntArray, neighbours: Pair, limit: int) -> Pieces | None:
    """(interval, start, end) of maximal stretches, which begin where the key numbered just below lies outside."""
    if limit > _LONG:  # two samples that predict far more stretches than the limit are believed
        larger = max(_SAMPLE, min(1 << 10, (1 << 28) // len(new_key)))
        if all(expected(starts, ends, new_key, sample) > 4 * limit for sample in (_SAMPLE, larger)):
            return None
    stride, below, above = int(new_key.max()) + 2, *map(_ranges, neighbours)
    # Rows of a block share their intervals.
    pairs, which = np.unique(starts * (len(new_key) + 1) + ends, return_inverse=True)
    starts, ends = np.divmod(pairs, len(new_key) + 1)
    lows, highs, total = [pairs[:0]], [pairs[:0]], 0
    for first in range(0, len(starts), _CHUNK):
        part = slice(first, first + _CHUNK)
        for bounds, ranges in ((lows, below), (highs, above)):
            reported = _outside(ranges, starts[part], ends[part], limit - total)
            if reported is None:
                return None
            bounds.append(np.sort((reported[0] + first) * stride + new_key[reported[1]]))
        total += len(lows[-1])
    interval, low = np.divmod(np.concatenate(lows), stride)
    high = np.concatenate(highs) % stride + 1
    count = np.bincount(interval, minlength=len(starts))
    if count[which].sum() > limit:
        return None
    owner, place = ragged((np.cumsum(count) - count)[which], count[which])
    return owner, low[place], high[place]


def _ranges(values: IntArray) -> list[Pair]:
    """(minima, maxima) of an array over aligned ranges of 1, 2, 4, ... entries."""
    levels = [(values, values)]
    while len(levels[-1][0]) > 1:
        lowest, highest = levels[-1]
        if len(lowest) % 2:
            levels[-1] = lowest, highest = np.append(lowest, np.iinfo(np.int64).max), np.append(highest, -2)
        levels.append((lowest.reshape(-1, 2).min(axis=1), highest.reshape(-1, 2).max(axis=1)))
    return levels


def _outside(levels: list[Pair], starts: IntArray, ends: IntArray, limit: int) -> Pair | None:
    """(interval, index) of entries with values outside their interval; ranges without any are not entered."""
    interval, node = np.arange(len(starts)), np.zeros(len(starts), np.int64)
    for level in range(len(levels) - 1, -1, -1):
        lowest, highest = levels[level]
        start, end = starts[interval], ends[interval]
        enter = (lowest[node] < start) | (highest[node] >= end)
        enter &= (node << level < end) & (node + 1 << level > start)
        interval, node = interval[enter], node[enter]
        if len(node) > limit + 2 * len(starts):
            return None
        if level:
            interval, node = np.repeat(interval, 2), np.stack([2 * node, 2 * node + 1], axis=1).ravel()
    return (interval, node) if len(node) <= limit else None
