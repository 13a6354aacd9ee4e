"""Merges tasks whose inputs repeat within a down-set: node equivalence in general, and the smallest common poset.

Nodes are equivalent (hasse, def. 3.5) iff they have one *type*: their input, the types of their covers, and how often
each type stands below; where a type repeats below, `isomorphic` decides, within a budget.

Theorem 3.7 takes one node per class, which is false when a down-set holds two equivalent nodes (order.md). Here a type
gets as many nodes as its largest number in one down-set, and a search decides which copies go together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from attnflow._core.checks import IntArray
from attnflow.tasks.task import Task

Example = tuple["Poset", int]
"""A node of a type."""

Graph = tuple[Sequence[Hashable], Sequence[tuple[int, int]]]
"""A directed graph: the colour of each node, and the edges (lower, upper)."""

_Signature = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]
_STEPS: Final = 50_000  # of the search for an amalgam: about a second
LARGEST_WORK: Final = 1 << 22  # neighbours looked at by isomorphism: about ten seconds
_DEPTH: Final = 400  # recursion; beyond it only the greedy solution is taken


@dataclass
class Work:
    left: int = LARGEST_WORK

    def spend(self, amount: int, size: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise ValueError(
                f"deciding if two down-sets of {size} nodes are isomorphic takes more than {LARGEST_WORK:,} steps: "
                "their inputs repeat in too symmetric a pattern. Give repeated inputs different positions, so that "
                "each stands once in a down-set"
            )


@dataclass(frozen=True, eq=False)
class Poset:
    """The Hasse diagram of a task, with inputs: nodes in topological order, lower first."""

    members: list[tuple[int, ...]]  # the positions of each node
    inputs: list[tuple[int, ...]]  # its sorted input numbers (a multiset)
    covers: list[list[int]]  # the nodes just below it
    below: list[frozenset[int]]  # all nodes strictly below it
    types: list[int] = field(default_factory=list[int])  # filled by `typed`

    @classmethod
    def of(cls, task: Task, numbers: IntArray) -> Poset:
        hasse = task.flow.hasse
        covers: list[list[int]] = [[] for _ in hasse.nodes]
        below: list[frozenset[int]] = []
        for lower, upper in hasse.edges:
            covers[upper].append(lower)
        for lowers in covers:
            below.append(frozenset(lowers).union(*(below[lower] for lower in lowers)))
        inputs = [tuple(sorted(numbers[list(members)].tolist())) for members in hasse.nodes]
        return cls(hasse.nodes, inputs, covers, below)

    @property
    def maximal(self) -> list[int]:
        lower = frozenset[int]().union(*self.below)
        return [node for node in range(len(self.members)) if node not in lower]

    def ideal(self, node: int) -> list[int]:
        return [*sorted(self.below[node]), node]

    def counts(self, node: int) -> Counter[int]:
        return Counter(self.types[lower] for lower in self.below[node])


def isomorphism(left: Poset, top: int, right: Poset, other: int, work: Work) -> dict[int, int] | None:
    """A bijection of two down-sets, typed below their tops, that keeps covers and inputs; None if none exists."""
    if left.inputs[top] != right.inputs[other] or len(left.below[top]) != len(right.below[other]):
        return None
    ideals = left.ideal(top), right.ideal(other)
    mapping = isomorphic(_graph(left, ideals[0]), _graph(right, ideals[1]), work)
    return None if mapping is None else {ideals[0][x]: ideals[1][y] for x, y in mapping.items()}


def _graph(poset: Poset, ideal: Sequence[int]) -> Graph:
    """The Hasse diagram of a down-set, coloured by types; its top has none yet."""
    number = {node: place for place, node in enumerate(ideal)}
    colours = [poset.types[node] for node in ideal[:-1]]
    edges = [(number[lower], place) for node, place in number.items() for lower in poset.covers[node]]
    return [*colours, -1], edges


def typed(tasks: Sequence[Task], inputs: Sequence[IntArray]) -> tuple[list[Poset], list[Example]]:
    posets, examples = list[Poset](), list[Example]()
    known: dict[_Signature, list[int]] = {}
    work = Work()
    for task, numbers in zip(tasks, inputs, strict=True):
        poset = Poset.of(task, numbers)
        posets.append(poset)
        for node, own in enumerate(poset.inputs):
            counts = poset.counts(node)
            covers = tuple(sorted(poset.types[lower] for lower in poset.covers[node]))
            candidates = known.setdefault((own, covers, tuple(sorted(counts.items()))), [])
            repeats = any(count > 1 for count in counts.values())
            same = (kind for kind in candidates if not repeats or isomorphism(*examples[kind], poset, node, work))
            kind = next(same, len(examples))
            if kind == len(examples):
                candidates.append(kind)
                examples.append((poset, node))
            poset.types.append(kind)
    return posets, examples


@dataclass(eq=False)
class _Search:
    ideals: list[tuple[Poset, list[int]]]  # of the maximal types: what has to be embedded
    needed: Counter[int]  # nodes of each type that some down-set holds
    forced: frozenset[int]  # types that have exactly one node
    types: list[int] = field(default_factory=list[int])
    below: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    best: tuple[list[int], list[frozenset[int]]] | None = None
    steps: int = 0

    @property
    def bound(self) -> int:
        have = Counter(self.types)
        return len(self.types) + sum(max(0, count - have[kind]) for kind, count in self.needed.items())

    def candidates(self, kind: int, below: frozenset[int], used: set[int]) -> list[int]:
        """Free nodes of a type directly over these nodes; of interchangeable ones only the first."""
        nodes: dict[frozenset[int], int] = {}
        for node, (other, under) in enumerate(zip(self.types, self.below, strict=True)):
            if other == kind and under == below and node not in used:
                above = frozenset(upper for upper, lowers in enumerate(self.below) if node in lowers)
                nodes.setdefault(above, node)
        return list(nodes.values())

    def add(self, kind: int, below: frozenset[int]) -> int:
        self.types.append(kind)
        self.below.append(below)
        return len(self.types) - 1

    def greedy(self) -> None:
        """Embed one ideal after the other; each shares the first nodes that fit."""
        for poset, ideal in self.ideals:
            image: dict[int, int] = {}
            for x in ideal:
                below = frozenset(image[lower] for lower in poset.below[x])
                free = self.candidates(poset.types[x], below, set(image.values()))
                image[x] = free[0] if free else self.add(poset.types[x], below)
        self.best = (list(self.types), list(self.below))

    def search(self, which: int, step: int, image: dict[int, int]) -> None:
        """Branch and bound over what to share; `image` maps the first `step` nodes of ideal `which`."""
        self.steps += max(1, len(self.types) // 32)  # a step looks at every node
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


def amalgamate(examples: Sequence[Example]) -> tuple[list[int], list[frozenset[int]], int, bool]:
    """(types of the smallest poset with all down-sets, all nodes below each, lower bound, is it proved)."""
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
    return *search.best, bound, proved


@dataclass(frozen=True, eq=False)
class _Quotient:
    groups: list[list[int]]
    colours: list[Hashable]
    lower: list[list[int]]
    upper: list[list[int]]

    @classmethod
    def of(cls, colours: Sequence[Hashable], edges: Sequence[tuple[int, int]]) -> _Quotient:
        below, above = ([set[int]() for _ in colours] for _ in range(2))
        for lower, upper in edges:
            below[upper].add(lower)
            above[lower].add(upper)
        members: dict[Hashable, list[int]] = {}
        for node, colour in enumerate(colours):
            members.setdefault((colour, frozenset(below[node]), frozenset(above[node])), []).append(node)
        groups = list(members.values())
        number = {node: place for place, group in enumerate(groups) for node in group}
        return cls(
            groups,
            [(colours[group[0]], len(group)) for group in groups],
            *([sorted({number[node] for node in side[group[0]]}) for group in groups] for side in (below, above)),
        )

    def signatures(self, colours: Sequence[int]) -> list[Hashable]:
        return [
            (colour, *(tuple(sorted(colours[other] for other in side[node])) for side in (self.lower, self.upper)))
            for node, colour in enumerate(colours)
        ]


def isomorphic(one: Graph, two: Graph, work: Work) -> dict[int, int] | None:
    """A bijection that keeps colours and edges, or None: colours are refined, then single nodes are individualised."""
    if any(len(mine) != len(others) for mine, others in zip(one, two, strict=True)):
        return None
    left, right = _Quotient.of(*one), _Quotient.of(*two)
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
    """Stable colours of both sides, equally many of each; None where the numbers differ."""
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
