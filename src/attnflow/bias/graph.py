"""The reasoning graph of a bias: which tokens' information a model wants to flow where (daa, sec. 5.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

from attnflow._core import checks
from attnflow._core.markup import visible
from attnflow._core.results import Result
from attnflow.bias.map import BiasMap

if TYPE_CHECKING:
    import networkx as nx

_STRONGEST: Final = 2  # keys of each query, unless something else is asked for


@dataclass(frozen=True)
class Edge:
    """A query that is drawn to a key.

    Attributes:
        key: position where the information is.
        query: position that it flows to.
        bias: row-centred bias, positive.
    """

    key: int
    query: int
    bias: float


@dataclass(frozen=True)
class BiasGraph(Result):
    """Information flows along the edges, from keys to queries, where the bias invites it.

    A causal mask makes it acyclic: every edge goes from an earlier to a later token. Under a bidirectional mask it is a
    directed graph that may have cycles.

    Attributes:
        tokens: the text of every position.
        edges: sorted by query, then key.
        about: what it was made of, in words.
    """

    tokens: tuple[str, ...]
    edges: tuple[Edge, ...]
    about: str = ""

    @classmethod
    def of(
        cls,
        bias_map: BiasMap,
        *,
        threshold: float | None = None,
        top_k: int | None = None,
        layer: int | None = None,
        head: int | None = None,
    ) -> BiasGraph:
        """The graph of a map: an edge for each positive row-centred bias that is strong enough.

        Loops are left out: a token always has its own information.

        Args:
            bias_map: what `af.bias.capture` returned.
            threshold: least bias of an edge.
            top_k: keys of each query at most, the strongest first; 2 if neither is given. Both may be.
            layer: number of a layer; None for the mean over the captured ones.
            head: one of the captured heads; None for the mean over the maps.

        Raises:
            ValueError: a threshold that is not positive, or a layer or head that was not captured.
        """
        if threshold is not None and not threshold > 0:
            raise ValueError(f"threshold must be positive: a negative bias turns information away; got {threshold}")
        if top_k is None and threshold is None:
            top_k = _STRONGEST
        if top_k is not None:
            checks.integer("top_k", top_k, 1)
        table = bias_map.values("bias", layer, head).clone()
        for row, query in enumerate(bias_map.queries):
            table[row, query] = 0.0
        table = table.masked_fill(~bias_map.allowed(layer), 0.0)
        keep = table > 0 if threshold is None else table >= threshold
        if top_k is not None and top_k < table.shape[1]:
            best = table.topk(top_k, dim=1).indices
            keep &= torch.zeros_like(keep).scatter_(1, best, True)
        edges = tuple(
            Edge(key, bias_map.queries[row], float(table[row, key])) for row, key in sorted(keep.nonzero().tolist())
        )
        many = "strongest key" if top_k == 1 else f"{top_k} strongest keys"
        which = [] if top_k is None else [f"the {many} of each query"]
        which += [] if threshold is None else [f"a bias of at least {threshold:g}"]
        where = "mean over layers" if layer is None else f"layer {layer}"
        where += "" if head is None else f", head {head}"
        return cls(bias_map.tokens, edges, f"{where}; {', '.join(which)}")

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
        chosen = sorted(self.edges, key=lambda edge: (-edge.bias, edge.query, edge.key))[:count]
        edges = tuple(sorted(chosen, key=lambda edge: (edge.query, edge.key)))
        return BiasGraph(self.tokens, edges, f"{self.about}; the {count} strongest of {len(self.edges)} edges")

    def to_networkx(self) -> nx.DiGraph[int]:
        """A `networkx.DiGraph` over positions, each with its `token`; edges key -> query have their `bias`."""
        import networkx

        graph: nx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from((node, {"token": self.tokens[node]}) for node in self.nodes)
        graph.add_edges_from((edge.key, edge.query, {"bias": edge.bias}) for edge in self.edges)
        return graph

    def to_dot(self) -> str:
        """Graphviz source, information flowing upwards; the stronger an edge, the thicker."""
        top = max((edge.bias for edge in self.edges), default=1.0)
        lines = ["digraph bias {", "  rankdir=BT;", "  node [shape=box, style=rounded];"]
        lines += [f'  {node} [label="{_quoted(self.tokens[node])}\\n{node}"];' for node in self.nodes]
        for edge in self.edges:
            width = 0.5 + 2.5 * edge.bias / top
            lines.append(f'  {edge.key} -> {edge.query} [label="{edge.bias:.2f}", penwidth={width:.2f}];')
        return "\n".join([*lines, "}", ""])


def _quoted(token: str) -> str:
    return visible(token).replace("\\", "\\\\").replace('"', '\\"')
