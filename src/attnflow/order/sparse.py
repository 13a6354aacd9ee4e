"""The interval route for long masks: classes, closure and covers in time and memory of the intervals."""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.numbering import pieces_of
from attnflow.order.dense import refuse_more
from attnflow.order.products import closure_of, compose, range_reduce, reads_only_after, reads_only_before, room

_ROUNDS: Final = 8  # covers of a class that are looked for one at a time


def close(rows: IntervalRows) -> tuple[IntArray, IntervalRows, IntArray, IntArray] | None:
    """The order of a square relation with its diagonal; None where that takes too many intervals.

    Nodes that reach one another are collapsed first. The rest is squared until it is closed, and most masks are as
    they stand.

    Returns:
        (class of each node, closure over representatives of the nodes, the one that stands for each class, covers).

    Raises:
        ValueError: there are more covers than memory has room for.

    Cost: O(m log m) for m intervals of mask and closure, times the logarithm of the depth.
    """
    class_of, between = condensed(rows)
    node = np.arange(between.num_rows)
    if reads_only_before(between):
        covers = _covers(between, node, node, check=True)
        if covers is not None:
            return class_of, between, node, covers
    closure = closure_of(between, room(between))
    if closure is None:
        return None
    number, first = (node, node) if reads_only_before(closure) else classes_of_closure(closure)
    covers = _covers(closure, number, first)
    return None if covers is None else (number[class_of], closure, first, covers)


def condensed(rows: IntervalRows) -> tuple[IntArray, IntervalRows]:
    """(class of each node, relation of the classes): nodes that easily seen attend to each other are merged.

    The relation must be square and hold its diagonal. Neighbours, first and last keys are looked at until nothing is
    left to merge. The classes are not all strong components, and their relation is not always triangular; one that
    reads only after itself is turned round.

    Cost: O(intervals log n) for each round, of which most masks need one.
    """
    class_of = np.arange(rows.num_rows)
    while not reads_only_before(rows):
        if reads_only_after(rows):
            return rows.num_rows - 1 - class_of, _mirrored(rows)
        label = _merged(rows)
        between = quotient(rows, label) if int(label.max()) + 1 < rows.num_rows else None
        if between is None:
            break
        class_of, rows = label[class_of], between
    return class_of, rows


def _mirrored(rows: IntervalRows) -> IntervalRows:
    """The relation with the last node first."""
    n = np.int32(rows.num_rows)
    return IntervalRows(rows.indptr[-1] - rows.indptr[::-1], (n - rows.ends)[::-1], (n - rows.starts)[::-1], int(n))


def _merged(rows: IntervalRows) -> IntArray:
    """A label for each node, equal only for nodes that attend to each other; numbered by their first nodes."""
    node = np.arange(rows.num_rows)
    queries = np.tile(node, 3)
    first, last = rows.starts[rows.indptr[:-1]], rows.ends[rows.indptr[1:] - 1] - 1
    keys = np.concatenate([np.minimum(node + 1, len(node) - 1), first, last]).astype(np.int64)
    mutual = rows.holds(queries, keys) & rows.holds(keys, queries) & (queries != keys)
    edges = np.ones(int(mutual.sum()), np.int8), (queries[mutual], keys[mutual])
    graph = csr_array(edges, shape=(rows.num_rows, rows.num_rows))
    label = connected_components(graph, directed=False)[1]
    return np.argsort(np.argsort(np.unique(label, return_index=True)[1]))[label]


def quotient(rows: IntervalRows, class_of: IntArray) -> IntervalRows | None:
    """For each class the classes that its members may attend to; None if that takes too many intervals."""
    n, count = rows.num_rows, int(class_of.max()) + 1
    if count == 1:
        return IntervalRows.build([0], [0], [1], 1, 1)
    if (np.diff(class_of) >= 0).all():
        return IntervalRows.build(
            class_of[rows.row_index()], class_of[rows.starts], class_of[rows.ends - 1] + 1, count, count
        )
    order = np.argsort(class_of, kind="stable")
    rank = np.empty(n, dtype=np.int64)
    rank[order] = np.arange(n)
    pieces = pieces_of(rows.take(order), rank, max(8 * n, n * min(n, 1 << 12) // 64))
    if pieces is None:
        return None
    row, start, end = pieces
    sorted_class = class_of[order]
    return IntervalRows.build(sorted_class[row], sorted_class[start], sorted_class[end - 1] + 1, count, count)


def classes_of_closure(closure: IntervalRows) -> tuple[IntArray, IntArray]:
    """(class of each node, first node of each class) of a transitive, reflexive relation; lower classes come first.

    Nodes reach one another iff they reach the same, and what lies below a node reaches fewer.
    """
    counts = closure.counts()
    values = np.random.default_rng().integers(1 << 64, size=closure.num_keys, dtype=np.uint64)
    upto = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    sums = closure.sums(upto)
    order = np.lexsort((sums, counts))
    fresh = np.append(True, (np.diff(counts[order]) != 0) | (np.diff(sums[order]) != 0))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(fresh) - 1
    first = order[fresh]  # lexsort is stable
    if not closure.take(first[number]).equals(closure):  # two sums were equal by chance, one of 2^64
        return classes_of_closure(closure)
    return number, first


def _covers(rows: IntervalRows, number: IntArray, first: IntArray, check: bool = False) -> IntArray | None:
    """The covers (lower, upper) of a transitive relation with its diagonal, int64[covers, 2].

    The latest class of a row that is not yet below one of its covers is a cover. Most rows of most masks have one.

    Args:
        rows: the relation.
        number: class of each node; lower classes come first.
        first: a node of each class.
        check: of a triangular relation, whether it is transitive: it is iff every node reads what its covers read, by
            induction.

    Returns:
        None if it is not transitive, or where unions over the keys of nodes with many covers have too many intervals.

    Raises:
        ValueError: there are more covers than memory has room for.
    """
    count, node = len(first), np.arange(rows.num_rows)
    every = rows.take(first)
    strict = left = every.intersection(IntervalRows.build(number, node, node + 1, count, rows.num_keys).complement())
    upper, pairs = np.arange(count), [np.zeros((0, 2), dtype=np.int64)]
    for _ in range(_ROUNDS):
        more = np.flatnonzero(np.diff(left.indptr))
        upper, left = upper[more], left.take(more)
        if not len(upper):
            return np.concatenate(pairs)
        highest = range_reduce(np.maximum, number, left.starts, left.ends)
        lower = np.maximum.reduceat(highest, left.indptr[:-1])
        pairs.append(np.stack([lower, upper], axis=1))
        below = every.take(lower)
        if check and len(below.intersection(every.take(upper).complement()).starts):
            return None
        left = left.intersection(below.complement())
    reached = compose(left, rows, room(rows)) if check else left
    under = None if reached is None else compose(left, strict.take(number), room(rows))
    if reached is None or under is None or len(reached.intersection(every.take(upper).complement()).starts):
        return None
    left = left.intersection(under.complement())
    refuse_more(sum(map(len, pairs)) + int(left.counts().sum()))
    row, key = left.expand()
    return np.concatenate([*pairs, np.unique(np.stack([number[key], upper[row]], axis=1), axis=0)])
