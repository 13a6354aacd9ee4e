"""Strong components of a relation, and the relation between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.numbering import pieces_of
from attnflow.order import bits


def is_shattered(rows: IntervalRows) -> bool:
    """Whether bit sets are cheaper than intervals."""
    return len(rows.starts) > 32 * rows.num_rows


def reads_only_before(rows: IntervalRows) -> bool:
    """Whether a square relation that holds its diagonal is triangular: every key at or before its query."""
    return bool((rows.ends[rows.indptr[1:] - 1] == np.arange(rows.num_rows) + 1).all())


def reads_only_after(rows: IntervalRows) -> bool:
    """Whether every key is at or after its query."""
    return bool((rows.starts[rows.indptr[:-1]] == np.arange(rows.num_rows)).all())


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


def topological_classes(rows: IntervalRows) -> IntArray:
    """Strong components, numbered by their first or last nodes if that is a topological order, else as they come.

    Cost: O((n + intervals) log n); for shattered rows O(n^2 / 64) word operations and n^2 / 4 bytes.
    """
    if is_shattered(rows):
        return _by_bit_sets(rows)
    component = _by_intervals(rows)
    first, last = (np.full(int(component.max()) + 1, start) for start in (rows.num_rows, -1))
    np.minimum.at(first, component, np.arange(rows.num_rows))
    np.maximum.at(last, component, np.arange(rows.num_rows))
    for number in (np.argsort(np.argsort(first)), np.argsort(np.argsort(-last))):
        if _ascends(rows, number[component]):
            return number[component]
    return component


def _ascends(rows: IntervalRows, number: IntArray) -> bool:
    """Whether no node reads one with a higher number."""
    return bool((bits.range_reduce(np.maximum, number, rows.starts, rows.ends) <= number[rows.row_index()]).all())


def _by_intervals(rows: IntervalRows) -> IntArray:
    """Strong components of an interval relation without listing its pairs, int64[n], in topological order.

    Helper nodes stand for ranges of a power of two, as in a sparse table: an interval is an edge to each of the two
    ranges that cover it, a range has edges to its halves. Paths between real nodes are the relation's own.
    Cost: O(n log n + intervals) edges.
    """
    n = rows.num_rows
    starts, ends = rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    level = np.frexp((ends - starts).astype(np.float64))[1] - 1
    levels = int(level.max()) + 1
    source = [np.repeat(rows.row_index(), 2)]
    target = [np.stack([level * n + starts, level * n + ends - (1 << level)], axis=1).ravel()]
    for size in range(1, levels):
        here = np.arange(n - (1 << size) + 1)
        source.append(np.repeat(size * n + here, 2))
        target.append(np.stack([(size - 1) * n + here, (size - 1) * n + here + (1 << (size - 1))], axis=1).ravel())
    edges = (np.concatenate(source).astype(np.int32), np.concatenate(target).astype(np.int32))
    graph = csr_array((np.ones(len(edges[0]), np.int8), edges), shape=(levels * n, levels * n))
    label = connected_components(graph, directed=True, connection="strong")[1]
    if (label[edges[0]] < label[edges[1]]).any():  # which way scipy numbers components is not documented
        label = -label
    assert (label[edges[0]] >= label[edges[1]]).all(), "scipy finds components in a topological order or its reverse"
    # Components of helper nodes alone leave gaps; ranking the rest keeps their order.
    return np.unique(label[:n], return_inverse=True)[1].astype(np.int64)


def _by_bit_sets(rows: IntervalRows) -> IntArray:
    """Kosaraju's algorithm: the next unvisited neighbour is the highest bit of `neighbours & unvisited`."""
    finished = [node for tree in _search(list(bits.integers(rows)), range(rows.num_rows)) for node in tree]
    label = np.empty(rows.num_rows, dtype=np.int64)
    components = list(_search(_transposed(rows), reversed(finished)))  # upper ones first
    for component, nodes in enumerate(reversed(components)):
        label[nodes] = component
    return label


def _search(neighbours: list[int], roots: Iterable[int]) -> Iterator[list[int]]:
    """Depth-first trees, each as its nodes in the order in which they are finished."""
    unvisited = (1 << len(neighbours)) - 1
    for root in roots:
        if not unvisited >> root & 1:
            continue
        unvisited ^= 1 << root
        stack, finished = [root], list[int]()
        while stack:
            ahead = neighbours[stack[-1]] & unvisited
            if ahead:
                node = ahead.bit_length() - 1
                unvisited ^= 1 << node
                stack.append(node)
            else:
                finished.append(stack.pop())
        yield finished


def _transposed(rows: IntervalRows) -> list[int]:
    """For each key the bit set of the queries that attend to it."""
    n = rows.num_rows
    packed = np.zeros((n, -(-n // 8)), dtype=np.uint8)
    step = max(8, (1 << 23) // n // 8 * 8)
    for start in range(0, n, step):
        part = rows.to_bool(slice(start, min(start + step, n)))
        columns = np.packbits(np.ascontiguousarray(part.T), axis=1, bitorder="little")
        packed[:, start // 8 : start // 8 + columns.shape[1]] = columns
    return [int.from_bytes(row.tobytes(), "little") for row in packed]
