"""Isomorphism of coloured graphs against networkx, and on graphs that no refinement of colours tells apart."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networkx.algorithms.isomorphism import DiGraphMatcher

import attnflow as af
from attnflow.tasks import Label, Task, Token
from attnflow.tasks import posets as module
from attnflow.tasks.posets import Work
from attnflow.tasks.posets import isomorphic as isomorphism
from tests.models import tiny


@st.composite
def graphs(draw):
    """Colours and edges, acyclic, of few colours: many nodes look alike."""
    size = draw(st.integers(0, 7))
    colours = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    pairs = [(a, b) for b in range(size) for a in range(b)]
    return colours, [pair for pair in pairs if draw(st.booleans())]


def networkx_of(colours, edges):
    made = nx.DiGraph()
    made.add_nodes_from((node, {"colour": colour}) for node, colour in enumerate(colours))
    made.add_edges_from(edges)
    return made


def holds(mapping, one, two):
    (colours, edges), (others, other_edges) = one, two
    return (
        sorted(mapping) == sorted(mapping.values()) == list(range(len(colours)))
        and all(colours[x] == others[y] for x, y in mapping.items())
        and {(mapping[a], mapping[b]) for a, b in edges} == set(other_edges)
    )


@given(graphs(), st.data())
def test_a_shuffled_graph_is_isomorphic(graph, data):
    colours, edges = graph
    order = data.draw(st.permutations(range(len(colours))))
    other = [colours[node] for node in order], [(order.index(a), order.index(b)) for a, b in edges]
    mapping = isomorphism(graph, other, Work())
    assert mapping is not None
    assert holds(mapping, graph, other)


@given(graphs(), graphs())
def test_as_networkx_says(one, two):
    mapping = isomorphism(one, two, Work())
    matcher = DiGraphMatcher(networkx_of(*one), networkx_of(*two), lambda one, two: one["colour"] == two["colour"])
    assert (mapping is not None) == matcher.is_isomorphic()
    assert mapping is None or holds(mapping, one, two)


def strongly_regular(shrikhande):
    """The edges of the two graphs on 16 vertices in which all have 6 neighbours and all pairs 2 common ones."""
    places = [(i, j) for i in range(4) for j in range(4)]
    for a, (i, j) in enumerate(places):
        for b, (k, m) in enumerate(places[:a]):
            across, down = (i - k) % 4, (j - m) % 4
            steps = {(0, 1), (0, 3), (1, 0), (3, 0), (1, 1), (3, 3)}
            if (across, down) in steps if shrikhande else (across == 0) != (down == 0):
                yield a, b


def incidence_task(shrikhande):
    """65 positions: vertices with one input, edges over their ends with another, and one above all."""
    edges = list(strongly_regular(shrikhande))
    pairs = [(i, i) for i in range(65)] + [(64, i) for i in range(64)]
    pairs += [(16 + number, end) for number, ends in enumerate(edges) for end in ends]
    tokens = [Token(1, 0, ())] * 16 + [Token(2, 0, ())] * 48 + [Token(3, 0, ())]
    return Task(tokens, [Label(64, Token(5, 9, (9,)))], af.masks.from_edges(pairs, 65))


def test_tasks_over_strongly_regular_graphs_merge():
    one, other = incidence_task(True), incidence_task(False)
    assert af.tasks.merge([one, one]).task.size == 65
    merged = af.tasks.merge([one, other])
    assert merged.task.size > 65  # their tops are not equivalent
    assert merged.embeds([one, other]).ok


def test_values_do_not_see_what_isomorphism_sees():
    """With a bias the same two tasks are a vertex, an edge and a top: a Transformer only counts what it reads."""
    family = [incidence_task(True), incidence_task(False)]
    merged = af.tasks.merge(family, key_bias=True)
    assert merged.multiplicity.tolist() == [[1, 0, 2], [2, 0, 16], [2, 1, 48]]
    result = af.tasks.verify(family, merged, tiny("Llama"))
    assert max(result.output_difference, result.gradient_difference) < 1e-12


def test_work_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "LARGEST_WORK", 100)
    monkeypatch.setattr(Work, "__init__", lambda self: setattr(self, "left", 100))
    with pytest.raises(ValueError, match="isomorphic takes more than 100 steps: their inputs repeat"):
        af.tasks.merge([incidence_task(True), incidence_task(False)])
