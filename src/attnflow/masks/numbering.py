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
_CHUNK: Final = 1 << 13  # intervals that are renamed at a time

Pieces = tuple[IntArray, IntArray, IntArray]
Bounds = tuple[IntArray, IntArray]


def invert(rank: IntArray) -> IntArray:
    inverse = np.empty_like(rank)
    inverse[rank] = np.arange(len(rank))
    return inverse


def too_many(what: str, intervals: int) -> ValueError:
    """The error for a relation that does not fit."""
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

    def new_keys(self, other: Numbered) -> IntArray | None:
        """The number in `other` of each key number of this relation; None if the numberings agree."""
        if same_rank(self.key_rank, other.key_rank):
            return None
        keys = np.arange(self.rows.num_keys) if self.key_rank is None else invert(self.key_rank)
        return keys if other.key_rank is None else other.key_rank[keys]

    def renumbered(self, other: Numbered, limit: int) -> IntervalRows | None:
        """The rows in the numbering of `other`; None if they need more than `limit` intervals."""
        if same_rank(self.query_rank, other.query_rank):
            rows = self.rows
        else:
            rows = self.in_query_order()
            rows = rows if other.query_rank is None else rows.take(invert(other.query_rank))
        new_key = self.new_keys(other)
        if new_key is None:
            return rows
        pieces = pieces_of(rows, new_key, limit)
        return None if pieces is None else IntervalRows.build(*pieces, rows.num_rows, rows.num_keys)

    def expected(self, other: Numbered) -> int:
        new_key = self.new_keys(other)
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
        pairs = self.rows.num_rows * self.rows.num_keys
        few = pairs // 64 if pairs <= SCANNED else RENAMED
        rows = self.renumbered(plain, max(4 * self.rows.num_rows, min(few, RENAMED)))
        if rows is not None:
            return rows
        if pairs > SCANNED or self.expected(plain) > 2 * LARGEST:  # the guess may be half too high
            raise too_many(f"{what}, in the order of its keys,", self.expected(plain))
        parts: list[IntervalRows] = []
        count = 0
        for _, part in self.tables():
            parts.append(IntervalRows.from_bool(part))
            count += len(parts[-1].starts)
            if count > LARGEST:
                raise too_many(f"{what}, in the order of its keys,", self.expected(plain))
        return IntervalRows.stack(parts, self.rows.num_keys)


def same_rank(a: IntArray | None, b: IntArray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def combined(a: Numbered, b: Numbered, sign: str, what: str) -> Numbered:
    """Intersection ("&") or union ("|"), in plain positions if few intervals do there, else in the cheapest numbering.

    Raises ValueError, naming `what`, if all need too many. Cost: O(n log n), and O(log n) per interval of the result.
    """
    joined = IntervalRows.intersection if sign == "&" else IntervalRows.union
    if same_rank(a.query_rank, b.query_rank) and same_rank(a.key_rank, b.key_rank):
        return Numbered(joined(a.rows, b.rows), a.query_rank, a.key_rank)
    plain, pairs = Numbered(a.rows), a.rows.num_rows * a.rows.num_keys
    few = 2 * (len(a.rows.starts) + len(b.rows.starts) + a.rows.num_rows)
    many = min(RENAMED, max(pairs // 64, 1)) if pairs <= SCANNED else RENAMED
    candidates = [plain, a, b, *_fronted(a, b), *_fronted(b, a)]
    costs = sorted(((a.expected(n) + b.expected(n), n) for n in candidates), key=lambda pair: pair[0])
    # That of the positions first where it keeps both small; a cost is a guess, the limit is kept exactly.
    for numbers, limit in [(plain, few), *((numbers, many) for cost, numbers in costs if cost <= 4 * RENAMED)]:
        left = a.renumbered(numbers, limit)
        right = None if left is None else b.renumbered(numbers, limit)
        if left is not None and right is not None:
            return Numbered(joined(left, right), numbers.query_rank, numbers.key_rank)
    if pairs > SCANNED:
        raise too_many(what, costs[0][0])
    return Numbered(joined(a.intervals(what), b.intervals(what)))


def _fronted(a: Numbered, b: Numbered) -> Iterator[Numbered]:
    """Yields the numbering of `a` with the keys shared by most rows of `b` (its global tokens) first, as one interval.

    Both relations stay in few intervals there.
    """
    size = a.rows.num_keys
    if a.rows.num_rows != size or not all(same_rank(each.query_rank, each.key_rank) for each in (a, b)):
        return
    starts, ends = b.rows.starts.astype(np.int64), b.rows.ends.astype(np.int64)
    inner = (ends - starts > 1) & (ends - starts < size)
    pairs, count = np.unique(starts[inner] * (size + 1) + ends[inner], return_counts=True)
    if not len(pairs) or 4 * count.max() < size:
        return
    start, end = divmod(int(pairs[count.argmax()]), size + 1)
    identity = np.arange(size)
    a_rank, b_rank = (identity if each.key_rank is None else each.key_rank for each in (a, b))
    rank = invert(np.lexsort((a_rank, (b_rank < start) | (b_rank >= end))))
    yield Numbered(a.rows, rank, rank)


def differing(a: Numbered, b: Numbered) -> IntArray:
    """Queries whose keys differ, found by sums of random 64-bit numbers over the keys, drawn twice.

    A query is missed with probability 2^-128.
    """
    generator, unlike = np.random.default_rng(), np.zeros(len(a.rows.indptr) - 1, dtype=np.bool_)
    for _ in range(2):
        values = generator.integers(1 << 64, size=a.rows.num_keys, dtype=np.uint64)
        unlike |= _sums(a, values) != _sums(b, values)
    return np.flatnonzero(unlike)


def _sums(relation: Numbered, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The sum, modulo 2^64, of the values of each query's keys."""
    rows, zero = relation.rows, np.zeros(1, np.uint64)
    if relation.key_rank is not None:
        values = values[invert(relation.key_rank)]
    sums = rows.sums(np.concatenate([zero, np.cumsum(values, dtype=np.uint64)]))
    return sums if relation.query_rank is None else sums[relation.query_rank]


def pieces_of(rows: IntervalRows, new_key: IntArray | None, limit: int) -> Pieces | None:
    """Disjoint (row, start, end), unordered, with key k renumbered `new_key[k]`; None if over `limit`.

    Cost: O((intervals + pieces) log keys), pieces up to `limit`.
    """
    starts, ends = rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    if new_key is None or not len(starts):
        return rows.row_index(), starts, ends
    pieces = renamed(starts, ends, new_key, limit)
    return None if pieces is None else (rows.row_index()[pieces[0]], *pieces[1:])


def renamed(starts: IntArray, ends: IntArray, new_key: IntArray, limit: int) -> Pieces | None:
    """(interval, start, end) of each stretch of new key numbers; None if there are more than `limit`.

    Intervals are not empty, and `new_key` repeats no number within one. Cost: O((intervals + stretches) log n).
    """
    first = np.concatenate([[0], np.flatnonzero(np.abs(np.diff(new_key)) != 1) + 1])  # where numbers stop to run on
    run = np.searchsorted(first, np.stack([starts, ends - 1]), side="right") - 1
    count = run[1] - run[0] + 1
    total = int(count.sum())
    if total > min(limit, 2 * len(starts)):  # each key alone, perhaps, where their new numbers still lie together
        size = int(new_key.max()) + 1
        old_key = np.full(size + 2, -1)  # with a number before the first and one after the last
        old_key[new_key + 1] = np.arange(len(new_key))
        if np.array_equal(old_key[new_key + 1], np.arange(len(new_key))):  # no number is there twice
            if limit > _LONG:  # two samples that predict far more stretches than the limit are believed; O(n)
                larger = max(_SAMPLE, min(1 << 10, (1 << 28) // max(1, len(new_key))))
                if all(expected(starts, ends, new_key, sample) > 4 * limit for sample in (_SAMPLE, larger)):
                    return None
            return _sorted_runs(starts, ends, new_key, old_key, limit)
    if total > limit:
        return None
    source, which = ragged(run[0], count)
    low = np.maximum(starts[source], first[which])
    high = np.minimum(ends[source], np.append(first, len(new_key))[which + 1]) - 1
    low, high = new_key[low], new_key[high]
    return source, np.minimum(low, high), np.maximum(low, high) + 1


def expected(starts: IntArray, ends: IntArray, new_key: IntArray, sample: int = _SAMPLE) -> int:
    if not len(starts):
        return 0
    chosen = np.random.default_rng(0).integers(len(starts), size=min(len(starts), sample))
    old_key = np.full(int(new_key.max()) + 2, -1)
    old_key[new_key + 1] = np.arange(len(new_key))
    below = old_key[new_key]
    parts = ((start, end, below[start:end]) for start, end in zip(starts[chosen], ends[chosen], strict=True))
    return round(
        np.mean([np.count_nonzero((part < start) | (part >= end)) for start, end, part in parts]) * len(starts)
    )


def _sorted_runs(starts: IntArray, ends: IntArray, new_key: IntArray, old_key: IntArray, limit: int) -> Pieces | None:
    """The maximal stretches of each interval: a key begins one iff the key numbered just below is outside."""
    n, stride = len(new_key), len(old_key) + 1
    pairs, which = np.unique(starts * (n + 1) + ends, return_inverse=True)  # rows of a block share their intervals
    starts, ends = np.divmod(pairs, n + 1)
    below, above = _ranges(old_key[new_key]), _ranges(old_key[new_key + 2])
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
    source, place = ragged((np.cumsum(count) - count)[which], count[which])
    return source, low[place], high[place]


def _ranges(values: IntArray) -> list[Bounds]:
    """(minima, maxima) of an array over aligned ranges of 1, 2, 4, ... entries."""
    levels = [(values, values)]
    while len(levels[-1][0]) > 1:
        lowest, highest = levels[-1]
        if len(lowest) % 2:
            levels[-1] = lowest, highest = np.append(lowest, np.iinfo(np.int64).max), np.append(highest, -2)
        levels.append((lowest.reshape(-1, 2).min(axis=1), highest.reshape(-1, 2).max(axis=1)))
    return levels


def _outside(levels: list[Bounds], starts: IntArray, ends: IntArray, limit: int) -> Bounds | None:
    """(interval, index) of entries whose values lie outside their interval; None if over `limit`.

    Only ranges with such an entry are entered: per level at most as many as answers, plus two per interval.
    """
    top = len(levels) - 1
    level_of = np.minimum(np.frexp((ends - starts).astype(np.float64))[1], top)
    interval, node = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for level in range(top, -1, -1):
        fresh = np.flatnonzero(level_of == level)
        left, right = starts[fresh] >> level, (ends[fresh] - 1) >> level  # the same range, or the one beside it
        two = right > left
        interval = np.concatenate([interval, fresh, fresh[two]])
        node = np.concatenate([node, left, right[two]])
        start, end = starts[interval], ends[interval]
        lowest, highest = levels[level]
        enter = (lowest[node] < start) | (highest[node] >= end)
        enter &= (node << level < end) & (node + 1 << level > start)
        interval, node = interval[enter], node[enter]
        if len(node) > limit + 2 * len(starts):
            return None
        if level:
            interval = np.repeat(interval, 2)
            node = np.stack([2 * node, 2 * node + 1], axis=1).ravel()
    return (interval, node) if len(node) <= limit else None
