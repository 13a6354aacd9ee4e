"""Hasse diagrams: boxes that count every class once, a placement without overlaps, SVG that is whole and escaped."""

import math
import re
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow._core.markup import runs
from attnflow.order import analyze
from attnflow.order.hasse import Hasse
from attnflow.report import figure
from attnflow.report.hasse_summary import groupings
from attnflow.report.layered_layout import place, shelved
from tests.report.reading import parse_svg, texts, with_class
from tests.strategies import square_masks

HOSTILE = ["<script>alert(1)</script>", '" onload="x', "a\x00b\x1b[31m", "\u202eback", "\ud800", "&amp;", "]]>", ""]


def chains(length, number):
    return masks.block_diagonal([masks.causal(length)] * number)


def random_order(size, share, seed=0):
    table = np.tril(np.random.default_rng(seed).random((size, size)) < share, -1)
    return masks.from_dense(torch.from_numpy(table))


@settings(max_examples=80)
@given(square_masks(9))
def test_small_diagrams_are_complete(mask):
    hasse = analyze(mask).hasse
    root = parse_svg(figure(hasse).markup)
    if not hasse.nodes:
        assert "empty" in " ".join(texts(root))
        return
    assert len(with_class(root, "af-node")) == len(hasse.nodes)
    assert len(with_class(root, "af-edge")) == len(hasse.edges)
    assert {"".join(node.find("title").itertext()).split(": ")[1] for node in with_class(root, "af-node")} == {
        runs(node) for node in hasse.nodes
    }
    assert root.find("style") is not None
    assert root.get("role") == "img"
    assert root.find("title").text


@settings(max_examples=100)
@given(square_masks(9), st.data())
def test_a_highlighted_path_is_drawn_move_by_move(mask, data):
    flow = analyze(mask)
    if not flow.size:
        return
    source, target = (data.draw(st.integers(0, flow.size - 1)) for _ in range(2))
    path = flow.path(source, target)
    root = parse_svg(figure(flow, highlight=path).markup)
    classes = [flow.class_of(position) for position in path]
    moves = {layer: pair for layer, pair in enumerate(pairwise(classes), 1) if pair[0] != pair[1]}
    assert sorted(int(text.text) for badge in with_class(root, "af-badge") for text in badge.iter("text")) == [*moves]
    dashed = [node for node in root.iter("path") if node.get("stroke-dasharray")]
    assert len(dashed) == sum(pair not in set(flow.hasse.edges) for pair in moves.values())
    hot = [node for node in with_class(root, "af-node") if "af-hot" in node.get("class")]
    assert len(hot) == len(set(classes))


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(4096),
        masks.block_two_stream(64, 16),
        masks.butterfly(200),
        masks.big_bird(1024),
        masks.sliding_window(300, 16),
        masks.tree([-1, *np.random.default_rng(0).integers(0, np.arange(1, 1000)).tolist()]),
        random_order(500, 0.008),
    ],
    ids=["causal", "block_two_stream", "butterfly", "big_bird", "window", "tree", "random"],
)
def test_large_diagrams_are_summarised_and_say_so(mask):
    flow = analyze(mask)
    svg = figure(flow).markup
    root = parse_svg(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    assert len(with_class(root, "af-node")) <= 60
    assert max(width, height) < 1800
    assert len(svg) < 60_000
    caption = " ".join(text for group in with_class(root, "af-caption") for text in texts(group))
    if len(flow.classes) > 60:
        assert caption.startswith("Summarised")
        assert f"{len(flow.classes):,}".replace(",", "\u202f") + " classes" in caption
    shown = sum(
        int(re.match(r"([\d\u202f]+)", node.find("title").text.replace("Chain of ", "")).group(1).replace("\u202f", ""))
        for node in with_class(root, "af-node")
    )
    assert shown == len(flow.classes)


@pytest.mark.parametrize(
    "mask", [masks.causal(33), masks.sliding_window(50, 1), masks.dilated_window(60, 3, 1)], ids=repr
)
def test_a_number_of_boxes_is_the_only_limit_when_asked_for(mask):
    flow = analyze(mask)
    count = len(flow.classes)
    root = parse_svg(figure(flow, max_nodes=count).markup)
    assert len(with_class(root, "af-node")) == count
    assert len(with_class(root, "af-edge")) == len(flow.hasse.edges)
    assert len(with_class(parse_svg(figure(flow, max_nodes=count - 1).markup), "af-node")) < count


@pytest.mark.parametrize(
    "mask",
    [masks.causal(100), masks.full(100), masks.document([9] * 300), masks.butterfly(200), chains(2, 61)],
    ids=repr,
)
def test_every_label_of_a_summary_is_in_a_box_or_its_tooltip(mask):
    names = [f"w{position}" for position in range(mask.num_queries)]
    root = parse_svg(figure(analyze(mask), labels=names).markup)
    boxes = with_class(root, "af-node")
    assert all(re.search(r"w\d", " ".join(text.text for text in box.iter("text"))) for box in boxes)
    assert all("w" in box.find("title").text.split(" · ")[1] for box in boxes)


def test_hostile_labels_stay_text():
    labels = [*HOSTILE, "<b>", "word", "x" * 300, "日本語"]
    for mask in (masks.causal(12), masks.full(12)):
        svg = figure(analyze(mask), labels=labels).markup
        root = parse_svg(svg)
        svg.encode("utf-8")
        assert {node.tag for node in root.iter()} <= {"svg", "style", "title", "g", "rect", "path", "text"}
        assert not any(name.startswith("on") for node in root.iter() for name in node.keys())  # noqa: SIM118
        assert "\x00" not in svg
        assert "\u202e" not in svg
    assert any(
        "<script>alert(1)" in text for text in texts(parse_svg(figure(analyze(masks.causal(12)), labels=labels).markup))
    )


@settings(max_examples=50)
@given(st.lists(st.text(max_size=40), min_size=5, max_size=5))
def test_any_text_makes_well_formed_xml(labels):
    parse_svg(figure(analyze(masks.causal(5)), labels=labels).markup)


def test_wrong_arguments_are_refused():
    hasse = analyze(masks.causal(3)).hasse
    with pytest.raises(ValueError, match="a label for each of 3 positions, got 2"):
        figure(hasse, labels=["a", "b"])
    with pytest.raises(ValueError, match="positions of the diagram, got 7"):
        figure(hasse, highlight=[0, 7])
    with pytest.raises(ValueError, match="max_nodes must be at least 2"):
        figure(hasse, max_nodes=1)


def first(mask, pinned=(), max_nodes=60):
    return next(groupings(analyze(mask).hasse, max_nodes, pinned), None)


def check_counts(hasse, grouping):
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
        check_counts(hasse, grouping)


@pytest.mark.parametrize(
    ("count", "second"), [(2, "61 → 62"), (3, "61 → 62 → 63"), (4, "61 → … → 64"), (5, "61 → … → 65")]
)
def test_dots_stand_for_at_least_two_classes(count, second):
    star = [-1, *[0] * 60]
    mask = masks.tree([*star, 0, *range(61, 60 + count)])
    shown = texts(parse_svg(figure(analyze(mask)).markup))
    assert f"chain of {count}" in shown
    assert second in shown


FORTY_EIGHT = {
    "one chain": masks.causal(48),
    "two chains": chains(24, 2),
    "chains of four": chains(4, 12),
    "chains of three": chains(3, 16),
    "chains of two": chains(2, 24),
    "apart": chains(1, 48),
    "dilated": masks.dilated_window(48, 3, 12),
    "window": masks.sliding_window(48, 4),
    "two streams": masks.block_two_stream(24, 1),
    "tree": masks.tree([-1, *((node - 1) // 2 for node in range(1, 48))]),
    "blocks": masks.block_diffusion(12, 2),
    "of tokens ahead": masks.look_ahead(12, 3),
}


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("name", FORTY_EIGHT)
def test_forty_eight_positions_are_no_strip(name, words):
    mask = FORTY_EIGHT[name]
    flow = analyze(mask)
    labels = [f"token {i}" for i in range(mask.num_queries)] if words else None
    root = parse_svg(figure(flow, labels=labels).markup)
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 1024  # the column of a page
    assert height <= (750 if width < 300 else 1200)


def test_parts_that_are_not_connected_stand_on_shelves():
    root = parse_svg(figure(analyze(chains(2, 24))).markup)
    assert len(with_class(root, "af-node")) == 48
    assert len(with_class(root, "af-edge")) == 24
    assert not with_class(root, "af-caption")


def test_a_chain_shows_its_ends():
    grouping = first(masks.causal(4096))
    assert sorted(len(box.classes) for box in grouping.boxes) == [1, 1, 1, 1, 4092]
    assert [grouping.boxes[0].classes, grouping.boxes[-1].classes] == [(0,), (4095,)]
    assert grouping.boxes[2].is_chain


def test_a_complete_binary_tree_has_a_box_per_generation():
    grouping = first(masks.tree([-1, *((node - 1) // 2 for node in range(1, 1023))]))
    assert [len(box.classes) for box in grouping.boxes] == [2**power for power in range(10)]
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
    check_counts(hasse, grouping)


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


def test_a_pattern_that_would_flow_in_circles_is_not_drawn_as_roles():
    edges = []  # a tower of diamonds: single, pair, single, pair, ...
    for step in range(100):
        bottom = 3 * step
        edges += [(bottom, bottom + 1), (bottom, bottom + 2), (bottom + 1, bottom + 3), (bottom + 2, bottom + 3)]
    hasse = Hasse([(i,) for i in range(301)], sorted(edges, key=lambda edge: (edge[1], edge[0])))
    for grouping in groupings(hasse, 60):
        check_counts(hasse, grouping)
        assert "neighbouring levels" in grouping.how


SLACK = 1e-6


@st.composite
def diagrams(draw, max_size=14):
    """A random directed acyclic graph with box sizes; edges need not be covers."""
    n = draw(st.integers(0, max_size))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = sorted(draw(st.sets(st.sampled_from(pairs), max_size=24))) if pairs else []
    edges = sorted(edges, key=lambda edge: (edge[1], edge[0]))
    sizes = [(float(draw(st.integers(20, 160))), float(draw(st.sampled_from([28, 42])))) for _ in range(n)]
    return sizes, edges


def box(centre, size):
    (x, y), (width, height) = centre, size
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def overlap(a, b):
    return a[0] < b[2] - SLACK and b[0] < a[2] - SLACK and a[1] < b[3] - SLACK and b[1] < a[3] - SLACK


@settings(max_examples=80)
@given(diagrams(), st.sampled_from([math.inf, 300.0, 0.0]), st.sampled_from([16.0, 40.0]))
def test_nothing_overlaps_edges_go_up_and_pass_no_box(diagram, width, row_gap):
    sizes, edges = diagram
    placed = shelved(sizes, Hasse([(i,) for i in range(len(sizes))], edges).levels, edges, width, row_gap)
    boxes = [box(centre, size) for centre, size in zip(placed.centres, sizes, strict=True)]
    for a, b in combinations(boxes, 2):
        assert not overlap(a, b)
    for left, top, right, bottom in boxes:
        assert min(left, top) >= -SLACK
        assert right <= placed.width + SLACK
        assert bottom <= placed.height + SLACK
    for (lower, upper), route in zip(edges, placed.routes, strict=True):
        assert math.dist(route[0], (placed.centres[lower][0], boxes[lower][1])) < SLACK  # on top of the lower box
        assert math.dist(route[-1], (placed.centres[upper][0], boxes[upper][3])) < SLACK  # at the bottom of the upper
        assert boxes[upper][3] < boxes[lower][1]
        assert len(route) % 2 == 0
        for index, ((x, y), (next_x, next_y)) in enumerate(pairwise(route)):
            assert next_y <= y + SLACK  # y grows downwards
            if index % 2 == 0:
                assert next_x == x  # vertical inside a row
            stretch = (min(x, next_x), min(y, next_y), max(x, next_x), max(y, next_y))
            for other, place_of_other in enumerate(boxes):
                if other not in (lower, upper):
                    assert not overlap(stretch, place_of_other)


def test_crossings_that_can_be_avoided_are():
    edges = [(0, 5), (1, 4), (2, 3)]  # by index these cross three times
    placed = place([(40.0, 28.0)] * 6, [0, 0, 0, 1, 1, 1], edges)
    x = [centre[0] for centre in placed.centres]
    assert all((x[a] - x[c]) * (x[b] - x[d]) > 0 for (a, b), (c, d) in combinations(edges, 2))
