"""Isomorphism of coloured directed graphs by refinement of colours, in bounded work.

Two nodes get different colours as soon as the colours around them differ. Where that does not tell nodes apart (in
strongly regular graphs it never does), one of them gets a colour of its own, each of its counterparts is tried, and the
rest is refined again. Nodes with the same neighbours are interchangeable, so each such group counts as one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

LARGEST_WORK: Final = 1 << 22  # neighbours looked at: about ten seconds


@dataclass
class Work:
    """Neighbours that may still be looked at, in all that shares this budget."""

    left: int = LARGEST_WORK

    def spend(self, amount: int, size: int) -> None:
        """Take some of it.

        Raises:
            ValueError: there is not enough.
        """
        self.left -= amount
        if self.left < 0:
            raise ValueError(
                f"whether two down-sets of {size} nodes are isomorphic takes more than {LARGEST_WORK:,} steps to tell: "
                "inputs repeat below them in a pattern that is too symmetric. Give repeated inputs positions of their "
                "own, so that each stands once in a down-set"
            )


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed graph: the colour of each node, and the edges (lower, upper)."""

    colours: Sequence[Hashable]
    edges: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class _Quotient:
    """A graph in which each group of interchangeable nodes is one node."""

    groups: list[list[int]]
    colours: list[Hashable]
    lower: list[list[int]]
    upper: list[list[int]]

    @classmethod
    def of(cls, graph: Graph) -> _Quotient:
        below: list[set[int]] = [set() for _ in graph.colours]
        above: list[set[int]] = [set() for _ in graph.colours]
        for lower, upper in graph.edges:
            below[upper].add(lower)
            above[lower].add(upper)
        members: dict[Hashable, list[int]] = {}
        for node, colour in enumerate(graph.colours):
            members.setdefault((colour, frozenset(below[node]), frozenset(above[node])), []).append(node)
        groups = list(members.values())
        number = {node: place for place, group in enumerate(groups) for node in group}
        return cls(
            groups,
            [(graph.colours[group[0]], len(group)) for group in groups],
            [sorted({number[other] for other in below[group[0]]}) for group in groups],
            [sorted({number[other] for other in above[group[0]]}) for group in groups],
        )

    def signatures(self, colours: Sequence[int]) -> list[Hashable]:
        """The colour of each node with those around it."""
        return [
            (colour, *(tuple(sorted(colours[other] for other in side[node])) for side in (self.lower, self.upper)))
            for node, colour in enumerate(colours)
        ]


def isomorphism(one: Graph, two: Graph, work: Work) -> dict[int, int] | None:
    """A bijection of the nodes that keeps colours and edges; None if there is none.

    Raises:
        ValueError: it takes more than is left of `work`.
    """
    if len(one.colours) != len(two.colours) or len(one.edges) != len(two.edges):
        return None
    left, right = _Quotient.of(one), _Quotient.of(two)
    if len(left.groups) != len(right.groups):
        return None
    number: dict[Hashable, int] = {}
    first, second = ([number.setdefault(c, len(number)) for c in graph.colours] for graph in (left, right))
    stack = [(first, second)]
    while stack:
        refined = _refined(left, right, *stack.pop(), work)
        if refined is None:
            continue
        colours, others = refined
        counts = Counter(colours)
        cell = min(((count, colour) for colour, count in counts.items() if count > 1), default=None)
        if cell is None:
            place = {colour: node for node, colour in enumerate(others)}
            pairs = [(left.groups[node], right.groups[place[colour]]) for node, colour in enumerate(colours)]
            return {x: y for group, other in pairs for x, y in zip(group, other, strict=True)}
        chosen, fresh = colours.index(cell[1]), len(counts)
        alone = [*colours[:chosen], fresh, *colours[chosen + 1 :]]
        counterparts = [node for node, colour in enumerate(others) if colour == cell[1]]
        stack += [(alone, [*others[:y], fresh, *others[y + 1 :]]) for y in reversed(counterparts)]
    return None


def _refined(
    left: _Quotient, right: _Quotient, colours: list[int], others: list[int], work: Work
) -> tuple[list[int], list[int]] | None:
    """Colours that no look around refines further, equally many of each on both sides; None where they are not."""
    size = len(colours)
    looks = size + sum(map(len, left.lower)) + sum(map(len, left.upper))
    while True:
        work.spend(2 * looks, size)
        seen, met = left.signatures(colours), right.signatures(others)
        if Counter(seen) != Counter(met):
            return None
        number: dict[Hashable, int] = {}
        before = len(set(colours))
        colours = [number.setdefault(signature, len(number)) for signature in seen]
        others = [number[signature] for signature in met]
        if len(number) == before:
            return colours, others
