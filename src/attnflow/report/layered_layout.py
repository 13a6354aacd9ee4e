"""Layered placement (Sugiyama, Tagawa, Toda, IEEE SMC 11, 1981): rows by level, few crossings, no overlap."""

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
_STRAIGHTENINGS: Final = 6
_NODE_GAP: Final = 22.0
_LINE_GAP: Final = 14.0


@dataclass(frozen=True)
class Placement:
    """Where everything is drawn; y grows downwards, so that the lowest level has the largest y.

    Attributes:
        centres: centre of each node.
        routes: for each edge its points, from the top of the lower node to the bottom of the upper one; the stretches
            are by turns vertical, inside a row, and oblique, between rows. Rows hold no node where a stretch passes.
        width: of the whole drawing.
        height: of the whole drawing.
    """

    centres: list[Point]
    routes: list[list[Point]]
    width: float
    height: float


@dataclass
class _Rows:
    """The vertices of each row, real ones first numbered, then one dummy for each row that an edge passes."""

    rows: list[list[int]]
    row_of: list[int]
    below: list[list[int]]
    above: list[list[int]]
    widths: list[float]
    trails: list[list[int]]
    num_real: int
    spine: set[tuple[int, int]]
    place: list[int]

    def pull(self, lower: int, upper: int) -> float:
        """How strongly a segment wants to be vertical (Gansner et al., IEEE TSE 19, 1993): long edges, then spines."""
        dummies = (lower >= self.num_real) + (upper >= self.num_real)
        return (8.0 if (lower, upper) in self.spine else 1.0, 2.0, 8.0)[dummies]

    def gap(self, left: int, right: int) -> float:
        """Distance between the centres of neighbours in a row."""
        space = _NODE_GAP if left < self.num_real or right < self.num_real else _LINE_GAP
        return (self.widths[left] + self.widths[right]) / 2 + space


def place(
    sizes: Sequence[tuple[float, float]], levels: Sequence[int], edges: Sequence[tuple[int, int]], row_gap: float = 40.0
) -> Placement:
    """Places boxes of the given (width, height) on the rows `levels`; edges go from lower to upper.

    Cost: O(sweeps x vertices x log), with a vertex for each node and for each row that an edge passes.
    """
    graph = _with_dummies([width for width, _ in sizes], levels, edges)
    _reduce_crossings(graph)
    x = _coordinates(graph)
    left = min((x[v] - graph.widths[v] / 2 for v in range(len(x))), default=0.0)
    right = max((x[v] + graph.widths[v] / 2 for v in range(len(x))), default=0.0)
    heights = [max((sizes[v][1] for v in row if v < len(sizes)), default=0.0) for row in graph.rows]
    gaps = [_row_gap(graph, x, row, row_gap) for row in range(len(graph.rows) - 1)]
    total = sum(heights, 0.0) + sum(gaps, 0.0)
    bottoms: list[float] = []
    y = total
    for row, height in enumerate(heights):
        bottoms.append(y)
        y -= height + (gaps[row] if row < len(gaps) else 0.0)
    x = [value - left for value in x]
    middle = [bottoms[row] - heights[row] / 2 for row in range(len(heights))]
    centres = [(x[v], middle[levels[v]]) for v in range(len(sizes))]
    routes: list[list[Point]] = []
    for (lower, upper), trail in zip(edges, graph.trails, strict=True):
        route = [(x[lower], middle[levels[lower]] - sizes[lower][1] / 2)]
        if sizes[lower][1] < heights[levels[lower]]:
            route += [(x[lower], bottoms[levels[lower]] - heights[levels[lower]])]
        else:
            route += route[-1:]
        for dummy in trail:
            row = graph.row_of[dummy]
            route += [(x[dummy], bottoms[row]), (x[dummy], bottoms[row] - heights[row])]
        row = levels[upper]
        route += [(x[upper], bottoms[row]), (x[upper], middle[row] + sizes[upper][1] / 2)]
        routes.append(route)
    return Placement(centres, routes, right - left, total)


def _with_dummies(widths: list[float], levels: Sequence[int], edges: Sequence[tuple[int, int]]) -> _Rows:
    rows: list[list[int]] = [[] for _ in range(max(levels, default=-1) + 1)]
    row_of, all_widths = list(levels), list(widths)
    for node, level in enumerate(levels):
        rows[level].append(node)
    below: list[list[int]] = [[] for _ in widths]
    above: list[list[int]] = [[] for _ in widths]
    trails: list[list[int]] = []
    for lower, upper in edges:
        if levels[lower] >= levels[upper]:
            raise ValueError(f"edge ({lower}, {upper}) must go up, got levels {levels[lower]} and {levels[upper]}")
        trail: list[int] = []
        for row in range(levels[lower] + 1, levels[upper]):
            trail.append(len(row_of))
            rows[row].append(len(row_of))
            row_of.append(row)
            all_widths.append(0.0)
            below.append([])
            above.append([])
        trails.append(trail)
        stops = [lower, *trail, upper]
        for a, b in pairwise(stops):
            above[a].append(b)
            below[b].append(a)
    spine = _spine(len(widths), levels, edges)
    return _Rows(rows, row_of, below, above, all_widths, trails, len(widths), spine, [0] * len(row_of))


def _spine(size: int, levels: Sequence[int], edges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """The edges that continue the longest chain on both sides: for the lower node upwards, for the upper downwards."""
    height = [0] * size
    for lower, upper in sorted(edges, key=lambda edge: -levels[edge[1]]):
        height[lower] = max(height[lower], height[upper] + 1)
    onward: dict[int, int] = {}
    back: dict[int, int] = {}
    for lower, upper in sorted(edges):
        if lower not in onward or height[upper] > height[onward[lower]]:
            onward[lower] = upper
        if upper not in back or levels[lower] > levels[back[upper]]:
            back[upper] = lower
    return {(lower, upper) for lower, upper in onward.items() if back[upper] == lower}


def _reduce_crossings(graph: _Rows) -> None:
    """Sorts each row by the mean place of its neighbours, down and up, swaps neighbours, keeps the best order seen."""
    best: list[list[int]] = []
    fewest = -1
    for start in (_by_index(graph), _by_descent(graph)):
        rows = [list(row) for row in start]
        place = _places(rows, len(graph.row_of))
        for sweep in range(_SWEEPS):
            crossings = _crossings(rows, graph.above, place)
            if fewest < 0 or crossings < fewest:
                best, fewest = [list(row) for row in rows], crossings
            if crossings == 0:
                break
            upwards = sweep % 2 == 0
            neighbours = graph.below if upwards else graph.above
            for index in range(len(rows)) if upwards else reversed(range(len(rows))):
                _sort_row(rows[index], neighbours, place)
            for row in rows:
                _swap(row, graph, place)
    graph.rows[:] = best
    graph.place[:] = _places(best, len(graph.row_of))


def _swap(row: list[int], graph: _Rows, place: list[int]) -> None:
    """Swaps neighbours in a row wherever that removes crossings."""
    for index in range(len(row) - 1):
        left, right = row[index], row[index + 1]
        gain = 0
        for side in (graph.below, graph.above):
            a, b = [place[u] for u in side[left]], [place[u] for u in side[right]]
            gain += sum((p > q) - (p < q) for p in a for q in b)
        if gain > 0:
            row[index], row[index + 1] = right, left
            place[left], place[right] = index + 1, index


def _by_index(graph: _Rows) -> list[list[int]]:
    """Nodes as they come (by position), dummies between the ends of their edge."""
    key = [float(v) for v in range(len(graph.row_of))]
    for trail in graph.trails:
        if trail:
            key_of_ends = (graph.below[trail[0]][0] + graph.above[trail[-1]][0]) / 2
            for dummy in trail:
                key[dummy] = key_of_ends
    return [sorted(row, key=lambda v: (key[v], v)) for row in graph.rows]


def _by_descent(graph: _Rows) -> list[list[int]]:
    """Nodes in the order of a depth-first walk from the top, which keeps what hangs together side by side."""
    seen: set[int] = set()
    rows: list[list[int]] = [[] for _ in graph.rows]
    stack = [v for row in graph.rows for v in reversed(row) if not graph.above[v]]
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            rows[graph.row_of[v]].append(v)
            stack += reversed(graph.below[v])
    return rows


def _places(rows: list[list[int]], size: int) -> list[int]:
    place = [0] * size
    for row in rows:
        for index, v in enumerate(row):
            place[v] = index
    return place


def _sort_row(row: list[int], neighbours: list[list[int]], place: list[int]) -> None:
    centre = {v: (sum(place[u] for u in neighbours[v]) / len(neighbours[v]) if neighbours[v] else None) for v in row}
    free = iter(sorted((v for v in row if centre[v] is not None), key=lambda v: (centre[v] or 0.0, place[v])))
    row[:] = [v if centre[v] is None else next(free) for v in row]  # vertices without neighbours keep their place
    for index, v in enumerate(row):
        place[v] = index


def _crossings(rows: list[list[int]], above: list[list[int]], place: list[int]) -> int:
    total = 0
    for row in rows:
        seen: list[int] = []
        for v in row:
            ends = sorted(place[u] for u in above[v])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _coordinates(graph: _Rows) -> list[float]:
    """Draws every vertex to the mean of its neighbours as far as its row allows, then straightens lines."""
    x = [0.0] * len(graph.row_of)
    for row in graph.rows:
        for left, right in pairwise(row):
            x[right] = x[left] + graph.gap(left, right)
        centre = (x[row[-1]] + x[row[0]]) / 2 if row else 0.0
        for v in row:
            x[v] -= centre
    for sweep in range(_RELAXATIONS):
        upwards = sweep % 2 == 0
        for index in range(len(graph.rows)) if upwards else reversed(range(len(graph.rows))):
            _settle(graph, graph.rows[index], x)
    lines = sorted(_lines(graph), key=lambda line: -len(line))
    straight = {v for line in lines if len(line) > 1 for v in line}
    for _ in range(_STRAIGHTENINGS):
        for line in lines:
            _straighten(graph, line, x)
        for row in graph.rows:
            for v in row:
                if v not in straight and (graph.below[v] or graph.above[v]):
                    near = [x[u] for u in graph.below[v] + graph.above[v]]
                    low, high = _room(graph, v, x)
                    x[v] = min(max(sum(near) / len(near), low), high)
    return x


def _lines(graph: _Rows) -> list[list[int]]:
    """What should be vertical: the dummies of each long edge, and the runs of spine edges between rows side by side."""
    onward = {lower: upper for lower, upper in graph.spine if graph.row_of[upper] == graph.row_of[lower] + 1}
    lines = [trail for trail in graph.trails if trail]
    for start in set(onward) - set(onward.values()):
        line = [start]
        while line[-1] in onward:
            line.append(onward[line[-1]])
        lines.append(line)
    return lines


def _straighten(graph: _Rows, line: list[int], x: list[float]) -> None:
    """Moves the vertices of `line` to one x where their rows leave room for it, else stretch by stretch."""
    stretch: list[int] = []
    low, high = -math.inf, math.inf
    for v in [*line, -1]:
        room = _room(graph, v, x) if v >= 0 else (math.inf, -math.inf)
        if max(low, room[0]) > min(high, room[1]):
            target = min(max(sum(x[u] for u in stretch) / len(stretch), low), high)
            for u in stretch:
                x[u] = target
            stretch, (low, high) = [], room
        else:
            low, high = max(low, room[0]), min(high, room[1])
        stretch.append(v)


def _room(graph: _Rows, v: int, x: list[float]) -> tuple[float, float]:
    row, place = graph.rows[graph.row_of[v]], graph.place[v]
    low = x[row[place - 1]] + graph.gap(row[place - 1], v) if place else -math.inf
    high = x[row[place + 1]] - graph.gap(v, row[place + 1]) if place + 1 < len(row) else math.inf
    return low, max(low, high)  # rounding may leave them a hair apart


def _settle(graph: _Rows, row: list[int], x: list[float]) -> None:
    wanted: list[float] = []
    weights: list[float] = []
    offset = 0.0
    offsets: list[float] = []
    for index, v in enumerate(row):
        offset += graph.gap(row[index - 1], v) if index else 0.0
        offsets.append(offset)
        pull = [(u, graph.pull(u, v)) for u in graph.below[v]] + [(u, graph.pull(v, u)) for u in graph.above[v]]
        weight = sum(w for _, w in pull)
        wanted.append((sum(w * x[u] for u, w in pull) / weight if pull else x[v]) - offset)
        weights.append(weight or 0.1)
    for v, value, shift in zip(row, _isotonic(wanted, weights), offsets, strict=True):
        x[v] = value + shift


def _isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent violators)."""
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
    """Space above a row: more where lines run far sideways, so that none is nearly horizontal."""
    widest = max((abs(x[u] - x[v]) for v in graph.rows[row] for u in graph.above[v]), default=0.0)
    return min(max(least, 0.22 * widest), 3 * least)
