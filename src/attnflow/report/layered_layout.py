"""Layered graph placement (Sugiyama, Tagawa, Toda, IEEE SMC 11, 1981): rows by level, sorted by barycentres."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

Point = tuple[float, float]

_SWEEPS: Final = 24
_RELAXATIONS: Final = 40
_STRAIGHT: Final = 8.0  # how much more the stretches of a line that passes rows pull than others
_NODE_GAP: Final = 22.0
_LINE_GAP: Final = 14.0


@dataclass(frozen=True)
class LayeredPlacement:
    """Centres, and routes upwards: vertical stretches inside rows and oblique ones between them; y grows down."""

    centres: list[Point]
    routes: list[list[Point]]
    width: float
    height: float


class _Rows:
    """The vertices of each row: the nodes first, then a dummy for each row that an edge passes."""

    def __init__(self, widths: Sequence[float], levels: Sequence[int], edges: Sequence[tuple[int, int]]) -> None:
        self.num_real = len(widths)
        self.widths, self.row_of = list(widths), list(levels)
        self.trails: list[list[int]] = []  # the dummies of each edge
        for lower, upper in edges:
            assert levels[lower] < levels[upper]
            passed = range(levels[lower] + 1, levels[upper])
            self.trails.append(list(range(len(self.row_of), len(self.row_of) + len(passed))))
            self.row_of += passed
        self.widths += [0.0] * (len(self.row_of) - self.num_real)
        self.rows: list[list[int]] = [[] for _ in range(max(levels, default=-1) + 1)]
        for vertex, row in enumerate(self.row_of):
            self.rows[row].append(vertex)
        self.below: list[list[int]] = [[] for _ in self.row_of]
        self.above: list[list[int]] = [[] for _ in self.row_of]
        for (lower, upper), trail in zip(edges, self.trails, strict=True):
            for a, b in pairwise([lower, *trail, upper]):
                self.above[a].append(b)
                self.below[b].append(a)
        self.place = [0] * len(self.row_of)  # within the row

    def order(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = [list(row) for row in rows]
        for row in rows:
            for index, vertex in enumerate(row):
                self.place[vertex] = index

    def gap(self, left: int, right: int) -> float:
        space = _NODE_GAP if left < self.num_real or right < self.num_real else _LINE_GAP
        return (self.widths[left] + self.widths[right]) / 2 + space


def place(
    sizes: Sequence[tuple[float, float]], levels: Sequence[int], edges: Sequence[tuple[int, int]], row_gap: float = 40.0
) -> LayeredPlacement:
    """Places boxes of (width, height) on rows. Cost: O(sweeps v log v), v the nodes and the rows that edges pass."""
    graph = _Rows([width for width, _ in sizes], levels, edges)
    _reduce_crossings(graph)
    x = _coordinates(graph)
    left = min((centre - width / 2 for centre, width in zip(x, graph.widths, strict=True)), default=0.0)
    right = max((centre + width / 2 for centre, width in zip(x, graph.widths, strict=True)), default=0.0)
    x = [value - left for value in x]
    heights = [max((sizes[v][1] for v in row if v < len(sizes)), default=0.0) for row in graph.rows]
    gaps = [_row_gap(graph, x, row, row_gap) for row in range(len(graph.rows) - 1)]
    total = sum(heights, 0.0) + sum(gaps, 0.0)
    bottoms: list[float] = []
    y = total
    for height, gap in zip(heights, [*gaps, 0.0], strict=False):
        bottoms.append(y)
        y -= height + gap
    middle = [bottom - height / 2 for bottom, height in zip(bottoms, heights, strict=True)]
    routes: list[list[Point]] = []
    for (lower, upper), trail in zip(edges, graph.trails, strict=True):
        row, top = levels[lower], middle[levels[lower]] - sizes[lower][1] / 2
        end_of_row = bottoms[row] - heights[row] if sizes[lower][1] < heights[row] else top
        route = [(x[lower], top), (x[lower], end_of_row)]
        for dummy in trail:
            row = graph.row_of[dummy]
            route += [(x[dummy], bottoms[row]), (x[dummy], bottoms[row] - heights[row])]
        row = levels[upper]
        route += [(x[upper], bottoms[row]), (x[upper], middle[row] + sizes[upper][1] / 2)]
        routes.append(route)
    centres = [(x[v], middle[levels[v]]) for v in range(len(sizes))]
    return LayeredPlacement(centres, routes, right - left, total)


def shelved(
    sizes: Sequence[tuple[float, float]],
    levels: Sequence[int],
    edges: Sequence[tuple[int, int]],
    width: float,
    row_gap: float = 40.0,
) -> LayeredPlacement:
    """Places boxes as `place` does; if that is wider than `width`, the connected parts stand on several shelves."""
    whole = place(sizes, levels, edges, row_gap)
    if whole.width <= width:
        return whole
    import networkx  # a tenth of the time in which `attnflow mask show` answers, and few drawings come here

    graph = networkx.Graph(edges)
    graph.add_nodes_from(range(len(sizes)))
    parts = sorted(map(sorted, networkx.connected_components(graph)))
    if len(parts) == 1:
        return whole
    centres, routes = [(0.0, 0.0)] * len(sizes), [list[Point]()] * len(edges)
    shelves: list[list[tuple[list[int], list[int], LayeredPlacement]]] = [[]]
    room = width
    for part in parts:
        index = {node: i for i, node in enumerate(part)}
        own = [i for i, (lower, _) in enumerate(edges) if lower in index]
        ends = [(index[lower], index[upper]) for lower, upper in (edges[i] for i in own)]
        placed = place([sizes[v] for v in part], [levels[v] for v in part], ends, row_gap)
        if shelves[-1] and placed.width > room:
            shelves.append([])
            room = width
        shelves[-1].append((part, own, placed))
        room -= placed.width + _NODE_GAP
    right = top = 0.0
    for shelf in shelves:
        left, height = 0.0, max(placed.height for _, _, placed in shelf)
        for part, own, placed in shelf:
            down = top + height - placed.height  # what reads nothing stands at the bottom
            for node, (x, y) in zip(part, placed.centres, strict=True):
                centres[node] = (x + left, y + down)
            for edge, route in zip(own, placed.routes, strict=True):
                routes[edge] = [(x + left, y + down) for x, y in route]
            left += placed.width + _NODE_GAP
        right, top = max(right, left - _NODE_GAP), top + height + row_gap
    return LayeredPlacement(centres, routes, right, top - row_gap)


def _reduce_crossings(graph: _Rows) -> None:
    """Sort rows by the mean places of their neighbours, up and down; the order with fewest crossings stays."""
    graph.order(_descended(graph))
    best, fewest = graph.rows, math.inf
    for sweep in range(_SWEEPS):
        crossings = _crossings(graph)
        if crossings < fewest:
            best, fewest = [list(row) for row in graph.rows], crossings
        for row in graph.rows if sweep % 2 == 0 else reversed(graph.rows):
            _sort_row(row, graph.below if sweep % 2 == 0 else graph.above, graph.place)
        for row in graph.rows:
            _swap(row, graph)
    graph.order(best)


def _swap(row: list[int], graph: _Rows) -> None:
    place = graph.place
    for index in range(len(row) - 1):
        left, right = row[index], row[index + 1]
        gain = 0
        for side in (graph.below, graph.above):
            gain += sum((place[u] > place[v]) - (place[u] < place[v]) for u in side[left] for v in side[right])
        if gain > 0:
            row[index], row[index + 1] = right, left
            place[left], place[right] = index + 1, index


def _descended(graph: _Rows) -> list[list[int]]:
    rows: list[dict[int, None]] = [{} for _ in graph.rows]
    stack = [v for row in graph.rows for v in reversed(row) if not graph.above[v]]
    while stack:
        v = stack.pop()
        if v not in rows[graph.row_of[v]]:
            rows[graph.row_of[v]][v] = None
            stack += reversed(graph.below[v])
    return [list(row) for row in rows]


def _sort_row(row: list[int], neighbours: list[list[int]], place: list[int]) -> None:
    centre = {v: sum(place[u] for u in neighbours[v]) / len(neighbours[v]) for v in row if neighbours[v]}
    ordered = iter(sorted(centre, key=lambda v: (centre[v], place[v])))
    row[:] = [next(ordered) if v in centre else v for v in row]  # vertices without neighbours keep their place
    for index, v in enumerate(row):
        place[v] = index


def _crossings(graph: _Rows) -> int:
    total = 0
    for row in graph.rows:
        seen: list[int] = []
        for v in row:
            ends = sorted(graph.place[u] for u in graph.above[v])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _coordinates(graph: _Rows) -> list[float]:
    x = [0.0] * len(graph.row_of)
    for row in graph.rows:
        for left, right in pairwise(row):
            x[right] = x[left] + graph.gap(left, right)
        centre = (x[row[-1]] + x[row[0]]) / 2 if row else 0.0
        for v in row:
            x[v] -= centre
    for sweep in range(_RELAXATIONS):
        for row in graph.rows if sweep % 2 == 0 else reversed(graph.rows):
            _settle(graph, row, x)
    return x


def _settle(graph: _Rows, row: list[int], x: list[float]) -> None:
    wanted, weights, offsets, offset = list[float](), list[float](), list[float](), 0.0
    for index, v in enumerate(row):
        offset += graph.gap(row[index - 1], v) if index else 0.0
        offsets.append(offset)
        passes = v >= graph.num_real
        near = [*graph.below[v], *graph.above[v]]
        pull = [(u, _STRAIGHT if passes and u >= graph.num_real else 1.0) for u in near]
        weight = sum(w for _, w in pull)
        wanted.append((sum(w * x[u] for u, w in pull) / weight if pull else x[v]) - offset)
        weights.append(weight or 0.1)
    for v, value, shift in zip(row, _isotonic(wanted, weights), offsets, strict=True):
        x[v] = value + shift


def _isotonic(values: list[float], weights: list[float]) -> list[float]:
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, other_weight, other_count = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


def _row_gap(graph: _Rows, x: list[float], row: int, least: float) -> float:
    """Returns the space above a row: `least` where lines go straight up, more where they would be nearly horizontal."""
    widest = max((abs(x[u] - x[v]) for v in graph.rows[row] for u in graph.above[v]), default=0.0)
    return min(max(least, min(40.0, 0.6 * widest), 0.22 * widest), 120.0)
