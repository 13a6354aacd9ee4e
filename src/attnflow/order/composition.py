"""Products of relations as row intervals: what flows through two layers, in time and memory of the intervals."""

from __future__ import annotations

from typing import Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows
from attnflow.order.chains import Chains, pieces_at_a_time
from attnflow.order.components import reads_only_before

LONG: Final = 1 << 11  # positions from which on intervals, where they stay few, take less time than bits


def room(rows: IntervalRows) -> int:
    """How many intervals a product of these rows may have before bit matrices are taken."""
    return max(4 * (rows.num_rows + len(rows.starts)), 16 * rows.num_rows)


def compose(rows: IntervalRows, before: IntervalRows, limit: int) -> IntervalRows | None:
    """The Boolean product: row i is the union of the rows k of `before` over the keys k of row i.

    Intervals of consecutive rows of `before` that touch make a chain, and over a range of keys a chain is one
    interval, from its lowest start to its highest end. Each range of keys is looked up once, however many rows have it.
    Where chains are short, unions over 1, 2, 4, ... consecutive rows are made one after the other instead.

    Args:
        rows: the later layer.
        before: the earlier one.
        limit: of intervals, in the answer and on the way.

    Returns:
        None where there are more.

    Cost: O(m log m) for m intervals of both masks, of the answer and, for each range, of the chains in it.
    """
    if not len(rows.starts) or not len(before.starts):
        empty = np.zeros(0, np.int64)
        return IntervalRows.build(empty, empty, empty, rows.num_rows, before.num_keys) if limit >= 0 else None
    prefix = rows.starts == 0
    if 2 * int(prefix.sum()) > len(prefix) and reads_only_before(before):
        return _with_prefixes(rows, prefix, before, limit)
    chains = Chains.of(before)
    starts, ends, which = _distinct(rows)
    if chains.count(starts, ends).sum() > 4 * limit:
        return _by_doubling(rows, before, limit)
    unions = chains.unions(starts, ends)
    if which is None:
        return unions if len(unions.starts) <= limit else None
    return _gathered(rows.indptr, which, unions, limit)


def _with_prefixes(rows: IntervalRows, prefix: BoolArray, before: IntervalRows, limit: int) -> IntervalRows | None:
    """`compose` for a triangular `before` with its diagonal: over the first keys together it gives these keys."""
    row = rows.row_index()
    done, rest = (
        IntervalRows.build(row[part], rows.starts[part], rows.ends[part], rows.num_rows, before.num_keys)
        for part in (prefix, ~prefix)
    )
    others = compose(rest, before, limit)
    if others is None:
        return None
    result = done.union(others)
    return result if len(result.starts) <= limit else None


def _distinct(rows: IntervalRows) -> tuple[IntArray, IntArray, IntArray | None]:
    """(starts, ends, number of each interval's range there): the distinct intervals; None where row r has the r-th."""
    starts, ends = rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    if len(starts) == rows.num_rows and (np.diff(rows.indptr) == 1).all():
        return starts, ends, None
    ranges, which = np.unique(starts * (rows.num_keys + 1) + ends, return_inverse=True)
    starts, ends = np.divmod(ranges, rows.num_keys + 1)
    return starts, ends, which


def _gathered(indptr: IntArray, which: IntArray, unions: IntervalRows, limit: int) -> IntervalRows | None:
    """Row i is the union of the rows `which[indptr[i]:indptr[i + 1]]` of `unions`."""
    length = np.concatenate([[0], np.cumsum(np.diff(unions.indptr)[which])])
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


def _by_doubling(rows: IntervalRows, before: IntervalRows, limit: int) -> IntervalRows | None:
    """`compose` by unions over 1, 2, 4, ... consecutive rows: any range is two of them that overlap."""
    starts, ends = rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    level = np.frexp((ends - starts).astype(np.float64))[1] - 1
    owner, table, pieces, total = rows.row_index(), before, list[tuple[IntArray, IntArray, IntArray]](), 0
    for size in range(int(level.max(initial=-1)) + 1):
        chosen = np.flatnonzero(level == size)
        for first in (starts[chosen], ends[chosen] - (1 << size)):
            count = np.diff(table.indptr)[first]
            total += int(count.sum())
            if total > 4 * limit:
                return None
            part = table.take(first)
            pieces.append((np.repeat(owner[chosen], count), part.starts.astype(np.int64), part.ends.astype(np.int64)))
        if size < level.max(initial=-1):
            reach = table.num_rows - (1 << size)
            table = table.take(np.arange(reach)).union(table.take(np.arange(1 << size, table.num_rows)))
            if len(table.starts) > limit:
                return None
    groups = pieces or [(owner[:0], starts[:0], ends[:0])]
    result = IntervalRows.of(rows.num_rows, before.num_keys, *groups)
    return result if len(result.starts) <= limit else None


def closure_of(rows: IntervalRows, limit: int) -> IntervalRows | None:
    """The transitive closure of a square relation that holds its diagonal; None where a power has too many intervals.

    Cost: log2(depth) products.
    """
    while True:
        square = compose(rows, rows, limit)
        if square is None or square.equals(rows):
            return square
        rows = square


def depth_of(rows: IntervalRows) -> int | None:
    """The smallest L >= 1 with A^L = A*, for A with its diagonal; None where the powers have many more intervals.

    Squares until nothing is new, then binary descent: 2 log2(depth) products.
    """
    limit = room(rows)
    powers = [rows]
    while True:
        square = compose(powers[-1], powers[-1], limit)
        if square is None:
            return None
        if square.equals(powers[-1]):  # the closure
            break
        powers.append(square)
    if len(powers) == 1:
        return 1
    closure = powers.pop()
    depth, reached = 1 << (len(powers) - 1), powers[-1]  # short of the closure
    for exponent in reversed(range(len(powers) - 1)):
        further = compose(powers[exponent], reached, limit)
        if further is None:
            return None
        if not further.equals(closure):
            depth, reached = depth + (1 << exponent), further
    return depth + 1


def without_twins(rows: IntervalRows) -> IntervalRows:
    """One node for each run of neighbours that read the same and are read by the same; the depth stays what it is.

    The relation must hold its diagonal. Cost: O(intervals log n).
    """
    n = rows.num_rows
    cut = np.zeros(n + 1, dtype=np.bool_)
    cut[rows.starts] = cut[rows.ends] = True
    cut[1:n] |= ~_same_as_before(rows)
    first = np.flatnonzero(cut[:n])
    if len(first) in (0, n):
        return rows
    part = rows.take(first)
    number = np.append(np.cumsum(cut[:n]) - 1, len(first))
    return IntervalRows(
        part.indptr, number[part.starts].astype(np.int32), number[part.ends].astype(np.int32), len(first)
    )


def _same_as_before(rows: IntervalRows) -> BoolArray:
    """bool[rows - 1]: whether row r + 1 is row r."""
    length = np.diff(rows.indptr)
    same = length[1:] == length[:-1]
    row = rows.row_index()
    inside = np.flatnonzero((row < rows.num_rows - 1) & np.append(same, False)[row])
    next_one = inside + length[row[inside]]
    apart = (rows.starts[inside] != rows.starts[next_one]) | (rows.ends[inside] != rows.ends[next_one])
    same[row[inside[apart]]] = False
    return same
