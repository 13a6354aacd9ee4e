"""Long masks: closure, covers, depth and stacks by intervals against brute force, on random interval relations."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import attnflow as af
from attnflow import masks, testing
from attnflow.masks.intervals import IntervalRows
from attnflow.order import closure as routes
from attnflow.order import dense, products, reach
from tests.order.test_flow import check, check_stack
from tests.strategies import square_masks

N = 131_072


@pytest.fixture(autouse=True, scope="module")
def always_long():
    """Every relation is taken for a long one, so that the brute force can follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "LONG", 0)
        yield


@st.composite
def interval_masks(draw, max_size: int = 20):
    """A few intervals in each row, alike in neighbouring rows or not, in a hidden numbering or not."""
    n = draw(st.integers(1, max_size))
    row, start, width = ([] for _ in range(3))
    for _ in range(draw(st.integers(0, 4))):
        first, last = sorted(draw(st.integers(0, n)) for _ in range(2))
        origin, slope = draw(st.integers(-3, n)), draw(st.sampled_from([0, 0, 1, 1, -1, 2]))
        reach, growth = draw(st.integers(1, 5)), draw(st.sampled_from([0, 0, 1]))
        for q in range(first, last):
            row.append(q)
            start.append(origin + slope * (q - first))
            width.append(reach + growth * (q - first))
    start, row = np.array(start, dtype=int), np.array(row, dtype=int)
    table = np.zeros((n, n), dtype=bool)
    for q, s, w in zip(row.tolist(), start.tolist(), width, strict=True):
        table[q, max(s, 0) : max(s + w, 0)] = True
    if draw(st.booleans()):
        table = np.tril(table)
    mask = masks.from_dense(torch.from_numpy(table))
    return mask.permute(draw(st.permutations(range(n)))) if draw(st.booleans()) else mask


def combined(first, steps):
    """`&`, `|` and `~` with masks of the catalogue."""
    n = first.num_queries
    others = [masks.causal(n), masks.sliding_window(n, 3), masks.dilated_window(n, 2, 3), masks.global_tokens(n, [0])]
    others += [masks.longformer(n, 2, [n // 2]), masks.permutation_lm(range(n // 2)) if n % 2 == 0 else masks.full(n)]
    mask = first
    for number, inverted, both in steps:
        other = ~others[number] if inverted else others[number]
        mask = mask & other if both else mask | other
    return mask


@settings(max_examples=300)
@given(interval_masks())
def test_orders_of_interval_relations(mask):
    check(mask)


@settings(max_examples=200)
@given(interval_masks(14), st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=3))
def test_orders_of_combinations(first, steps):
    check(combined(first, steps))


@settings(max_examples=200)
@given(square_masks(9).filter(lambda mask: mask.num_queries))
def test_orders_of_any_relation(mask):
    check(mask)


@settings(max_examples=50)
@given(interval_masks(), st.integers(-1, 30))
def test_what_has_too_many_intervals_is_done_by_bits(mask, room):
    with pytest.MonkeyPatch.context() as patch:
        for module in (routes, reach):
            patch.setattr(module, "room", lambda _: room)
        check(mask)


@settings(max_examples=100)
@given(
    st.lists(interval_masks(12), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), max_size=2),
    st.integers(0, 2),
    st.lists(st.integers(0, 11), min_size=2, max_size=2),
)
def test_stacks(drawn, compact, repeats, ends):
    n = min(mask.num_queries for mask in drawn)
    catalogue = masks.dilated_window(n, 2, 3), masks.global_tokens(n, [n - 1]), masks.sliding_window(n, 2)
    layers = [mask[:n, :n] for mask in drawn] + [catalogue[number] for number in compact]
    layers = layers + layers[:repeats]
    flow, tables, whole = check_stack(layers)
    growth = flow.growth()
    assert [sizes.tolist() for sizes in growth] == [
        testing.product(tables[:count]).sum(1).tolist() if count else [1] * n for count in range(len(growth))
    ]
    source, target = (end % n for end in ends)
    assert bool(flow.path(source, target)) == flow.reaches(source, target) == whole[target, source]
    assert not (flow.sparsify(window=2).mask.dense().numpy() & ~testing.closure(whole)).any()


@settings(max_examples=200)
@given(interval_masks(), interval_masks())
def test_intersections_and_unions(one, two):
    n = min(one.num_queries, two.num_queries)
    left, right = (mask[:n, :n].intervals() for mask in (one, two))
    for rows, table in (
        (left.intersection(right), left.to_bool() & right.to_bool()),
        (left.union(right), left.to_bool() | right.to_bool()),
    ):
        assert rows.equals(IntervalRows.from_bool(table))


@given(st.data())
def test_products_are_those_of_tables(data):
    a, b, c = (data.draw(st.integers(0, 9)) for _ in range(3))
    later, earlier = data.draw(arrays(np.bool_, (a, b))), data.draw(arrays(np.bool_, (b, c)))
    expected = later.astype(int) @ earlier.astype(int) > 0
    one, two = IntervalRows.from_bool(later), IntervalRows.from_bool(earlier)
    product = products.compose(one, two, 1000)
    assert product is not None
    assert np.array_equal(product.to_bool(), expected)
    assert products.compose(one, two, len(product.starts) - 1) is None


@given(st.data())
def test_products_with_ranges_from_the_first_key_on(data):
    """What later layers of causal kinds read: all keys up to one, and perhaps some more."""
    n = data.draw(st.integers(1, 9))
    later = data.draw(arrays(np.bool_, (n, n))) & data.draw(st.booleans())
    upto = data.draw(st.lists(st.integers(0, n), min_size=n, max_size=n))
    later |= np.arange(n) < np.array(upto)[:, None]
    earlier = data.draw(arrays(np.bool_, (n, n)))
    earlier = np.tril(earlier) | np.eye(n, dtype=bool) if data.draw(st.booleans()) else earlier
    product = products.compose(IntervalRows.from_bool(later), IntervalRows.from_bool(earlier), 1000)
    assert product is not None
    assert np.array_equal(product.to_bool(), later.astype(int) @ earlier.astype(int) > 0)


def fields_of(flow, target, layers):
    return [part.tolist() for part in (flow.receptive_field(target, layers), flow.reachability(layers), flow.growth())]


@given(square_masks(9), st.data())
def test_long_masks_are_read_in_their_compact_numbering(mask, data):
    if not mask.num_queries:
        return
    source, target = (data.draw(st.integers(0, mask.num_queries - 1)) for _ in range(2))
    layers = data.draw(st.integers(0, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "LONG", 1 << 11)
        flow = af.order.analyze(mask)
        assert (flow.depth, flow.is_dense) == (testing.depth(mask.dense()), testing.depth(mask.dense()) == 1)
        fields = fields_of(flow, target, layers)
        path, sparse_mask = flow.path(source, target), flow.sparsify(window=2).mask
    again = af.order.analyze(mask)
    assert fields_of(again, target, layers) == fields
    found = again.path(source, target)
    assert len(found) == len(path)
    assert all(a == b or mask.allows(b, a) for a, b in pairwise(found))
    assert not found or (found[0], found[-1]) == (source, target)
    assert again.sparsify(window=2).mask == sparse_mask


def test_a_node_with_many_covers():
    leaves = np.arange(300)
    table = np.eye(301, dtype=bool)
    table[300, :] = True
    table[300, leaves[7::30]] = False
    flow = af.order.analyze(masks.from_dense(torch.from_numpy(table)))
    assert len(flow.hasse.edges) == 290
    assert flow.is_dense


def test_too_many_covers_are_refused(monkeypatch):
    monkeypatch.setattr(dense, "LARGEST", 1000)
    n = 64
    two_floors = masks.from_intervals([[(0, n // 2 if q >= n // 2 else 0)] for q in range(n)])
    with pytest.raises(
        ValueError, match=r"the Hasse diagram has at least 1,024 edges, more than 1,000: take a shorter sequence"
    ):
        _ = af.order.analyze(two_floors).hasse


LONG_MASKS = [
    (masks.causal(N), 1, N, N - 1),
    (masks.sliding_window(N, 512), 257, N, N - 1),
    (masks.sliding_window(N, 512, causal=False), 257, 1, 0),
    (masks.dilated_window(N, 64, 4), 521, N, N - 4),
    (masks.document([N // 8] * 8), 1, N, N - 8),
    (masks.block_diffusion(N // 32, 16), 1, N // 16, N // 16 - 2),
    (masks.butterfly(43_000), 1, 3 * 43_000 - 2, 2 * 42_998 + 2 * 42_999),
    (masks.big_bird(N), 2, 1, 0),
    (masks.longformer(N, 512, [0, N // 2]), 2, 1, 0),
    (masks.tree((np.arange(N) - 1) // 2), 1, N, N - 1),
]


@pytest.mark.parametrize(("mask", "depth", "classes", "edges"), LONG_MASKS, ids=lambda v: getattr(v, "name", None))
def test_closed_forms_of_long_masks(mask, depth, classes, edges):
    flow = af.order.analyze(mask)
    assert (flow.depth, len(flow.classes), len(flow.hasse.edges)) == (depth, classes, edges)


def test_long_stacks():
    window, dilated = masks.sliding_window(N, 512), masks.dilated_window(N, 64, 4)
    flow = af.order.analyze([window] * 4)
    assert (flow.depth, len(flow.hasse.edges), len(flow.receptive_field(N - 1))) == (4, N - 1, 4 * 511 + 1)
    flow = af.order.analyze([dilated, dilated, window])
    assert flow.reaches(N - 1 - 2 * 63 * 4 - 511, N - 1)
    assert not flow.reaches(N - 1 - 2 * 63 * 4 - 512, N - 1)
    assert flow.growth(3)[:, -1].tolist() == [1, 64, 127, 127 * 4 - 3 + 511]


def test_what_fits_nowhere_is_refused(monkeypatch):
    monkeypatch.setattr(dense, "_ROOM", 1 << 21)
    n = 5_000
    key = (np.random.default_rng(0).random((2, n)) * np.arange(n)).astype(int)
    scattered = masks.from_edges([(q, k) for row in key for q, k in enumerate(row.tolist()) if q], n)
    with pytest.raises(ValueError, match=r"an order of classes over 5,000 positions takes [\d.]+ GB as bit matrices"):
        _ = af.order.analyze(scattered).hasse
    monkeypatch.setattr(reach, "_LARGEST", 1 << 10)
    with pytest.raises(ValueError, match=r"the flow through 12 layers over 5,000 positions takes [\d.]+ GB as bit"):
        _ = af.order.analyze([scattered] * 12).depth


def test_short_masks_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(dense, "_ROOM", 1000)
    monkeypatch.setattr(products, "LONG", 200)
    mask = af.masks.causal(200)
    with pytest.raises(
        ValueError, match=r"the flow through 4 layers over 200 positions takes [\d.]+ GB as bit matrices"
    ):
        _ = af.order.analyze([mask] * 4).depth
    with pytest.raises(ValueError, match="an order of classes over 200 positions takes"):
        _ = af.order.analyze(mask).hasse
