"""Summaries of large diagrams: every class and every cover is counted once, and regular masks stay readable."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow.order import analyze
from attnflow.order.hasse import Hasse
from attnflow.report.hasse_summary import bands, groupings
from tests.strategies import square_masks

generator = np.random.default_rng(0)


def random_order(size, share):
    table = np.tril(generator.random((size, size)) < share, -1)
    return masks.from_dense(torch.from_numpy(table))


def first(mask, pinned=(), max_nodes=60):
    return next(groupings(analyze(mask).hasse, max_nodes, pinned), None)


def check(hasse, grouping):
    """What must hold for any grouping of any diagram."""
    box_of = grouping.box_of()
    assert sorted(box_of) == list(range(len(hasse.nodes)))
    assert sum(len(box.classes) for box in grouping.boxes) == len(hasse.nodes)
    inner = sum(box.inner_edges for box in grouping.boxes)
    assert inner + sum(grouping.links.values()) == len(hasse.edges)
    counts = {}
    for lower, upper in hasse.edges:
        pair = box_of[lower], box_of[upper]
        counts[pair] = counts.get(pair, 0) + 1
    assert grouping.links == {pair: count for pair, count in counts.items() if pair[0] != pair[1]}
    for lower, upper in grouping.links:
        assert grouping.levels[lower] < grouping.levels[upper]
    for index, box in enumerate(grouping.boxes):
        inside = [(a, b) for a, b in hasse.edges if box_of[a] == box_of[b] == index]
        assert len(inside) == box.inner_edges
        lone = {a for a, _ in inside} | {b for _, b in inside}
        if box.is_chain:
            assert len({a for a, _ in inside}) == len({b for _, b in inside}) == len(inside)
            assert box.parts == len(box.classes) - len(inside)
        if not inside:
            assert not box.is_chain
            assert box.parts == len(box.classes)
        assert len(lone) <= len(box.classes)
    assert bool(grouping.how) == (len(grouping.boxes) < len(hasse.nodes))


@settings(max_examples=80)
@given(square_masks(9), st.integers(2, 12), st.data())
def test_every_class_and_cover_is_counted_once(mask, max_nodes, data):
    hasse = analyze(mask).hasse
    if not hasse.nodes:
        return
    pinned = sorted(data.draw(st.sets(st.integers(0, len(hasse.nodes) - 1), max_size=3)))
    for grouping in groupings(hasse, max_nodes, pinned):
        assert len(grouping.boxes) <= max_nodes
        check(hasse, grouping)


@settings(max_examples=100)
@given(square_masks(9), st.integers(1, 5))
def test_bands_add_up(mask, limit):
    hasse = analyze(mask).hasse
    found = bands(hasse, limit)
    assert sum(band.classes for band in found) == len(hasse.nodes)
    assert sum(band.positions for band in found) == mask.num_queries
    assert sum(band.covers for band in found) == len(hasse.edges)
    levels = [level for band in found for level in range(band.first_level, band.last_level + 1)]
    assert levels == list(range(max(hasse.levels, default=-1) + 1))
    assert len(found) <= limit or not hasse.nodes


def sizes(grouping):
    return sorted(len(box.classes) for box in grouping.boxes)


def test_a_chain_shows_its_ends():
    grouping = first(masks.causal(4096))
    assert sizes(grouping) == [1, 1, 1, 1, 4092]
    assert [grouping.boxes[0].classes, grouping.boxes[-1].classes] == [(0,), (4095,)]
    assert grouping.boxes[2].is_chain


def test_a_complete_binary_tree_has_a_box_per_generation():
    grouping = first(masks.tree([-1, *((node - 1) // 2 for node in range(1, 1023))]))
    assert sizes(grouping) == [2**power for power in range(10)]
    assert grouping.how == "classes with the same surroundings are one box"


@pytest.mark.parametrize(
    ("mask", "boxes"),
    [
        (masks.big_bird(1024), 1),
        (masks.sliding_window(300, 16), 5),
        (masks.from_dense(torch.eye(500, dtype=torch.bool)), 1),
        (masks.document([128] * 8), 40),
        (masks.document([9] * 300), 1),
        (masks.from_mask_mod(lambda b, h, q, k: (q >= 40) & (k < 40), 80), 2),  # complete bipartite
        (masks.from_mask_mod(lambda b, h, q, k: (q // 16 >= k // 16) & (q % 16 >= k % 16), 256), 9),  # a grid
    ],
    ids=["big_bird", "window", "identity", "documents", "many documents", "bipartite", "grid"],
)
def test_regular_masks_become_few_boxes(mask, boxes):
    hasse, grouping = analyze(mask).hasse, first(mask)
    assert len(grouping.boxes) == boxes
    check(hasse, grouping)


def test_equitable_boxes_cover_each_other_equally():
    mask = masks.tree([-1, *((node - 1) // 2 for node in range(1, 127))])
    hasse, grouping = analyze(mask).hasse, first(mask)
    box_of = grouping.box_of()
    below = {}
    for lower, upper in hasse.edges:
        below.setdefault(upper, []).append(box_of[lower])
    for box in grouping.boxes:
        assert len({tuple(sorted(below.get(index, []))) for index in box.classes}) == 1


def test_pinned_classes_keep_their_own_box():
    grouping = first(masks.causal(300), pinned=[0, 100, 299])
    own = {box.classes[0] for box in grouping.boxes if len(box.classes) == 1}
    assert {0, 100, 299} <= own
    assert sizes(grouping) == [*[1] * 11, 95, 194]  # and two classes at either end of both chains


@pytest.mark.parametrize("mask", [random_order(500, 0.008), random_order(300, 0.1)], ids=["sparse", "dense"])
def test_an_irregular_diagram_has_no_grouping(mask):
    assert first(mask) is None


def test_a_pattern_that_would_flow_in_circles_is_not_drawn_as_roles():
    edges = []  # a tower of diamonds: single, pair, single, pair, ...
    for step in range(100):
        bottom = 3 * step
        edges += [(bottom, bottom + 1), (bottom, bottom + 2), (bottom + 1, bottom + 3), (bottom + 2, bottom + 3)]
    hasse = Hasse([(i,) for i in range(301)], sorted(edges, key=lambda edge: (edge[1], edge[0])))
    for grouping in groupings(hasse, 60):
        check(hasse, grouping)
    assert next(groupings(hasse, 60), None) is None
