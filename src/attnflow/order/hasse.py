"""The Hasse diagram of an order, and a sparser mask of the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from attnflow._core.plain import as_integer
from attnflow._core.results import Result
from attnflow.masks.mask import Mask
from attnflow.masks.spec import mask_from_dict

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, repr=False)
class Hasse(Result):
    """The covering relation between the classes of mutually reachable positions (hasse, def. 2.11).

    Attributes:
        nodes: the classes, as sorted tuples of positions, in topological order (lower first).
        edges: (lower, upper) indices into `nodes`: information flows from lower to upper, and through no class
            between them.

    >>> import attnflow as af
    >>> af.order.analyze(af.masks.causal(3)).hasse.edges
    [(0, 1), (1, 2)]
    """

    nodes: list[tuple[int, ...]]
    edges: list[tuple[int, int]]

    @cached_property
    def levels(self) -> list[int]:
        """For each node the length of the longest chain below it; 0 for the minimal ones."""
        level = [0] * len(self.nodes)
        for lower, upper in self.edges:  # sorted by upper: `level[lower]` is final
            level[upper] = max(level[upper], level[lower] + 1)
        return level

    def __repr__(self) -> str:
        return f"Hasse({len(self.nodes)} classes, {len(self.edges)} edges, {max(self.levels, default=-1) + 1} levels)"

    def rows(self) -> list[dict[str, object]]:
        """One row for each edge: the positions of the lower and of the upper class."""
        return [{"lower": label(self.nodes[a]), "upper": label(self.nodes[b])} for a, b in self.edges]

    def to_networkx(self) -> nx.DiGraph[int]:
        """A `networkx.DiGraph` over class indices, each with the attribute `positions`."""
        import networkx

        graph: nx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from((i, {"positions": node}) for i, node in enumerate(self.nodes))
        graph.add_edges_from(self.edges)
        return graph

    def to_dot(self) -> str:
        """Graphviz source, information flowing upwards."""
        lines = ["digraph hasse {", "  rankdir=BT;", "  node [shape=box, style=rounded];"]
        lines += [f'  {i} [label="{label(node)}"];' for i, node in enumerate(self.nodes)]
        lines += [f"  {lower} -> {upper};" for lower, upper in self.edges]
        return "\n".join([*lines, "}", ""])


def label(positions: tuple[int, ...], limit: int = 6) -> str:
    """Positions as text, runs shortened: `0-3, 7`."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    parts = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs[:limit]]
    return ", ".join(parts) + (f", ... ({len(positions)})" if len(runs) > limit else "")


@dataclass(frozen=True)
class Sparse(Result):
    """A sparser realisation of an order, with the number of layers that it needs."""

    mask: Mask
    depth: int

    def to_dict(self) -> dict[str, object]:
        """The mask as `attnflow.masks.spec` writes it, and the depth."""
        return {"attnflow": "Sparse", "version": self.version, "mask": self.mask.to_dict(), "depth": self.depth}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Sparse:
        """What `to_dict` described."""
        content = cls._content(values)
        return cls(mask_from_dict(content.get("mask")), as_integer(content.get("depth"), "depth"))

    def rows(self) -> list[dict[str, object]]:
        """One row: the mask's name, its pairs, their share, the depth."""
        mask = self.mask
        return [{"mask": mask.name, "pairs": mask.nnz, "density": mask.density, "depth": self.depth}]
