"""What a drawing of a Hasse diagram shows: every class while it fits, look-alike classes as one box otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray
from attnflow.order.hasse import Hasse

_MAX_LEVELS: Final = 24
_SEPARATE: Final = 4  # up to so many look-alike parts of a diagram are drawn apart
_MAX_PINNED: Final = 12
_ENDS: Final = 2  # classes drawn at either end of a lone chain

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Box:
    """Some classes drawn as one box.

    Attributes:
        classes: indices of the classes, ascending by level.
        inner_edges: covers between classes of this box, which are not drawn.
        parts: connected parts that these covers leave.
        is_chain: whether each part is a chain.
    """

    classes: tuple[int, ...]
    inner_edges: int
    parts: int
    is_chain: bool


@dataclass(frozen=True)
class Link:
    """Covers from classes of one box to classes of another: `count` of them, drawn as one line."""

    lower: int
    upper: int
    count: int


@dataclass(frozen=True)
class Grouping:
    """A diagram of boxes, every class in exactly one and every cover in exactly one box or link.

    Attributes:
        boxes: in topological order.
        links: sorted by upper box.
        levels: longest chain of boxes below each.
        how: what the classes of a box have in common, for the caption; empty if nothing was summarised.
    """

    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    levels: tuple[int, ...]
    how: str

    def box_of(self) -> dict[int, int]:
        """The box of each class."""
        return {index: box for box, members in enumerate(self.boxes) for index in members.classes}


@dataclass(frozen=True)
class Band:
    """Some consecutive levels: how many classes and positions lie in them, how many covers end in them."""

    first_level: int
    last_level: int
    classes: int
    positions: int
    covers: int


def groupings(diagram: Hasse, max_nodes: int, pinned: Sequence[int] = ()) -> Iterator[Grouping]:
    """Ever coarser groupings with at most `max_nodes` boxes that stay a diagram; possibly none.

    1. every class for itself; 2. chains (runs of single covers) as a box; 3. also classes with the same surroundings
    as a box: the coarsest equitable partition, in which all classes of a box cover equally many of every other box,
    so nothing but names is lost; 4. classes with the same numbers of covers below and above (and those of their
    neighbours, in rounds) as a box, connected parts apart: the roles in a repeating pattern.

    Args:
        diagram: the Hasse diagram.
        max_nodes: largest number of boxes.
        pinned: classes that should keep a box of their own.
    """
    size = len(diagram.nodes)
    edges = np.array(diagram.edges, dtype=np.int64).reshape(-1, 2)
    pins = np.unique(np.array(pinned[:_MAX_PINNED] if len(pinned) <= _MAX_PINNED else (), dtype=np.int64))
    level = np.array(diagram.levels, dtype=np.int64)
    own = np.arange(size)
    chains = _chains(size, edges, pins)
    in_chains = "runs of single covers are one box"
    candidates = [(own, ""), (_with_ends(chains, level, max_nodes), in_chains), (chains, in_chains)]
    for group, how in candidates:
        yield from _fitting(diagram, group, edges, level, max_nodes, how)
    alike = _equitable(chains, edges, pins, 4 * max_nodes)
    if alike is not None:
        yield from _fitting(diagram, alike, edges, level, max_nodes, "classes with the same surroundings are one box")
    for pinning in (pins, pins[:0]) if len(pins) else (pins,):
        for rounds in range(3):
            role = _roles(size, edges, pinning, rounds)
            how = "classes with equally many covers below and above are one box"
            yield from _fitting(diagram, role, edges, level, max_nodes, how)


def bands(diagram: Hasse, limit: int = _MAX_LEVELS) -> list[Band]:
    """The profile of a diagram: its levels, joined into at most `limit` bands of equal height."""
    level = np.array(diagram.levels, dtype=np.int64)
    count = int(level.max(initial=-1)) + 1
    height = max(1, -(-count // limit))
    number = -(-count // height)
    size = np.fromiter((len(node) for node in diagram.nodes), np.int64, len(diagram.nodes))
    upper = np.array(diagram.edges, dtype=np.int64).reshape(-1, 2)[:, 1]
    classes = np.bincount(level // height, minlength=number)
    positions = np.bincount(level // height, size, minlength=number).astype(np.int64)
    covers = np.bincount(level[upper] // height, minlength=number)
    return [
        Band(i * height, min((i + 1) * height, count) - 1, int(classes[i]), int(positions[i]), int(covers[i]))
        for i in range(number)
    ]


def _fitting(
    diagram: Hasse, group: IntArray, edges: IntArray, level: IntArray, max_nodes: int, how: str
) -> Iterator[Grouping]:
    """The grouping, if it is small enough to be read and no information flows in a circle between its boxes."""
    values, group = np.unique(group, return_inverse=True)
    number = len(values)
    if number > max_nodes:
        return
    pair = group[edges]
    across = pair[:, 0] != pair[:, 1]
    keys, counts = np.unique(pair[across, 0] * number + pair[across, 1], return_counts=True)
    lower, upper = keys // number, keys % number
    if len(keys) > 4 * max_nodes:
        return
    depth = _longest_paths(number, lower, upper)
    if depth is None or int(depth.max(initial=0)) >= _MAX_LEVELS:
        return
    inner = edges[~across]
    parts = _components(len(group), inner)
    most = np.maximum(np.bincount(inner[:, 0], minlength=len(group)), np.bincount(inner[:, 1], minlength=len(group)))
    order = np.lexsort((np.arange(len(group)), level))
    members: list[list[int]] = [[] for _ in range(number)]
    for index in order.tolist():
        members[group[index]].append(index)
    heads, inner_count = parts == np.arange(len(group)), np.bincount(group[inner[:, 0]], minlength=number)
    boxes = [
        Box(
            tuple(part),
            int(inner_count[i]),
            int(heads[part].sum()),
            bool(inner_count[i] and most[part].max() <= 1),
        )
        for i, part in enumerate(members)
    ]
    rank = sorted(range(number), key=lambda i: (int(depth[i]), boxes[i].classes[0]))
    place = np.argsort(np.array(rank, dtype=np.int64))
    links = sorted(
        (Link(int(place[a]), int(place[b]), int(c)) for a, b, c in zip(lower, upper, counts, strict=True)),
        key=lambda link: (link.upper, link.lower),
    )
    yield Grouping(
        tuple(boxes[i] for i in rank),
        tuple(links),
        tuple(int(depth[i]) for i in rank),
        how if number < len(group) else "",
    )


def _chains(size: int, edges: IntArray, pins: IntArray) -> IntArray:
    """For each class the lowest one of its chain: a run in which each is the only upper cover of its only lower one."""
    above, below = np.bincount(edges[:, 0], minlength=size), np.bincount(edges[:, 1], minlength=size)
    loose = np.ones(size, dtype=bool)
    loose[pins] = False
    link = edges[(above[edges[:, 0]] == 1) & (below[edges[:, 1]] == 1) & loose[edges[:, 0]] & loose[edges[:, 1]]]
    return _components(size, link)


def _with_ends(chains: IntArray, level: IntArray, max_nodes: int) -> IntArray:
    """The chains with two classes at either end drawn apart, if there are few and long ones."""
    heads, length = np.unique(chains, return_counts=True)
    if len(heads) > max_nodes // 5:
        return chains
    group = chains.copy()
    for head in heads[length > 2 * _ENDS + 2].tolist():
        members = np.flatnonzero(chains == head)
        members = members[np.argsort(level[members])]
        ends = [*members[:_ENDS].tolist(), *members[-_ENDS:].tolist()]
        group[members[_ENDS:-_ENDS]] = members[_ENDS]
        group[ends] = ends
    return group


def _equitable(start: IntArray, edges: IntArray, pins: IntArray, limit: int) -> IntArray | None:
    """The coarsest equitable partition of the diagram whose nodes are the groups of `start`; None above `limit`."""
    _, group = np.unique(start, return_inverse=True)
    number = int(group.max(initial=-1)) + 1
    pair = group[edges]
    pair = pair[pair[:, 0] != pair[:, 1]]
    down = _longest_paths(number, pair[:, 0], pair[:, 1])
    up = _longest_paths(number, pair[:, 1], pair[:, 0])
    if down is None or up is None:
        return None
    length = np.bincount(group, minlength=number)
    colour = np.unique(np.stack([down, up, length]), axis=1, return_inverse=True)[1].reshape(-1)
    colour[group[pins]] = number + np.arange(len(pins))
    while True:
        known = len(np.unique(colour))
        if known > limit:
            return None
        colour = _refined(colour, pair)
        if len(np.unique(colour)) == known:
            return colour[group]


def _roles(size: int, edges: IntArray, pins: IntArray, rounds: int) -> IntArray:
    """Classes of one role: equally many covers below and above, their neighbours too, in `rounds` rounds.

    Connected parts of a role are told apart while they are few, otherwise by their size.
    """
    above, below = np.bincount(edges[:, 0], minlength=size), np.bincount(edges[:, 1], minlength=size)
    colour = np.unique(np.stack([above, below]), axis=1, return_inverse=True)[1].reshape(-1)
    colour[pins] = size + np.arange(len(pins))
    for _ in range(rounds):
        colour = _refined(colour, edges)
    part = _components(size, edges[colour[edges[:, 0]] == colour[edges[:, 1]]])
    extent = np.bincount(part, minlength=size)[part]
    heads = np.flatnonzero(part == np.arange(size))
    parts_of_role = np.bincount(np.unique(colour[heads], return_inverse=True)[1])
    many = dict(zip(np.unique(colour[heads]).tolist(), (parts_of_role > _SEPARATE).tolist(), strict=True))
    crowded = np.array([many[c] for c in colour.tolist()], dtype=bool)
    key = np.stack([colour, np.where(crowded, extent, -1 - part)])
    return np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)


def _refined(colour: IntArray, edges: IntArray) -> IntArray:
    """One round of colour refinement: a new colour for each (colour, colours below, colours above), as multisets.

    A multiset is the sum of 64-bit scrambled colours: two different ones collide with probability 2^-64.
    """
    base = colour.astype(np.uint64)
    total = _scramble(base)
    np.add.at(total, edges[:, 1], _scramble(base[edges[:, 0]] + np.uint64(1 << 40)))
    np.add.at(total, edges[:, 0], _scramble(base[edges[:, 1]] + np.uint64(1 << 41)))
    return np.unique(total, return_inverse=True)[1].astype(np.int64)


def _scramble(values: Words) -> Words:
    """SplitMix64 (Steele et al., OOPSLA 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _components(size: int, edges: IntArray) -> IntArray:
    """For each node the smallest node that undirected `edges` connect it with."""
    label = np.arange(size)
    while True:
        new = label.copy()
        np.minimum.at(new, edges[:, 0], label[edges[:, 1]])
        np.minimum.at(new, edges[:, 1], label[edges[:, 0]])
        np.minimum.at(new, label, new.copy())  # hook the old representative, too
        while True:  # compress the pointers
            shorter = new[new]
            if np.array_equal(shorter, new):
                break
            new = shorter
        if np.array_equal(new, label):
            return label
        label = new


def _longest_paths(size: int, lower: IntArray, upper: IntArray) -> IntArray | None:
    """For each node the longest path that ends there; None if there is a cycle."""
    depth = np.zeros(size, dtype=np.int64)
    waiting = np.bincount(upper, minlength=size)
    order = np.argsort(lower, kind="stable")
    first = np.searchsorted(lower[order], np.arange(size + 1))
    targets, ready = upper[order].tolist(), np.flatnonzero(waiting == 0).tolist()
    bounds, left, longest = first.tolist(), waiting.tolist(), depth.tolist()
    for node in ready:  # grows while it is walked
        for other in targets[bounds[node] : bounds[node + 1]]:
            longest[other] = max(longest[other], longest[node] + 1)
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    return np.array(longest, dtype=np.int64) if len(ready) == size else None
