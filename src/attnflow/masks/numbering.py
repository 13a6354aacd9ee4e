"""Relations whose positions have internal numbers: combined and compared in the numbering that keeps them small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows
from attnflow.masks.renaming import expected

RENAMED: Final = 1 << 24  # intervals that a change of numbers may make: about 20 seconds and 2 GB while it runs
SCANNED: Final = 1 << 31  # pairs that are looked at one by one: about 10 seconds
LARGEST: Final = 1 << 27  # intervals of a mask: 1 GB
_CHUNK_BYTES: Final = 1 << 23


def invert(rank: IntArray) -> IntArray:
    """The inverse of a permutation."""
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

    @property
    def pairs(self) -> int:
        """Pairs, allowed or not."""
        return self.rows.num_rows * self.rows.num_keys

    def in_query_order(self) -> IntervalRows:
        """Row q for query q, as intervals of internal key numbers. Cost: O(intervals)."""
        return self.rows if self.query_rank is None else self.rows.take(self.query_rank)

    def new_keys(self, other: Numbered) -> IntArray | None:
        """The number in `other` of each key number of this relation; None where they are the same."""
        if same_rank(self.key_rank, other.key_rank):
            return None
        keys = np.arange(self.rows.num_keys) if self.key_rank is None else invert(self.key_rank)
        return keys if other.key_rank is None else other.key_rank[keys]

    def renumbered(self, other: Numbered, limit: int) -> IntervalRows | None:
        """Its rows with the numbers of `other`; None where they have more than `limit` intervals."""
        if same_rank(self.query_rank, other.query_rank):
            rows = self.rows
        else:
            rows = self.in_query_order()
            rows = rows if other.query_rank is None else rows.take(invert(other.query_rank))
        new_key = self.new_keys(other)
        if new_key is None:
            return rows
        pieces = rows.pieces(new_key, limit)
        return None if pieces is None else IntervalRows.build(*pieces, rows.num_rows, rows.num_keys)

    def expected(self, other: Numbered) -> int:
        """About how many intervals `renumbered` gives."""
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
        """The relation in the numbers of queries and keys themselves.

        Raises:
            ValueError: it has too many intervals there; `what` names it.
        """
        plain = Numbered(self.rows)
        few = self.pairs // 64 if self.pairs <= SCANNED else RENAMED
        rows = self.renumbered(plain, max(4 * self.rows.num_rows, min(few, RENAMED)))
        if rows is not None:
            return rows
        if self.pairs > SCANNED:
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
    """Whether two numberings are one."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def combined(a: Numbered, b: Numbered, sign: str, what: str) -> Numbered:
    """Their intersection ("&") or union ("|"), in the numbering of positions or of one of the two.

    Cost: O(n log n) and O(log n) for each interval of the result's numbering, which is that with the fewest.

    Raises:
        ValueError: in each numbering there are too many; `what` names the relation.
    """
    for numbers, limit in _numberings(a, b):
        left = a.renumbered(numbers, limit)
        right = None if left is None else b.renumbered(numbers, limit)
        if left is not None and right is not None:
            return Numbered(_set(left, right, sign), numbers.query_rank, numbers.key_rank)
    if a.pairs > SCANNED:
        plain = Numbered(a.rows)
        raise too_many(what, min(a.expected(n) + b.expected(n) for n in (plain, a, b)))
    return Numbered(_set(a.intervals(what), b.intervals(what), sign))


def _numberings(a: Numbered, b: Numbered) -> Iterator[tuple[Numbered, int]]:
    """Numberings to try, and intervals up to which; that of the positions first where it keeps both small."""
    plain = Numbered(a.rows)
    if same_rank(a.query_rank, b.query_rank) and same_rank(a.key_rank, b.key_rank):
        yield a, LARGEST
    yield plain, 2 * (len(a.rows.starts) + len(b.rows.starts) + a.rows.num_rows)
    candidates = [plain, a, b, *_fronted(a, b), *_fronted(b, a)]
    costs = [(a.expected(numbers) + b.expected(numbers), numbers) for numbers in candidates]
    for cost, numbers in sorted(costs, key=lambda pair: pair[0]):
        if cost <= 4 * RENAMED:  # the cost is a guess; the limit is kept exactly
            yield numbers, min(RENAMED, max(a.pairs // 64, 1)) if a.pairs <= SCANNED else RENAMED


def _fronted(a: Numbered, b: Numbered) -> Iterator[Numbered]:
    """The numbering of `a` with the keys that most rows of `b` share as one interval (its global tokens) in front.

    There both stay in few intervals: rows of `a` as they were but for those keys, and those keys beside each other.
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


def _set(left: IntervalRows, right: IntervalRows, sign: str) -> IntervalRows:
    return left.intersection(right) if sign == "&" else left.union(right)


def differing(a: Numbered, b: Numbered) -> IntArray:
    """Queries whose keys are certainly not the same: those over which random numbers of the keys add up to others.

    The rest is the same but for one chance in 2^64 for each; `same` looks. Cost: O(intervals).
    """
    values = np.random.default_rng().integers(1 << 64, size=a.rows.num_keys, dtype=np.uint64)
    return np.flatnonzero(_sums(a, values) != _sums(b, values))


def _sums(relation: Numbered, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """For each query the sum, modulo 2^64, of the values of its keys."""
    rows, zero = relation.rows, np.zeros(1, np.uint64)
    if relation.key_rank is not None:
        values = values[invert(relation.key_rank)]
    prefix = np.concatenate([zero, np.cumsum(values, dtype=np.uint64)])
    total = np.concatenate([zero, np.cumsum(prefix[rows.ends] - prefix[rows.starts], dtype=np.uint64)])
    sums = total[rows.indptr[1:]] - total[rows.indptr[:-1]]
    return sums if relation.query_rank is None else sums[relation.query_rank]


def same(a: Numbered, b: Numbered, queries: IntArray) -> bool:
    """Whether these queries have the same keys in both.

    Raises:
        ValueError: neither can be written in the numbers of the other, and the tables are too large to look through.
    """
    a, b = (Numbered(each.in_query_order().take(queries), None, each.key_rank) for each in (a, b))
    costs = sorted(((x.expected(y), x, y) for x, y in ((a, b), (b, a))), key=lambda cost: cost[0])
    most = RENAMED if a.pairs > SCANNED else max(a.pairs // 64, 4 * len(queries))
    for cost, left, right in costs:
        rows = left.renumbered(right, most) if cost <= 4 * most else None
        if rows is not None:
            return rows.equals(right.rows)
    if a.pairs > SCANNED:
        raise too_many("comparing two masks", min(a.expected(b), b.expected(a)))
    return all(np.array_equal(x, y) for (_, x), (_, y) in zip(a.tables(), b.tables(), strict=True))
