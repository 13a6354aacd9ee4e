"""The reasoning graph: which edges it has, and every form that it takes."""

import networkx
import torch

from attnflow.bias import BiasMap
from attnflow.bias.graph import Edge
from attnflow.bias.map import LayerMap
from tests.bias.test_map import make


def table(values, allowed=None, causal=True, tokens=None):
    """A map of one layer with these row-centred biases."""
    bias = torch.tensor(values)[None]
    allowed = torch.ones_like(bias, dtype=torch.bool) if allowed is None else allowed
    n = bias.shape[-1]
    one = LayerMap(0, "x", bias, bias, allowed, bias.softmax(-1), bias.softmax(-1))
    names = tuple(tokens or [f"t{i}" for i in range(n)])
    return BiasMap("tiny", names, tuple(range(n)), (one,), causal=causal)


BIAS = [[9.0, 0.0, 0.0], [2.0, -2.0, 0.0], [1.0, 0.5, -1.5]]
TRIANGLE = torch.ones(1, 3, 3, dtype=torch.bool).tril()


def test_edges_are_positive_and_no_loops():
    found = table(BIAS, TRIANGLE)
    assert found.graph(top_k=3).edges == (Edge(0, 1, 2.0), Edge(0, 2, 1.0), Edge(1, 2, 0.5))
    assert found.graph(top_k=1).edges == (Edge(0, 1, 2.0), Edge(0, 2, 1.0))
    assert found.graph(threshold=1.0).edges == (Edge(0, 1, 2.0), Edge(0, 2, 1.0))
    assert found.graph(threshold=0.4, top_k=1).edges == found.graph(top_k=1).edges
    assert found.graph() == found.graph(top_k=2)
    assert found.graph(layer=0).about == "layer 0; the 2 strongest keys of each query"


def test_a_causal_graph_is_acyclic_and_a_bidirectional_one_may_not_be():
    assert make().graph(top_k=4).is_acyclic
    both = table([[0.0, 3.0], [1.0, 0.0]], causal=False).graph()
    assert both.edges == (Edge(1, 0, 3.0), Edge(0, 1, 1.0))
    assert not both.is_acyclic


def test_networkx_and_dot():
    graph = table(BIAS, TRIANGLE, tokens=['say "5"', "a\\b", "\n"]).graph(top_k=2)
    found = graph.to_networkx()
    assert isinstance(found, networkx.DiGraph)
    assert dict(found.nodes(data="token")) == {0: 'say "5"', 1: "a\\b", 2: "\n"}
    assert sorted(found.edges(data="bias")) == [(0, 1, 2.0), (0, 2, 1.0), (1, 2, 0.5)]
    dot = graph.to_dot()
    assert '0 [label="say \\"5\\"\\n0"];' in dot
    assert '1 [label="a\\\\b\\n1"];' in dot
    assert '0 -> 1 [label="2.00", penwidth=3.00];' in dot
    assert dot.count("->") == 3


def test_the_strongest_edges():
    torch.manual_seed(0)
    n = 40
    triangle = torch.ones(1, n, n, dtype=torch.bool).tril()
    graph = table(torch.randn(n, n).tril().tolist(), triangle).graph(top_k=5)
    kept = graph.strongest(30)
    assert min(edge.bias for edge in kept.edges) >= sorted((e.bias for e in graph.edges), reverse=True)[29]
    assert graph.strongest(10_000) is graph


def test_no_edges():
    empty = table([[0.0, 0.0], [0.0, 0.0]]).graph()
    assert empty.edges == empty.nodes == ()
    assert empty.is_acyclic
    assert "->" not in empty.to_dot()
