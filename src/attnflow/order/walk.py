"""Walks through a relation from one position: receptive fields, witness paths, budgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows


def field(layers: Sequence[IntervalRows], query: int) -> BoolArray:
    """bool[n]: positions whose information can be in `query` after these layers."""
    n = len(layers[0].indptr) - 1 if layers else 0
    inside = np.zeros(max(n, query + 1), dtype=np.bool_)
    inside[query] = True
    for rows in reversed(layers):
        inside = inside | _read_by(rows, np.flatnonzero(inside))
    return inside


def arrivals(layers: Sequence[IntervalRows], query: int, most: int | None) -> IntArray:
    """int64[n]: number of layers until each position's information first reaches `query`; -1 if never.

    With `most`, `layers` holds one relation, repeated up to so often (breadth-first, O(n) per layer); with None, one
    per layer, walked anew by `field` for each number of layers.
    """
    first = np.full(layers[0].num_rows, -1)
    first[query] = 0
    if most is None:
        for count in range(1, len(layers) + 1):
            first[(first < 0) & field(layers[:count], query)] = count
        return first
    fresh = np.array([query])
    for count in range(1, most + 1):
        fresh = np.flatnonzero(_read_by(layers[0], fresh) & (first < 0))
        if not len(fresh):
            break
        first[fresh] = count
    return first


def shortest_path(rows: IntervalRows, source: int, target: int) -> list[int]:
    """A path of fewest steps from `source` up to `target`; `source` must be below `target`."""
    towards = np.full(rows.num_rows, -1)  # the next position on the way up
    towards[target] = target
    frontier = [target]
    while towards[source] < 0:
        reached: list[int] = []
        for query in frontier:
            keys = rows.keys_of(query)
            fresh = keys[towards[keys] < 0]
            towards[fresh] = query
            reached += fresh.tolist()
        frontier = reached
    path = [source]
    while path[-1] != target:
        path.append(int(towards[path[-1]]))
    return path


def layered_path(layers: Sequence[IntervalRows], source: int, target: int) -> list[int]:
    """Positions after 0..L layers from `source` to `target` with the fewest moves; [] if unreachable."""
    if source == target:
        return [source]
    n = layers[0].num_rows
    unreachable = len(layers) + 1
    moves = np.full(n, unreachable)  # fewest moves from each position, at this layer boundary, to the target
    moves[target] = 0
    history: list[IntArray] = [moves]
    for rows in reversed(layers):
        before = moves.copy()
        for value in range(int(moves[moves < unreachable].max()) + 1):
            keys = _read_by(rows, np.flatnonzero(moves == value))
            before[keys] = np.minimum(before[keys], value + 1)
        moves = before
        history.append(moves)
    if moves[source] == unreachable:
        return []
    path = [source]
    for rows, after in zip(layers, reversed(history[:-1]), strict=True):
        here = path[-1]
        readers = rows.row_index()[(rows.starts <= here) & (here < rows.ends)]  # with `here` itself: the residual
        nearest = int(readers[np.argmin(after[readers])])
        path.append(nearest if after[nearest] + 1 < after[here] else here)
    return path


def budget(n: int, window: int | None, anchors: int | Sequence[int] | None) -> IntervalRows | None:
    """The pairs with |q - k| < window or k an anchor; None if neither is given."""
    node = np.arange(n)
    keep: IntervalRows | None = None
    if window is not None:
        reach = min(checks.integer("window", window, 1), n)
        keep = IntervalRows.build(node, node - reach + 1, node + reach, n, n)
    if anchors is not None:
        if getattr(anchors, "ndim", 0 if isinstance(anchors, int) else 1) == 0:  # of numpy and torch, too
            count = checks.integer("anchors", anchors, 1, n)
            chosen = np.linspace(0, n - 1, count).round().astype(np.int64)
        else:
            chosen = checks.index_array("anchors", anchors, n)
        row, key = np.repeat(node, len(chosen)), np.tile(chosen, n)
        anchored = IntervalRows.build(row, key, key + 1, n, n)
        keep = anchored if keep is None else keep.union(anchored)
    return keep


def _read_by(rows: IntervalRows, queries: IntArray) -> BoolArray:
    """bool[n]: the keys that any of the queries may attend to."""
    return rows.take(queries).cover() > 0
