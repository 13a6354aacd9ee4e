"""The smallest poset that holds every down-set of a family, where equal nodes may share a down-set.

Theorem 3.7 of the paper takes one node per equivalence class. That is false when a down-set holds two equivalent
nodes (two equal roots under c): c would lose one of them and no longer be embedded (order.md). Here every type gets
as many nodes as its largest number in one down-set, and a search decides which copies go together. Types whose
whole down-set never repeats anything need one node each, in every smallest poset, so only the others are searched.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from attnflow.tasks.nodes import Poset, Types

_STEPS: Final = 50_000  # about a second
_DEPTH: Final = 400  # recursion; beyond it only the greedy solution is taken


@dataclass(frozen=True, eq=False)
class Amalgam:
    """A poset in which every type occurs.

    Attributes:
        types: the type of each node; nodes are in topological order.
        below: all nodes strictly below each node.
        lower_bound: number of nodes that any such poset must have.
        is_minimal: whether it is proved to have the fewest nodes.
    """

    types: list[int]
    below: list[frozenset[int]]
    lower_bound: int
    is_minimal: bool


@dataclass(eq=False)
class _Search:
    """Grows a poset ideal by ideal; keeps the smallest that holds all of them."""

    ideals: list[tuple[Poset, list[int]]]  # of the maximal types: what has to be embedded
    needed: Counter[int]  # nodes of each type that some down-set holds
    forced: frozenset[int]  # types that have exactly one node
    types: list[int] = field(default_factory=list[int])
    below: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    best: tuple[list[int], list[frozenset[int]]] | None = None
    steps: int = 0

    @property
    def bound(self) -> int:
        """Nodes that any completion of the present poset has at least."""
        have = Counter(self.types)
        return len(self.types) + sum(max(0, count - have[kind]) for kind, count in self.needed.items())

    def candidates(self, kind: int, below: frozenset[int], used: set[int]) -> list[int]:
        """Free nodes of this type over exactly these nodes; of twins under the same nodes only the first."""
        nodes: dict[frozenset[int], int] = {}
        for node, (other, under) in enumerate(zip(self.types, self.below, strict=True)):
            if other == kind and under == below and node not in used:
                above = frozenset(upper for upper, lowers in enumerate(self.below) if node in lowers)
                nodes.setdefault(above, node)
        return list(nodes.values())

    def add(self, kind: int, below: frozenset[int]) -> int:
        """A new node."""
        self.types.append(kind)
        self.below.append(below)
        return len(self.types) - 1

    def greedy(self) -> None:
        """Embed one ideal after the other, sharing whatever fits first."""
        for poset, ideal in self.ideals:
            image: dict[int, int] = {}
            for x in ideal:
                below = frozenset(image[lower] for lower in poset.below[x])
                free = self.candidates(poset.types[x], below, set(image.values()))
                image[x] = free[0] if free else self.add(poset.types[x], below)
        self.best = (list(self.types), list(self.below))

    def search(self, which: int, step: int, image: dict[int, int]) -> None:
        """Branch and bound over what to share; `image` maps the first `step` nodes of ideal `which`."""
        self.steps += 1
        assert self.best is not None
        if self.steps > _STEPS or self.bound >= len(self.best[0]):
            return
        if which == len(self.ideals):
            self.best = (list(self.types), list(self.below))
            return
        poset, ideal = self.ideals[which]
        if step == len(ideal):
            self.search(which + 1, 0, {})
            return
        x = ideal[step]
        kind, below = poset.types[x], frozenset(image[lower] for lower in poset.below[x])
        for node in self.candidates(kind, below, set(image.values())):
            self.search(which, step + 1, {**image, x: node})
        if kind not in self.forced:
            node = self.add(kind, below)
            self.search(which, step + 1, {**image, x: node})
            self.types.pop()
            self.below.pop()


def amalgamate(types: Types) -> Amalgam:
    """The smallest poset with a node of every type, each over a full copy of its down-set.

    Exact where the search ends within its budget or meets the lower bound; otherwise a valid poset that is not
    proved smallest, and says so.
    """
    examples = types.examples
    needed: Counter[int] = Counter()
    lower: set[int] = set()
    for kind, (poset, node) in enumerate(examples):
        counts = poset.counts(node)
        lower |= counts.keys()
        needed |= counts | Counter([kind])
    forced = frozenset(
        kind
        for kind, (poset, node) in enumerate(examples)
        if all(needed[poset.types[x]] == 1 for x in poset.ideal(node))
    )
    ideals = [(poset, poset.ideal(node)) for kind, (poset, node) in enumerate(examples) if kind not in lower | forced]
    search = _Search(sorted(ideals, key=lambda item: -len(item[1])), needed, forced)
    place: dict[int, int] = {}
    for kind in sorted(forced, key=lambda kind: len(examples[kind][0].below[examples[kind][1]])):
        poset, node = examples[kind]
        place[kind] = search.add(kind, frozenset(place[poset.types[x]] for x in poset.below[node]))
    bound = search.bound
    start = len(search.types)
    search.greedy()
    assert search.best is not None
    proved = len(search.best[0]) == bound
    if not proved and sum(len(ideal) for _, ideal in ideals) <= _DEPTH:
        del search.types[start:], search.below[start:]
        search.search(0, 0, {})
        proved = search.steps <= _STEPS or len(search.best[0]) == bound
    kinds, below = search.best
    return Amalgam(kinds, below, bound, proved)
