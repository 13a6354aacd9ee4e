"""The oracles against networkx, an implementation that shares nothing with them."""

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attnflow import testing

relations = st.integers(0, 7).flatmap(lambda n: arrays(np.bool_, (n, n)))


def flow_graph(allow):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(allow)))
    graph.add_edges_from((int(k), int(q)) for q, k in np.argwhere(allow) if q != k)
    return graph


@given(relations)
def test_oracles_agree_with_networkx(allow):
    graph = flow_graph(allow)
    reach = testing.closure(allow)
    assert all(reach[q, k] == nx.has_path(graph, k, q) for q in graph for k in graph)
    components = [tuple(sorted(c)) for c in nx.strongly_connected_components(graph)]
    assert testing.classes(allow) == sorted(components)
    condensed = nx.transitive_reduction(nx.condensation(graph)) if len(graph) else nx.DiGraph()
    members = nx.condensation(graph).nodes(data="members") if len(graph) else []
    name = {c: tuple(sorted(m)) for c, m in members}
    assert testing.covers(allow) == {(name[a], name[b]) for a, b in condensed.edges}
    lengths = [d for _, row in nx.all_pairs_shortest_path_length(graph) for d in row.values()]
    assert testing.depth(allow) == max([1, *lengths])


@given(st.integers(0, 6).flatmap(lambda n: st.lists(arrays(np.bool_, (n, n)), min_size=1, max_size=5)))
def test_product_follows_information_layer_by_layer(layers):
    n = len(layers[0])
    for target in range(n):
        field = {target}
        for allow in reversed(layers):
            field |= {k for q in field for k in range(n) if allow[q, k]}
        assert set(np.flatnonzero(testing.product(layers)[target])) == field
    count = testing.product_depth(layers)
    assert np.array_equal(testing.product(layers[:count]), testing.product(layers))
    assert count == 1 or not np.array_equal(testing.product(layers[: count - 1]), testing.product(layers))


def test_relations_may_be_tensors_arrays_or_lists():
    table = [[0, 0], [1, 0]]
    expected = [[True, False], [True, True]]
    for allow in (table, np.array(table), torch.tensor(table), torch.tensor(table, dtype=torch.bool)):
        assert testing.closure(allow).tolist() == expected


@pytest.mark.parametrize(
    ("oracle", "bad", "message"),
    [
        *((testing.closure, bad, "square") for bad in (np.ones((2, 3)), np.ones(3), [[True, False]])),
        (testing.product, [], "at least one"),
        (testing.product, [np.eye(2), np.eye(3)], "one size"),
    ],
)
def test_bad_relations(oracle, bad, message):
    with pytest.raises(ValueError, match=message):
        oracle(bad)


def test_path_exists_allows_waiting_in_the_residual_stream():
    allow = [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert testing.path_exists(allow, [0, 0, 1, 1, 2])
    assert not testing.path_exists(allow, [0, 2])
    assert testing.path_exists(allow, [])


def test_tolerance_is_the_reference_error_and_rounding():
    exact = torch.tensor([1.0, 4.0], dtype=torch.float64)
    low = torch.tensor([1.0, 4.125], dtype=torch.float32)
    assert testing.tolerance(low, exact) == 2 * (0.125 + 4 * 2.0**-23)
    testing.assert_as_accurate(exact.float() + 0.24, low, exact)
    for wrong in (exact.float() + 0.26, exact.float() * float("nan")):
        with pytest.raises(AssertionError, match="above the tolerance"):
            testing.assert_as_accurate(wrong, low, exact)
    with pytest.raises(AssertionError, match="shape"):
        testing.assert_as_accurate(torch.ones(3), low, exact)
    with pytest.raises(TypeError, match="float64"):
        testing.tolerance(low, low)
    with pytest.raises(ValueError, match="one shape"):
        testing.tolerance(low, exact[:1])
    assert testing.tolerance(low[:0], exact[:0]) == 0.0
    testing.assert_as_accurate(low[:0], low[:0], exact[:0])
