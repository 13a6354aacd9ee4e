"""Relations with internal position numbers: combined and compared in the numbering that keeps them small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows
from attnflow.masks.stretches import expected, pieces_of

RENAMED: Final = 1 << 24  # intervals that a change of numbers may make: about 20 seconds and 2 GB while it runs
SCANNED: Final = 1 << 31  # pairs that are looked at one by one: about 10 seconds
LARGEST: Final = 1 << 25  # intervals of a mask: 268 MB, and 3 GB while two such masks are combined
_CHUNK_BYTES: Final = 1 << 23


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
