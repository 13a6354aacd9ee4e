"""Summaries of a Hasse diagram: every class while it fits, otherwise one box for similar classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.order.hasse import Hasse
from attnflow.tasks.equivalence import GOLDEN, mix

_MAX_LEVELS: Final = 24
_SEPARATE: Final = 4  # up to so many look-alike parts of a diagram are drawn apart
_MAX_PINNED: Final = 12
_BANDS: Final = 8  # boxes of an irregular diagram, one for neighbouring levels each
_ENDS: Final = 2  # classes drawn at either end of a lone chain


@dataclass(frozen=True)
class Box:
    """Classes drawn as one box; undrawn `inner_edges` leave `parts` connected parts, all chains if `is_chain`."""

    classes: tuple[int, ...]
    inner_edges: int
    parts: int
    is_chain: bool


@dataclass(frozen=True)
class Grouping:
    """Boxes in topological order; `links` count covers, `levels` the longest chain of boxes below, `how` says it."""

    boxes: tuple[Box, ...]
    links: dict[tuple[int, int], int]
    levels: tuple[int, ...]
    how: str

    def box_of(self) -> dict[int, int]:
        return {index: box for box, members in enumerate(self.boxes) for index in members.classes}


def classes(diagram: Hasse) -> Grouping:
    """Every class in a box of its own, however many there are."""
    order = sorted(range(len(diagram.nodes)), key=lambda index: diagram.levels[index])
    rank = {index: box for box, index in enumerate(order)}
    boxes = tuple(Box((index,), 0, 1, is_chain=False) for index in order)
    links = {(rank[lower], rank[upper]): 1 for lower, upper in diagram.edges}
    return Grouping(boxes, links, tuple(diagram.levels[index] for index in order), "")


def groupings(diagram: Hasse, max_nodes: int, pinned: Sequence[int] = ()) -> Iterator[Grouping]:
    """Yields ever coarser acyclic groupings with at most `max_nodes` boxes; pinned classes should keep their own.

    These are single classes; chains; the coarsest equitable partition (all classes of a box cover equally many classes
    of each other box); connected parts of roles, classes with equal numbers of covers; neighbouring levels.
    """
    size = len(diagram.nodes)
    edges = np.array(diagram.edges, dtype=np.int64).reshape(-1, 2)
    level = np.array(diagram.levels, dtype=np.int64)
    pins = np.unique(np.array(pinned if len(pinned) <= _MAX_PINNED else (), dtype=np.int64))
    above, below = (np.bincount(ends, minlength=size) for ends in edges.T)
    single = (above[edges[:, 0]] == 1) & (below[edges[:, 1]] == 1)
    chains = _components(size, edges[single & ~np.isin(edges, pins).any(axis=1)])

    def candidates() -> Iterator[tuple[IntArray | None, str]]:
        yield np.arange(size), ""
        for group in (_with_ends(chains, level, max_nodes), chains):
            yield group, "runs of single covers are one box"
        yield _equitable(chains, edges, pins, 4 * max_nodes), "classes with the same surroundings are one box"
        for pinning in (pins, pins[:0]) if len(pins) else (pins,):
            for rounds in range(3):
                how = "classes with equally many covers below and above are one box"
                yield _roles(size, edges, pinning, rounds), how
        height = -(-(int(level.max(initial=0)) + 1) // min(_BANDS, max_nodes))
        yield level // height, "classes on neighbouring levels are one box"

    for group, how in candidates():
        grouping = None if group is None else _grouping(group, edges, level, max_nodes, how)
        if grouping is not None:
            yield grouping


def _grouping(group: IntArray, edges: IntArray, level: IntArray, max_nodes: int, how: str) -> Grouping | None:
    """Returns the grouping, or None if it is too large or its boxes form a cycle."""
    group = np.unique(group, return_inverse=True)[1]
    size, number = len(group), int(group.max(initial=-1)) + 1
    if number > max_nodes:
        return None
    across = group[edges[:, 0]] != group[edges[:, 1]]
    pairs = np.unique(group[edges[across]], axis=0)
    depth = _longest_paths(number, pairs) if len(pairs) <= 4 * max_nodes else None
    if depth is None or int(depth.max(initial=0)) >= _MAX_LEVELS:
        return None
    order = np.lexsort((np.arange(size), level))
    lowest = order[np.unique(group[order], return_index=True)[1]]  # class of each box
    rank = np.lexsort((lowest, depth))
    group = np.argsort(rank)[group]  # boxes in topological order
    links, counts = np.unique(group[edges[across]][:, ::-1], axis=0, return_counts=True)
    inner = edges[~across]
    heads = _components(size, inner) == np.arange(size)
    boxes: list[Box] = []
    for box in range(number):
        classes, covers = order[group[order] == box], inner[group[inner[:, 0]] == box]
        is_chain = len(covers) > 0 and all(len(np.unique(ends)) == len(covers) for ends in covers.T)
        boxes.append(Box(tuple(classes.tolist()), len(covers), int(heads[classes].sum()), is_chain))
    counted = {(lower, upper): count for (upper, lower), count in zip(links.tolist(), counts.tolist(), strict=True)}
    return Grouping(tuple(boxes), counted, tuple(depth[rank].tolist()), how if number < size else "")


def _with_ends(chains: IntArray, level: IntArray, max_nodes: int) -> IntArray:
    """Separates two classes at either end of each chain if the chains are few and long."""
    heads, length = np.unique(chains, return_counts=True)
    if len(heads) > max_nodes // 5:
        return chains
    group = chains.copy()
    for head in heads[length > 2 * _ENDS + 2].tolist():
        members = np.flatnonzero(chains == head)
        members = members[np.argsort(level[members])]
        group[members] = members
        group[members[_ENDS:-_ENDS]] = members[_ENDS]
    return group


def _equitable(start: IntArray, edges: IntArray, pins: IntArray, limit: int) -> IntArray | None:
    """Returns the coarsest equitable partition of the quotient by `start`; None above `limit` or for a cycle."""
    _, group, length = np.unique(start, return_inverse=True, return_counts=True)
    pairs = group[edges]
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    down, up = _longest_paths(len(length), pairs), _longest_paths(len(length), pairs[:, ::-1])
    if down is None or up is None:
        return None
    colour = _numbered(down, up, length)
    colour[group[pins]] = len(length) + np.arange(len(pins))
    count = 0
    while count < (now := len(np.unique(colour))) <= limit:
        count, colour = now, _refined(colour, pairs)
    return colour[group] if count == now else None


def _roles(size: int, edges: IntArray, pins: IntArray, rounds: int) -> IntArray:
    """Groups classes with equal numbers of covers and, for `rounds` rounds, alike neighbours; few parts stay apart."""
    colour = _numbered(*(np.bincount(ends, minlength=size) for ends in edges.T))
    colour[pins] = size + np.arange(len(pins))
    for _ in range(rounds):
        colour = _refined(colour, edges)
    part = _components(size, edges[colour[edges[:, 0]] == colour[edges[:, 1]]])
    extent = np.bincount(part, minlength=size)[part]
    colour = _numbered(colour)
    parts_of_role = np.bincount(colour[part == np.arange(size)])
    return _numbered(colour, np.where(parts_of_role[colour] > _SEPARATE, extent, -1 - part))


def _numbered(*features: IntArray) -> IntArray:
    return np.unique(np.stack(features), axis=1, return_inverse=True)[1].reshape(-1)


def _refined(colour: IntArray, edges: IntArray) -> IntArray:
    """Refines by the multisets of colours below and above: sums of 64-bit hashes, which collide with odds of 2^-64."""
    base = colour.astype(np.uint64)
    total = mix(base + np.uint64(GOLDEN))
    for one, other, bit in ((0, 1, 40), (1, 0, 41)):
        np.add.at(total, edges[:, other], mix(base[edges[:, one]] + np.uint64((1 << bit) + GOLDEN)))
    return np.unique(total, return_inverse=True)[1].astype(np.int64)


def _components(size: int, edges: IntArray) -> IntArray:
    graph = coo_array((np.ones(len(edges), np.int8), (edges[:, 0], edges[:, 1])), shape=(size, size))
    _, label = connected_components(graph, directed=False)
    return np.unique(label, return_index=True)[1][label]


def _longest_paths(size: int, edges: IntArray) -> IntArray | None:
    """Returns for each node the longest path that ends there, or None for a cyclic graph."""
    longest, left = [0] * size, np.bincount(edges[:, 1], minlength=size).tolist()
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    first, targets = np.searchsorted(edges[:, 0], np.arange(size + 1)).tolist(), edges[:, 1].tolist()
    ready = [node for node in range(size) if left[node] == 0]
    for node in ready:  # grows while it is walked
        for other in targets[first[node] : first[node + 1]]:
            longest[other] = max(longest[other], longest[node] + 1)
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    return np.array(longest, dtype=np.int64) if len(ready) == size else None
