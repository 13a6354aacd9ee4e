"""Products of relations as row intervals: what flows through two layers, in memory of the answer."""

from __future__ import annotations

from typing import Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows


def compose(rows: IntervalRows, before: IntervalRows, limit: int) -> IntervalRows | None:
    """The Boolean product: row i is the union of the rows k of `before` over the keys k of row i of `rows`.

    Unions over 1, 2, 4, ... consecutive rows are made one after the other; any range is two of them that overlap.

    Args:
        rows: the later layer.
        before: the earlier one.
        limit: of intervals, in the answer and on the way.

    Returns:
        None where there are more.

    Cost: O(log n) sorts of the intervals of such unions: the same as of the masks where neighbours read much the same.
    """
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


LONG: Final = 1 << 14  # positions from which on bit matrices take more than the intervals of most masks


def depth_of(rows: IntervalRows) -> int | None:
    """The smallest L >= 1 with A^L = A*, for A with its diagonal; None where the powers have many more intervals.

    Squares until nothing is new, then binary descent: 2 log2(depth) products.
    """
    limit = 4 * (rows.num_rows + len(rows.starts))
    powers, pairs = [rows], int(rows.counts().sum())
    while True:
        square = compose(powers[-1], powers[-1], limit)
        if square is None:
            return None
        count = int(square.counts().sum())
        if count == pairs:  # powers only grow: this one is the closure
            break
        powers.append(square)
        pairs = count
    if len(powers) == 1:
        return 1
    depth, reached = 1 << (len(powers) - 2), powers[-2]  # short of the closure
    for exponent in reversed(range(len(powers) - 2)):
        further = compose(powers[exponent], reached, limit)
        if further is None:
            return None
        if int(further.counts().sum()) < pairs:
            depth, reached = depth + (1 << exponent), further
    return depth + 1
