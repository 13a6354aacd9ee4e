"""Node equivalence in general (hasse, def. 3.5): labelled isomorphism of down-sets, for inputs that repeat.

`equivalence` is the fast way where no down-set repeats an input. Here nodes get *types*: two nodes are equivalent iff
they have one type. A type's signature is the inputs of the node, the types of its covers, and how often each type
stands below it. Where the down-set holds every type once, the signature decides: the bijection that keeps types is
the isomorphism. Otherwise VF2 compares the down-sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnflow._core.checks import IntArray
from attnflow.tasks.task import Task

_Signature = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]


@dataclass(frozen=True, eq=False)
class Poset:
    """The Hasse diagram of a task, with inputs: nodes in topological order, lower first.

    Attributes:
        members: the positions of each node.
        inputs: the sorted input numbers of each node (a multiset).
        covers: the nodes just below each node.
        below: all nodes strictly below each node.
        types: the type of each node; filled by `Types.of`.
    """

    members: list[tuple[int, ...]]
    inputs: list[tuple[int, ...]]
    covers: list[list[int]]
    below: list[frozenset[int]]
    types: list[int] = field(default_factory=list[int])

    @classmethod
    def of(cls, task: Task, numbers: IntArray) -> Poset:
        """The poset of a task whose inputs are numbered."""
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
        """The nodes that are below no other."""
        lower = frozenset[int]().union(*self.below)
        return [node for node in range(len(self.members)) if node not in lower]

    def ideal(self, node: int) -> list[int]:
        """The down-set of a node, itself last, in topological order."""
        return [*sorted(self.below[node]), node]

    def counts(self, node: int) -> Counter[int]:
        """How often each type stands strictly below a node."""
        return Counter(self.types[lower] for lower in self.below[node])


class Types:
    """The types of the nodes of several posets; `examples[t]` is a (poset, node) of type t."""

    def __init__(self) -> None:
        self.examples: list[tuple[Poset, int]] = []
        self._known: dict[_Signature, list[int]] = {}

    def of(self, poset: Poset) -> list[int]:
        """The type of each node of a poset; also written to `poset.types`."""
        for node, inputs in enumerate(poset.inputs):
            counts = poset.counts(node)
            covers = tuple(sorted(poset.types[lower] for lower in poset.covers[node]))
            candidates = self._known.setdefault((inputs, covers, tuple(sorted(counts.items()))), [])
            repeats = any(count > 1 for count in counts.values())
            for candidate in candidates:
                if not repeats or isomorphism(*self.examples[candidate], poset, node) is not None:
                    poset.types.append(candidate)
                    break
            else:
                candidates.append(len(self.examples))
                poset.types.append(len(self.examples))
                self.examples.append((poset, node))
        return poset.types


def isomorphism(left: Poset, top: int, right: Poset, other: int) -> dict[int, int] | None:
    """A bijection between the down-sets of two nodes that keeps covers and inputs; None if there is none.

    The types of all nodes strictly below must be known, in one numbering.
    """
    from networkx import DiGraph
    from networkx.algorithms.isomorphism import DiGraphMatcher

    if left.inputs[top] != right.inputs[other] or len(left.below[top]) != len(right.below[other]):
        return None
    graphs: list[DiGraph[int]] = []
    for poset, node in ((left, top), (right, other)):
        graph: DiGraph[int] = DiGraph()
        for x in poset.ideal(node):
            graph.add_node(x, kind=-1 if x == node else poset.types[x])
            graph.add_edges_from((lower, x) for lower in poset.covers[x])
        graphs.append(graph)
    matcher = DiGraphMatcher(*graphs, node_match=_same_kind)
    return dict(matcher.mapping) if matcher.is_isomorphic() else None


def _same_kind(left: Mapping[str, int], right: Mapping[str, int]) -> bool:
    return left["kind"] == right["kind"]


def typed(tasks: Sequence[Task], inputs: Sequence[IntArray]) -> tuple[list[Poset], Types]:
    """The posets of all tasks with their node types."""
    types = Types()
    posets = [Poset.of(task, numbers) for task, numbers in zip(tasks, inputs, strict=True)]
    for poset in posets:
        types.of(poset)
    return posets, types
