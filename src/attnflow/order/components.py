"""Strongly connected components of a relation kept as intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows
from attnflow.order import bits


def is_shattered(rows: IntervalRows) -> bool:
    """Whether bit sets are cheaper than intervals."""
    return len(rows.starts) > 32 * rows.num_rows


def strong_components(rows: IntervalRows) -> IntArray:
    """The component of each node of a square relation that holds its diagonal, int64[n], in topological order.

    Cost: O((n + intervals) log n); for shattered rows O(n^2 / 64) word operations and n^2 / 4 bytes.
    """
    return _by_bit_sets(rows) if is_shattered(rows) else _by_intervals(rows)


def _by_intervals(rows: IntervalRows) -> IntArray:
    """Strong components of an interval relation without listing its pairs.

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
