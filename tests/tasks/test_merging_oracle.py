"""`merge` and `embedded` against the definitions, by exhaustive search over small random families."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token
from attnflow.tasks.merging import embedding
from attnflow.testing import classes, closure

Node = tuple[int, tuple[int, ...]]  # task, positions


@st.composite
def specs(draw: st.DrawFn, total: int, num_tasks: int = 3, kinds: int = 3, repeat: bool = True) -> list:
    """Tasks with `total` positions in all; with `repeat`, tokens are drawn from few kinds and may stand twice.

    Plain data: the type checker that the tests run under draws random numbers, which a strategy must not.
    """
    sizes = draw(st.lists(st.integers(1, total), min_size=1, max_size=num_tasks).filter(lambda s: sum(s) <= total))
    family = []
    for n in sizes:
        bits = draw(st.integers(0, 2 ** (n * n) - 1))  # one number draws far faster than a list of booleans
        table = np.array([bits >> i & 1 for i in range(n * n)], dtype=bool).reshape(n, n)
        if draw(st.booleans()):
            table = np.tril(table)  # without this, nearly all closures are one class
        digits = draw(st.integers(0, kinds**n - 1))
        chosen = [digits // kinds**i % kinds for i in range(n)] if repeat else draw(st.permutations(range(n)))
        labelled = draw(st.integers(0, 2**n - 1))
        family.append((table, chosen, [bool(labelled >> i & 1) for i in range(n)]))
    return family


def build(spec: list) -> list[Task]:
    return [
        Task(
            [Token(kind, 0) for kind in chosen],
            [Label(i, Token(9, 9)) for i, has in enumerate(labelled) if has],
            af.masks.from_dense(torch.from_numpy(closure(table))),
        )
        for table, chosen, labelled in spec
    ]


def down_sets(task: Task) -> dict[tuple[int, ...], nx.DiGraph]:
    """For each node the nodes at or below it, as a graph of the strict order with inputs; straight from the mask."""
    relation = closure(task.mask.dense())
    nodes = classes(relation)
    inputs = {node: Counter(task.inputs[i] for i in node) for node in nodes}
    graphs = {}
    for top in nodes:
        below = [node for node in nodes if relation[top[0], node[0]]]
        graphs[top] = graph = nx.DiGraph()
        graph.add_nodes_from((node, {"inputs": inputs[node], "top": node == top}) for node in below)
        graph.add_edges_from((x, y) for x in below for y in below if x != y and relation[y[0], x[0]])
    return graphs


def same(left: nx.DiGraph, right: nx.DiGraph) -> bool:
    """Definition 3.5."""
    if len(left) != len(right) or left.number_of_edges() != right.number_of_edges():
        return False
    if Counter(map(freeze, left.nodes.values())) != Counter(map(freeze, right.nodes.values())):
        return False
    return nx.is_isomorphic(left, right, node_match=lambda a, b: a == b)


def freeze(attributes: dict) -> tuple:
    return attributes["top"], frozenset(attributes["inputs"].items())


def all_down_sets(family: Sequence[Task]) -> dict[Node, nx.DiGraph]:
    return {(number, node): graph for number, task in enumerate(family) for node, graph in down_sets(task).items()}


def missing_nodes(task: Task, family: Sequence[Task]) -> list[Node]:
    held = list(all_down_sets([task]).values())
    return [node for node, graph in all_down_sets(family).items() if not any(same(graph, other) for other in held)]


def assert_embeds(merged: tasks.merging.MergedTask, family: Sequence[Task]) -> None:
    """Every node has an equivalent, at the place that `positions` and `node` name."""
    task = merged.task
    assert task.is_dense
    assert merged.nodes == tuple(sorted(classes(task.mask.dense())))
    graphs = down_sets(task)
    for (number, positions), graph in all_down_sets(family).items():
        [node] = {int(merged.node[merged.positions[number][i]]) for i in positions}
        places = merged.positions[number][[*positions]].tolist()
        assert sorted(places) == list(merged.nodes[node])
        assert [task.inputs[p] for p in places] == [family[number].inputs[i] for i in positions]
        assert same(graph, graphs[merged.nodes[node]])


@given(specs(total=12, repeat=False))
@settings(max_examples=600)
def test_distinct_inputs(spec):
    """One node for each class of equivalent nodes, all down-sets embedded."""
    family = build(spec)
    merged = tasks.merge(family)
    assert_embeds(merged, family)
    found: list[nx.DiGraph] = []
    for graph in all_down_sets(family).values():
        if not any(same(graph, other) for other in found):
            found.append(graph)
    assert len(merged.nodes) == len(found) == merged.lower_bound
    assert merged.is_minimal


@given(specs(total=12, kinds=2))
@settings(max_examples=600)
def test_repeated_inputs(spec):
    family = build(spec)
    merged = tasks.merge(family)
    assert_embeds(merged, family)
    assert merged.lower_bound <= len(merged.nodes)
    assert merged.is_minimal or merged.lower_bound < len(merged.nodes)
    expected = Counter(
        (int(merged.positions[number][label.position]), label.target, number, label.weight)
        for number, task in enumerate(family)
        for label in task.labels
    )
    assert Counter((e.position, e.target, e.task, e.weight) for e in merged.task.labels) == expected


@given(specs(total=7, num_tasks=3, kinds=2))
@settings(max_examples=400)
@pytest.mark.slow
def test_no_smaller_common_supergraph_exists(spec):
    """Against all ways of identifying the nodes of all maximal down-sets (definition 3.6, by exhaustion)."""
    family = build(spec)
    assert len(tasks.merge(family).nodes) == fewest_nodes(family)


def fewest_nodes(family: Sequence[Task]) -> int:
    """The size of a smallest common supergraph.

    One that holds nothing superfluous is a union of images of the maximal down-sets, so it is their disjoint union
    with nodes of equal input identified: all partitions are tried, fewest blocks first.
    """
    graphs = all_down_sets(family)
    tops = [
        graph
        for (number, node), graph in graphs.items()
        if not any(number == n and node != m and node in other for (n, m), other in graphs.items())
    ]
    whole = nx.DiGraph()
    for index, graph in enumerate(tops):
        whole.update(nx.relabel_nodes(graph, {node: (index, node) for node in graph}))
    needed: list[nx.DiGraph] = []
    for graph in graphs.values():
        if not any(same(graph, other) for other in needed):
            needed.append(graph)
    nodes = list(whole)
    kinds = [frozenset(whole.nodes[node]["inputs"].items()) for node in nodes]
    for size in range(1, len(nodes) + 1):
        for blocks in partitions(kinds, size):
            if is_common_supergraph(whole, nodes, blocks, needed):
                return size
    raise AssertionError("the disjoint union itself is a common supergraph")


def partitions(kinds: Sequence[object], size: int) -> Iterator[list[int]]:
    """The block of each item, for every partition into `size` blocks of equal kind."""

    def extend(blocks: list[int], kind_of_block: list[object]) -> Iterator[list[int]]:
        if len(blocks) == len(kinds):
            if len(kind_of_block) == size:
                yield blocks
            return
        if len(kind_of_block) + len(kinds) - len(blocks) < size:
            return
        for block, kind in enumerate(kind_of_block):
            if kind == kinds[len(blocks)]:
                yield from extend([*blocks, block], kind_of_block)
        if len(kind_of_block) < size:
            yield from extend([*blocks, len(kind_of_block)], [*kind_of_block, kinds[len(blocks)]])

    yield from extend([], [])


def is_common_supergraph(whole: nx.DiGraph, nodes: list, blocks: list[int], needed: Sequence[nx.DiGraph]) -> bool:
    block_of = dict(zip(nodes, blocks, strict=True))
    quotient = nx.DiGraph()
    for node in nodes:
        quotient.add_node(block_of[node], inputs=whole.nodes[node]["inputs"])
    quotient.add_edges_from((block_of[x], block_of[y]) for x, y in whole.edges)
    if any(x == y for x, y in quotient.edges) or not nx.is_directed_acyclic_graph(quotient):
        return False
    order = nx.transitive_closure_dag(quotient)
    held = []
    for block in order:
        ideal = order.subgraph([*order.predecessors(block), block]).copy()
        for node in ideal:
            ideal.nodes[node]["top"] = node == block
        held.append(ideal)
    return all(any(same(graph, ideal) for ideal in held) for graph in needed)


@given(specs(total=6, num_tasks=1, kinds=2), specs(total=10, kinds=2))
@settings(max_examples=300)
def test_embedded_against_the_definition(single, spec):
    """Any task, not only a merged one."""
    other, family = build(single), build(spec)
    for task in (*other, *family[:1]):
        found = embedding(task, family)
        assert sorted((node.task, node.positions) for node in found.missing) == sorted(missing_nodes(task, family))
        assert found.num_nodes == len(all_down_sets(family))
        assert found.ok == (not found.missing)


@given(specs(total=10, repeat=False), st.data())
@settings(max_examples=300)
def test_a_broken_merge_is_noticed(spec, data):
    """Closing or opening one pair of a merged mask is seen by `embedded` exactly when the definition says so."""
    family = build(spec)
    merged = tasks.merge(family).task
    pairs = list(combinations(range(merged.size), 2))
    if not pairs:
        return
    q, k = data.draw(st.sampled_from(pairs))
    allow = merged.mask.dense()
    if data.draw(st.booleans()):
        q, k = k, q
    allow[q, k] = ~allow[q, k]
    broken = Task(merged.inputs, (), af.masks.from_dense(allow)).densified()
    found = {(node.task, node.positions) for node in embedding(broken, family).missing}
    assert found == set(missing_nodes(broken, family))
