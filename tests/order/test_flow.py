"""The order of a mask against brute force, over thousands of random relations."""

from itertools import pairwise

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks, testing
from attnflow.order import analyze
from tests.strategies import dense_masks, square_masks


def residual(mask):
    return mask.dense().numpy() | np.eye(mask.num_queries, dtype=bool)


@st.composite
def stacks(draw, max_size=7, max_layers=4):
    """Per-layer masks of one size."""
    n, layers = draw(st.integers(0, max_size)), draw(st.integers(1, max_layers))
    table = st.lists(st.booleans(), min_size=n * n, max_size=n * n)
    return [masks.from_dense(torch.tensor(draw(table), dtype=torch.bool).reshape(n, n)) for _ in range(layers)]


def check(mask):
    """The order of a mask against brute force."""
    flow, allow = analyze(mask), mask.dense()
    closure = testing.closure(allow)
    assert np.array_equal(flow.reachability().numpy(), closure)
    assert sorted(flow.classes) == testing.classes(allow)
    assert {(flow.classes[a], flow.classes[b]) for a, b in flow.hasse.edges} == testing.covers(allow)
    assert flow.depth == testing.depth(allow)
    assert flow.is_dense == np.array_equal(residual(mask), closure) == (flow.depth == 1)
    assert flow.closure_density == pytest.approx(closure.mean() if mask.num_queries else 0.0)
    if n := mask.num_queries:
        assert flow.reaches(0, n - 1) == closure[n - 1, 0]


def check_stack(layers):
    """The flow through a stack against brute force."""
    flow, tables = analyze(layers), [mask.dense() for mask in layers]
    whole = testing.product(tables)
    assert np.array_equal(flow.reachability().numpy(), whole)
    assert flow.depth == testing.product_depth(tables)
    assert sorted(flow.classes) == testing.classes(whole)
    assert {(flow.classes[a], flow.classes[b]) for a, b in flow.hasse.edges} == testing.covers(whole)
    return flow, tables, whole


@settings(max_examples=1000)
@given(square_masks())
def test_order_is_the_brute_force_order(mask):
    check(mask)


@settings(max_examples=200)
@given(square_masks())
def test_classes_are_topological(mask):
    flow = analyze(mask)
    assert all(lower < upper for lower, upper in flow.hasse.edges)
    for index, members in enumerate(flow.classes):
        assert list(members) == sorted(members)
        assert all(flow.class_of(position) == index for position in members)
    levels = flow.hasse.levels
    assert all(levels[lower] < levels[upper] for lower, upper in flow.hasse.edges)


@settings(max_examples=200)
@given(square_masks(7), st.integers(0, 8))
def test_fields_after_some_layers(mask, layers):
    flow, power = analyze(mask), testing.power(mask.dense(), layers)
    assert np.array_equal(flow.reachability(layers).numpy(), power)
    for query in range(flow.size):
        assert flow.receptive_field(query, layers).tolist() == np.flatnonzero(power[query]).tolist()
        assert all(flow.reaches(key, query, layers) == power[query, key] for key in range(flow.size))


@settings(max_examples=200)
@given(square_masks(7))
def test_paths_are_shortest_witnesses(mask):
    flow, allow = analyze(mask), mask.dense()
    for source in range(flow.size):
        for target in range(flow.size):
            path = flow.path(source, target)
            assert bool(path) == flow.reaches(source, target)
            if path:
                assert (path[0], path[-1]) == (source, target)
                assert testing.path_exists(allow, path)
                hops = len(path) - 1
                assert flow.reaches(source, target, hops)
                assert hops == 0 or not flow.reaches(source, target, hops - 1)


@settings(max_examples=200)
@given(stacks())
def test_stack_is_the_product_in_layer_order(layers):
    flow, _, whole = check_stack(layers)
    for source in range(flow.size):
        for target in range(flow.size):
            assert flow.reaches(source, target) == whole[target, source]
            path = flow.path(source, target)
            assert bool(path) == whole[target, source]
            if path and source != target:
                assert (path[0], path[-1], len(path)) == (source, target, len(layers) + 1)
                assert all(residual(m)[q, k] for m, (k, q) in zip(layers, pairwise(path), strict=True))


@settings(max_examples=100)
@given(stacks(max_size=5))
def test_stack_path_has_fewest_moves(layers):
    flow = analyze(layers)
    n = flow.size
    moves = np.where(np.eye(n, dtype=bool), 0, 99)  # moves[target, source], layer by layer, by brute force
    for mask in layers:
        attends = mask.dense().numpy()
        step = [[min([99, *(moves[k, s] + 1 for k in np.flatnonzero(attends[q]))]) for s in range(n)] for q in range(n)]
        moves = np.minimum(moves, np.array(step, dtype=int).reshape(n, n))
    for source in range(n):
        for target in range(n):
            if source != target and moves[target, source] < 99:
                path = flow.path(source, target)
                assert sum(a != b for a, b in pairwise(path)) == moves[target, source]


@settings(max_examples=200)
@given(square_masks(7))
def test_growth_counts_the_fields(mask):
    flow = analyze(mask)
    growth = flow.growth()
    assert len(growth) == flow.depth + 1
    for layers, sizes in enumerate(growth):
        assert sizes.tolist() == testing.power(mask.dense(), layers).sum(1).tolist()
    assert [row["receptive_field"] for row in flow.rows()] == testing.closure(mask.dense()).sum(1).tolist()


@settings(max_examples=200)
@given(
    square_masks(7),
    st.one_of(st.none(), st.integers(1, 8)),
    st.one_of(st.none(), st.lists(st.integers(0, 6), max_size=2)),
)
def test_sparse_realisation_has_the_same_diagram(mask, window, anchors):
    flow = analyze(mask)
    anchors = None if anchors is None else [a for a in anchors if a < flow.size]
    sparse = flow.sparsify(window=window, anchors=anchors)
    again = analyze(sparse.mask)
    assert sorted(again.classes) == sorted(flow.classes)
    assert testing.covers(sparse.mask.dense()) == testing.covers(mask.dense())
    assert sparse.depth == testing.depth(sparse.mask.dense())
    if window is None and anchors is None:
        cycles = sum(len(members) for members in flow.classes if len(members) > 1)
        assert sparse.mask.nnz == flow.size + len(flow.hasse.edges) + cycles


def test_sparsify_trades_depth_for_pairs():
    flow = analyze(masks.causal(256))
    sparsest, windowed, anchored = flow.sparsify(), flow.sparsify(window=32), flow.sparsify(window=32, anchors=8)
    assert (sparsest.mask, sparsest.depth) == (masks.sliding_window(256, 2), 255)
    assert windowed.mask == masks.sliding_window(256, 32)
    assert sparsest.rows() == [{"mask": sparsest.mask.name, "pairs": 511, "density": 511 / 256**2, "depth": 255}]
    assert sparsest.depth > windowed.depth > anchored.depth > 1
    assert sparsest.mask.nnz < windowed.mask.nnz < anchored.mask.nnz < masks.causal(256).nnz


@given(dense_masks(6, square=True))
def test_chunks_are_the_rows(mask):
    flow = analyze(mask)
    for layers in (None, 1):
        parts = list(flow.reachability_by_rows(2, layers))
        assert [start for start, _ in parts] == list(range(0, flow.size, 2))
        if parts:
            assert torch.equal(torch.cat([part for _, part in parts]), flow.reachability(layers))


CLOSED_FORMS = [
    (masks.causal(50), 1, 50, 49),
    (masks.full(50), 1, 1, 0),
    (masks.sliding_window(50, 8), 7, 50, 49),
    (masks.document([20, 30]), 1, 50, 48),
    (masks.block_causal(50, 10), 1, 5, 4),
    (masks.block_two_stream(6, 4), 1, 10, 9),
    (masks.block_two_stream(6, 4, predict_first=True), 1, 11, 9),
    (masks.butterfly(9), 1, 25, 30),
    (masks.permutation_lm(range(9)), 1, 18, 16),
    (masks.prefix_lm(20, 5), 1, 16, 15),
    (masks.global_tokens(20, [3]), 2, 1, 0),
    (masks.dilated_window(20, 2, 2), 9, 20, 18),
    (masks.from_dense(torch.zeros(5, 5, dtype=torch.bool)), 1, 5, 0),
]


@pytest.mark.parametrize(("mask", "depth", "classes", "edges"), CLOSED_FORMS, ids=lambda v: getattr(v, "name", None))
def test_closed_forms(mask, depth, classes, edges):
    flow = analyze(mask)
    assert (flow.depth, len(flow.classes), len(flow.hasse.edges)) == (depth, classes, edges)


@settings(max_examples=200)
@given(square_masks())
def test_equal_masks_have_equal_diagrams(mask):
    flow, again = analyze(mask), analyze(masks.from_dense(mask.dense()))
    assert flow.classes == again.classes
    assert flow.hasse == again.hasse
    assert analyze(flow.sparsify().mask).hasse == flow.hasse


def test_large_masks_agree_with_relabelled_and_dense_forms():
    generator = np.random.default_rng(0)
    for mask in (
        masks.butterfly(100),
        masks.block_diffusion(20, 8),
        masks.dilated_window(300, 4, 3),
        masks.block_causal(400, 4),
        masks.block_two_stream(100, 2),
    ):
        order = generator.permutation(mask.num_queries)
        plain, shuffled = analyze(mask), analyze(masks.from_dense(mask.permute(order).dense()))
        assert plain.depth == shuffled.depth
        assert torch.equal(plain.reachability()[order][:, order], shuffled.reachability())
        rename = {tuple(sorted(order[list(members)].tolist())) for members in shuffled.classes}
        assert rename == set(plain.classes)
        assert len(plain.hasse.edges) == len(shuffled.hasse.edges)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 150), st.sampled_from([0.5, 1.0, 2.0, 8.0]), st.booleans(), st.integers(0, 1 << 32))
def test_scattered_graphs_against_networkx(n, reads, triangular, seed):
    """Random graphs of so many keys a query: their components, their classes in order, diagram and closure."""
    table = np.random.default_rng(seed).random((n, n)) < reads / n
    table = np.tril(table, -1) if triangular else table
    flow = analyze(masks.from_dense(torch.from_numpy(table)))
    graph = networkx.DiGraph((int(key), int(query)) for query, key in np.argwhere(table) if query != key)
    graph.add_nodes_from(range(n))
    condensed = networkx.condensation(graph)
    members = {node: tuple(sorted(condensed.nodes[node]["members"])) for node in condensed}
    ordered = list(networkx.lexicographical_topological_sort(condensed, key=members.__getitem__))
    reduced = networkx.transitive_reduction(condensed).edges
    assert flow.classes == [members[node] for node in ordered]
    assert flow.hasse.edges == sorted(
        ((ordered.index(lower), ordered.index(upper)) for lower, upper in reduced), key=lambda pair: pair[::-1]
    )
    below = networkx.to_numpy_array(networkx.transitive_closure(graph, reflexive=True), nodelist=range(n)) > 0
    assert np.array_equal(flow.reachability().numpy().T, below)


def test_shattered_product_takes_the_four_russians():
    generator = torch.Generator().manual_seed(0)
    mask = masks.from_dense((torch.rand(600, 600, generator=generator) < 0.3).tril())
    flow, one = analyze(mask), (mask.dense() | torch.eye(600, dtype=torch.bool)).float()
    assert torch.equal(flow.reachability(2), (one @ one) > 0)
    assert torch.equal(flow.reachability(3), (one @ one @ one) > 0)
    assert torch.equal(flow.reachability(flow.depth), flow.reachability())


def test_hasse_exports():
    hasse = analyze(masks.block_causal(6, 2)).hasse
    assert hasse.nodes == [(0, 1), (2, 3), (4, 5)]
    assert hasse.edges == [(0, 1), (1, 2)]
    assert hasse.rows() == [{"lower": "0, 1", "upper": "2, 3"}, {"lower": "2, 3", "upper": "4, 5"}]
    graph = hasse.to_networkx()
    assert list(graph.edges) == hasse.edges
    assert graph.nodes[1]["positions"] == (2, 3)


def test_empty_and_single():
    empty, single = analyze(masks.causal(0)), analyze(masks.causal(1))
    assert (empty.depth, empty.classes, empty.hasse.edges, empty.is_dense) == (1, [], [], True)
    assert empty.reachability().shape == (0, 0)
    assert empty.sparsify().mask.shape == (0, 0)
    assert (single.depth, single.classes, single.path(0, 0)) == (1, [(0,)], [0])


def test_a_sparser_mask_may_need_fewer_layers():
    """Both have the order of nine places in a row: a window of two back, and the chain with a hub in the middle."""
    window = analyze(masks.sliding_window(9, 3))
    hub = [(i, i - 1) for i in range(1, 9)] + [(i, 4) for i in (6, 7, 8)] + [(4, j) for j in (0, 1, 2)]
    hubbed = analyze(masks.from_edges([*hub, *((i, i) for i in range(9))], 9))
    assert hubbed.hasse.edges == window.hasse.edges
    assert (hubbed.masks[0].nnz, hubbed.depth) == (23, 3)
    assert (window.masks[0].nnz, window.depth) == (24, 4)
