"""The Hasse diagram of an order, a sparser mask of the same order, and the difference of two flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from attnflow._core.markup import plural
from attnflow._core.plain import as_integer
from attnflow._core.results import Result
from attnflow.masks.mask import Mask
from attnflow.masks.spec import mask_from_dict

if TYPE_CHECKING:
    import networkx as nx

_SHOWN = 8  # layers that the summary of a difference lists
_PAIRS = 5  # pairs that it lists of each

Pair = tuple[int, int]


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
        """For each node, the length of the longest chain below it; 0 for minimal nodes."""
        level = [0] * len(self.nodes)
        for lower, upper in self.edges:  # sorted by upper: `level[lower]` is final
            level[upper] = max(level[upper], level[lower] + 1)
        return level

    def __repr__(self) -> str:
        return f"Hasse({len(self.nodes)} classes, {len(self.edges)} edges, {max(self.levels, default=-1) + 1} levels)"

    def rows(self) -> list[dict[str, object]]:
        """One row per edge: the positions of the lower and of the upper class."""
        return [{"lower": label(self.nodes[a]), "upper": label(self.nodes[b])} for a, b in self.edges]

    def to_networkx(self) -> nx.DiGraph[int]:
        """Return a `networkx.DiGraph` over class indices; each node has the attribute `positions`."""
        import networkx

        graph: nx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from((i, {"positions": node}) for i, node in enumerate(self.nodes))
        graph.add_edges_from(self.edges)
        return graph


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
        """Rebuild it from what `to_dict` returned."""
        content = cls._content(values)
        return cls(mask_from_dict(content.get("mask")), as_integer(content.get("depth"), "depth"))

    def rows(self) -> list[dict[str, object]]:
        """One row: the mask's name, its pairs, their share, the depth."""
        mask = self.mask
        return [{"mask": mask.name, "pairs": mask.nnz, "density": mask.density, "depth": self.depth}]


@dataclass(frozen=True)
class LayerDifference:
    """How one layer of two flows differs.

    Attributes:
        layer: its number; None where one mask stands for all layers.
        extra: number of pairs that only the new flow has.
        missing: number of pairs that only the old flow has.
        extra_pairs: the first extra pairs, (query, key).
        missing_pairs: the first missing pairs, (query, key).
    """

    layer: int | None
    extra: int
    missing: int
    extra_pairs: tuple[Pair, ...]
    missing_pairs: tuple[Pair, ...]


@dataclass(frozen=True, repr=False)
class OrderDifference(Result):
    """Where the flow of one model, version or backend differs from that of another.

    Attributes:
        layers: the layers that differ, first layer first.
        compared: number of layers that were compared.
    """

    layers: tuple[LayerDifference, ...]
    compared: int

    @property
    def ok(self) -> bool:
        """Whether the two flows are the same."""
        return not self.layers

    def rows(self) -> list[dict[str, object]]:
        """One row for each layer that differs: its number and the numbers of extra and missing pairs."""
        return [{"layer": layer.layer, "extra": layer.extra, "missing": layer.missing} for layer in self.layers]

    def __repr__(self) -> str:
        return f"<OrderDifference {self._summary()}>"

    def __str__(self) -> str:
        lines = [self._summary()]
        for layer in self.layers[:_SHOWN]:
            place = "" if layer.layer is None else f"layer {layer.layer}: "
            parts = [
                f"{plural(count, f'{what} pair')} (query, key): {_list(pairs, count)}"
                for what, count, pairs in (
                    ("extra", layer.extra, layer.extra_pairs),
                    ("missing", layer.missing, layer.missing_pairs),
                )
                if count
            ]
            lines.append(place + "; ".join(parts))
        if len(self.layers) > _SHOWN:
            lines.append(f"and {len(self.layers) - _SHOWN} more")
        return "\n".join(lines)

    def _summary(self) -> str:
        if self.ok:
            return f"the same in {plural(self.compared, 'layer')}"
        extra, missing = (sum(getattr(layer, name) for layer in self.layers) for name in ("extra", "missing"))
        return f"DIFFERENT in {len(self.layers)} of {plural(self.compared, 'layer')}: {extra} extra, {missing} missing"


def difference_of(new: Sequence[Mask], old: Sequence[Mask], stacked: bool) -> OrderDifference:
    layers: list[LayerDifference] = []
    for number, (mask, other) in enumerate(zip(new, old, strict=True)):
        if mask == other:
            continue
        extra, missing, nothing = mask & ~other, other & ~mask, mask & ~mask
        shown = (tuple(pairs.difference(nothing, limit=_PAIRS)) for pairs in (extra, missing))
        layers.append(LayerDifference(number if stacked else None, extra.nnz, missing.nnz, *shown))
    return OrderDifference(tuple(layers), len(new))


def _list(pairs: Sequence[Pair], count: int) -> str:
    return ", ".join(f"({query}, {key})" for query, key in pairs) + (", ..." if count > len(pairs) else "")
