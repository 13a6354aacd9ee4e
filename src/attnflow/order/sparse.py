"""The interval route for long masks: classes, closure and covers in time and memory of the intervals."""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows, offsets
from attnflow.order.dense import refuse_more
from attnflow.order.products import (
    closure_of,
    compose,
    quotient,
    range_reduce,
    reads_only_after,
    reads_only_before,
    room,
)

_ROUNDS: Final = 8  # covers of a class that are looked for one at a time


def close(rows: IntervalRows) -> tuple[IntArray, IntervalRows, IntArray, IntArray] | None:
    """The order of a square relation with its diagonal; None if it takes too many intervals.

    Returns (class of each node of `rows`, closure over representatives, representative of each class, covers). Raises
    ValueError if the covers do not fit memory. Cost: O(m log m) for m intervals of mask and closure, times log(depth).
    """
    class_of, between = condensed(rows)
    node = np.arange(between.num_rows)
    if reads_only_before(between):
        covers = covers_if_closed(between)
        if covers is not None:
            return class_of, between, node, covers
    closure = closure_of(between, room(between))
    if closure is None:
        return None
    if reads_only_before(closure):
        number, first, covers = node, node, covers_if_closed(closure)
    else:
        number, first = classes_of_closure(closure)
        covers = None
    if covers is None:
        covers = covers_of_closure(closure, number, first)
    return None if covers is None else (number[class_of], closure, first, covers)


def condensed(rows: IntervalRows) -> tuple[IntArray, IntervalRows]:
    """(class of each node, relation of the classes), merging nodes easily seen to attend to each other.

    Looks at neighbours, first and last keys until nothing merges. Classes need not be all strong components, nor their
    relation triangular; one that reads only after itself is reversed. Cost: O(intervals log n) per round, mostly one.
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
    """A label for each node, equal only for nodes that attend to each other; numbered by first node."""
    node = np.arange(rows.num_rows)
    queries = np.tile(node, 3)
    first, last = rows.starts[rows.indptr[:-1]], rows.ends[rows.indptr[1:] - 1] - 1
    keys = np.concatenate([np.minimum(node + 1, len(node) - 1), first, last]).astype(np.int64)
    mutual = rows.holds(queries, keys) & rows.holds(keys, queries) & (queries != keys)
    edges = np.ones(int(mutual.sum()), np.int8), (queries[mutual], keys[mutual])
    graph = csr_array(edges, shape=(rows.num_rows, rows.num_rows))
    label = connected_components(graph, directed=False)[1]
    return np.argsort(np.argsort(np.unique(label, return_index=True)[1]))[label]


def classes_of_closure(closure: IntervalRows) -> tuple[IntArray, IntArray]:
    """(class of each node, first node of each class) of a transitive, reflexive relation; lower classes come first.

    Nodes reach each other iff they reach the same, and nodes below reach fewer.
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
    return number, first


def covers_if_closed(rows: IntervalRows) -> IntArray | None:
    """The covers (lower, upper) of a triangular relation with its diagonal, int64[covers, 2]; None if not transitive.

    None also if a node has many covers: `covers_of_closure` finds those. The latest key not below a known cover is a
    cover; the relation is transitive iff every node reads exactly itself and what its covers read, by induction.
    Nodes with one cover, the most frequent, take O(intervals) together.
    """
    node = np.arange(rows.num_rows)
    strict = _strict(rows)
    node = node[np.diff(strict.indptr) > 0]
    latest = strict.ends[strict.indptr[node + 1] - 1].astype(np.int64) - 1
    pairs = [np.stack([latest, node], axis=1)]
    rest = ~_is_extension(rows, node, latest)
    node, below = node[rest], rows.take(latest[rest])
    everything, left = rows.take(node), strict.take(node)
    for _ in range(_ROUNDS):
        if not len(node):
            return np.concatenate(pairs)
        if len(below.intersection(everything.complement()).starts):
            return None
        left = left.intersection(below.complement())
        more = np.flatnonzero(np.diff(left.indptr))
        node, everything, left = node[more], everything.take(more), left.take(more)
        latest = left.ends[left.indptr[1:] - 1].astype(np.int64) - 1
        pairs.append(np.stack([latest, node], axis=1))
        below = rows.take(latest)
    return None


def _strict(rows: IntervalRows) -> IntervalRows:
    """A triangular relation without its diagonal."""
    ends = rows.ends.copy()
    ends[rows.indptr[1:] - 1] -= 1
    keep = rows.starts < ends
    indptr = offsets(keep)[rows.indptr]
    return IntervalRows(indptr, rows.starts[keep], ends[keep], rows.num_keys)


def _is_extension(rows: IntervalRows, node: IntArray, latest: IntArray) -> BoolArray:
    """bool[nodes]: whether row `node[i]` equals row `latest[i]` plus the node itself."""
    mine, other = rows.take(node), rows.take(latest)
    beside = latest == node - 1  # the last interval of the row is one longer, else there is one more
    same = np.diff(mine.indptr) == np.diff(other.indptr) + ~beside
    row = other.row_index()
    inside = np.flatnonzero(same[row])
    row = row[inside]
    twin = inside - other.indptr[row] + mine.indptr[row]
    last = inside == other.indptr[row + 1] - 1
    grown = other.ends[inside] + (last & beside[row])
    apart = (other.starts[inside] != mine.starts[twin]) | (grown != mine.ends[twin])
    same[row[apart]] = False
    return same


def covers_of_closure(closure: IntervalRows, number: IntArray, first: IntArray) -> IntArray | None:
    """The covers (lower, upper) of a transitive, reflexive relation in any numbering of its nodes.

    `number` is the class of each node (lower first), `first` a node of each class. None if unions over
    the keys of nodes with many covers take too many intervals.
    """
    count, node = len(first), np.arange(closure.num_rows)
    own = IntervalRows.build(number, node, node + 1, count, closure.num_keys)
    every = closure.take(first)
    strict = every.intersection(own.complement())
    upper, left = np.arange(count), strict
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for _ in range(_ROUNDS):
        more = np.flatnonzero(np.diff(left.indptr))
        upper, left = upper[more], left.take(more)
        if not len(upper):
            return np.concatenate(pairs)
        highest = range_reduce(np.maximum, number, left.starts, left.ends)
        lower = np.maximum.reduceat(highest, left.indptr[:-1])
        pairs.append(np.stack([lower, upper], axis=1))
        left = left.intersection(every.take(lower).complement())
    under = compose(left, strict.take(number), room(closure))
    if under is None:
        return None
    left = left.intersection(under.complement())
    refuse_more(sum(map(len, pairs)) + int(left.counts().sum()))
    row, key = left.expand()
    return np.concatenate([*pairs, np.unique(np.stack([number[key], upper[row]], axis=1), axis=0)])
