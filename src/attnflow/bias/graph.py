"""The reasoning graph of a bias: between which tokens the bias makes information flow (daa, sec. 5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from attnflow._core.markup import plural, token_label
from attnflow._core.results import Result

if TYPE_CHECKING:
    import networkx as nx

_LISTED: Final = 20  # edges that are printed


@dataclass(frozen=True)
class BiasEdge:
    """An edge from a key to a query that the bias makes attend more to it."""

    key: int  # the position that the information comes from
    query: int  # the position that it flows to
    bias: float  # row-centred, positive


@dataclass(frozen=True)
class BiasGraph(Result):
    """The directed graph of information flow that a bias favours, with edges from keys to queries.

    A causal mask makes it acyclic: every edge goes from an earlier to a later token. Under a bidirectional mask it is a
    directed graph that may have cycles.

    Attributes:
        tokens: the text of every position.
        edges: sorted by query, then key.
        about: the layer, head and threshold that it was made with.
    """

    tokens: tuple[str, ...]
    edges: tuple[BiasEdge, ...]
    about: str = ""

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each edge, the strongest first."""
        names = ("key", "key_token", "query", "query_token", "bias")
        cells = ((e.key, self.tokens[e.key], e.query, self.tokens[e.query], e.bias) for e in self._by_strength())
        return [dict(zip(names, row, strict=True)) for row in cells]

    def __str__(self) -> str:
        lines = [f"reasoning graph of {plural(len(self.edges), 'edge')} ({self.about})"]
        for edge in self._by_strength()[:_LISTED]:
            key, query = token_label(self.tokens[edge.key]), token_label(self.tokens[edge.query])
            lines.append(f"  {key} ({edge.key}) -> {query} ({edge.query})  {edge.bias:+.2f}")
        lines += [f"  and {len(self.edges) - _LISTED} more edges"] if len(self.edges) > _LISTED else []
        return "\n".join(lines)

    def _by_strength(self) -> list[BiasEdge]:
        return sorted(self.edges, key=lambda edge: (-edge.bias, edge.query, edge.key))

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Positions with an edge, ascending."""
        return tuple(sorted({position for edge in self.edges for position in (edge.key, edge.query)}))

    @property
    def is_acyclic(self) -> bool:
        """Whether no information returns to where it came from; always under a causal mask."""
        import networkx

        return bool(networkx.is_directed_acyclic_graph(self.to_networkx()))

    def strongest(self, count: int) -> BiasGraph:
        """The graph of the `count` strongest edges."""
        if count >= len(self.edges):
            return self
        edges = tuple(sorted(self._by_strength()[:count], key=lambda edge: (edge.query, edge.key)))
        return BiasGraph(self.tokens, edges, f"{self.about}; the {count} strongest of {len(self.edges)} edges")

    def to_networkx(self) -> nx.DiGraph[int]:
        """A `networkx.DiGraph` over positions, each with its `token`; edges key -> query have their `bias`."""
        import networkx

        graph: nx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from((node, {"token": self.tokens[node]}) for node in self.nodes)
        graph.add_edges_from((edge.key, edge.query, {"bias": edge.bias}) for edge in self.edges)
        return graph
