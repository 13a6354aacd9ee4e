"""The layered placement: every edge goes up, nothing overlaps, lines pass no box."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow.order.hasse import Hasse
from attnflow.report.layered_layout import place

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


def placed_with_levels(diagram):
    sizes, edges = diagram
    levels = Hasse([(i,) for i in range(len(sizes))], edges).levels
    return place(sizes, levels, edges)


def box(centre, size, margin=0.0):
    (x, y), (width, height) = centre, size
    return (
        x - width / 2 - margin,
        y - height / 2 - margin,
        x + width / 2 + margin,
        y + height / 2 + margin,
    )


def overlap(a, b):
    return a[0] < b[2] - SLACK and b[0] < a[2] - SLACK and a[1] < b[3] - SLACK and b[1] < a[3] - SLACK


@settings(max_examples=80)
@given(diagrams())
def test_nothing_overlaps_and_everything_is_on_the_page(diagram):
    sizes, placed = diagram[0], placed_with_levels(diagram)
    boxes = [box(centre, size) for centre, size in zip(placed.centres, sizes, strict=True)]
    for a, b in combinations(boxes, 2):
        assert not overlap(a, b)
    for left, top, right, bottom in boxes:
        assert min(left, top) >= -SLACK
        assert right <= placed.width + SLACK
        assert bottom <= placed.height + SLACK


@settings(max_examples=80)
@given(diagrams())
def test_edges_go_up_and_pass_no_box(diagram):
    (sizes, edges), placed = diagram, placed_with_levels(diagram)
    boxes = [box(centre, size) for centre, size in zip(placed.centres, sizes, strict=True)]
    for (lower, upper), route in zip(edges, placed.routes, strict=True):
        assert route[0] == (placed.centres[lower][0], boxes[lower][1])  # starts on top of the lower box
        assert route[-1] == (placed.centres[upper][0], boxes[upper][3])  # ends at the bottom of the upper one
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


def test_a_lone_chain_and_its_pendants_are_straight():
    spine = [(0, 1), (1, 2), (2, 3)]
    edges = sorted([*spine, (0, 4), (1, 5), (2, 6)], key=lambda edge: edge[1])
    levels = [0, 1, 2, 3, 1, 2, 3]
    placed = place([(40.0, 28.0)] * 7, levels, edges)
    assert len({round(placed.centres[node][0], 6) for node in range(4)}) == 1


def test_crossings_that_can_be_avoided_are():
    edges = [(0, 5), (1, 4), (2, 3)]  # by index these cross three times
    placed = place([(40.0, 28.0)] * 6, [0, 0, 0, 1, 1, 1], edges)
    x = [centre[0] for centre in placed.centres]
    assert all((x[a] - x[c]) * (x[b] - x[d]) > 0 for (a, b), (c, d) in combinations(edges, 2))


def test_an_edge_that_does_not_go_up_is_refused():
    with pytest.raises(ValueError, match="must go up"):
        place([(40.0, 28.0)] * 2, [0, 0], [(0, 1)])


def test_nothing_to_place():
    placed = place([], [], [])
    assert (placed.centres, placed.routes, placed.width, placed.height) == ([], [], 0.0, 0.0)
