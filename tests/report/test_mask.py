"""The numbers and pictures of a mask, against dense tables and brute force."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnflow import masks, report, testing
from attnflow.order import analyze
from attnflow.report import figure
from attnflow.report.mask import block_sizes
from attnflow.report.mask_picture import grid, mask_text, ticks
from attnflow.report.order import growth
from tests.report.reading import parse_svg, texts
from tests.strategies import dense_masks, permuted_masks, square_masks


@settings(max_examples=100)
@given(st.one_of(dense_masks(9), permuted_masks(9)), st.integers(1, 11), st.integers(1, 11))
def test_a_grid_counts_the_pairs_of_each_cell(mask, query_step, key_step):
    table, cells = mask.dense().numpy(), grid(mask, query_step, key_step)
    rows, columns = (-(-size // step) for size, step in zip(mask.shape, (query_step, key_step), strict=True))
    assert cells.counts.shape == (rows, columns)
    for r in range(rows):
        for c in range(columns):
            part = table[r * query_step : (r + 1) * query_step, c * key_step : (c + 1) * key_step]
            assert cells.counts[r, c] == part.sum()
            assert cells.pairs[r, c] == part.size


@given(st.integers(0, 200_000), st.integers(2, 9))
def test_ticks_are_few_and_span_the_axis(size, most):
    found = ticks(size, most)
    assert found == sorted(set(found))
    assert len(found) <= most
    assert found[:1] == [0][:size]
    assert found[-1:] == ([size - 1] if size else [])


@settings(max_examples=100)
@given(square_masks(9))
def test_growth_is_the_size_of_each_power(mask):
    flow = analyze(mask)
    if not flow.size:
        return
    sizes, positions = growth(flow)
    assert positions.tolist() == list(range(flow.size))
    assert len(sizes) in (flow.depth, flow.depth + 1)  # depth is at least 1, also where nothing ever grows
    for layers, row in enumerate(sizes):
        assert row.tolist() == testing.power(mask.dense(), layers).sum(axis=1).tolist()


def test_growth_of_a_long_sequence_is_sampled_from_end_to_end():
    flow = analyze(masks.sliding_window(2000, 101))
    sizes, positions = growth(flow)
    assert len(positions) < flow.size
    assert (positions[0], positions[-1]) == (0, 1999)
    assert len(sizes) - 1 == flow.depth == 20
    assert np.array_equal(sizes, np.minimum(positions[None] + 1, 1 + 100 * np.arange(21)[:, None]))


RECTANGLE = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-([\d.]+)z")
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def painted(root):
    """The opacity of each cell, from the paths that a viewer fills."""
    side = float(root.get("data-box").split()[2])
    shape, step = ([int(v) for v in root.get(name).split()] for name in ("data-shape", "data-step"))
    cells = np.zeros([-(-size // s) for size, s in zip(shape, step, strict=True)])
    for path in root.iter("path"):
        if "af-cell" in path.get("class", ""):
            assert RECTANGLE.sub("", path.get("d")) == ""
            for x, y, width, height, back in RECTANGLE.findall(path.get("d")):
                assert width == back
                assert float(height) == side
                first, length, row = (round(float(v) / side) for v in (x, width, y))
                assert not cells[row, first : first + length].any()  # nothing is painted twice
                cells[row, first : first + length] = float(path.get("fill-opacity"))
    return cells


@settings(max_examples=50)
@given(st.one_of(dense_masks(7), permuted_masks(7)))
def test_small_masks_are_drawn_pair_by_pair(mask):
    root = parse_svg(figure(mask).markup)
    table = mask.dense().numpy()
    assert np.array_equal(painted(root), table.astype(float))
    assert root.get("data-cells") == "".join("A_"[int(allowed)] for allowed in table.ravel())
    shown = texts(root)
    assert {"key →"} <= set(shown)
    for size in mask.shape:
        assert size == 0 or str(size - 1) in shown


@pytest.mark.parametrize(
    "mask", [masks.causal(500), masks.big_bird(1024), masks.full(70, 300), masks.butterfly(90)], ids=repr
)
def test_large_masks_are_shaded_by_their_share(mask):
    root = parse_svg(figure(mask).markup)
    step, opacity = [int(v) for v in root.get("data-step").split()], painted(root)
    table = mask.dense().numpy()
    share = np.array(
        [
            [table[q : q + step[0], k : k + step[1]].mean() for k in range(0, mask.num_keys, step[1])]
            for q in range(0, mask.num_queries, step[0])
        ]
    )
    assert max(opacity.shape) <= 96
    assert np.array_equal(opacity == 0, share == 0)
    assert np.array_equal(opacity == 1, share == 1)
    order = np.argsort(share.ravel(), kind="stable")
    assert (np.diff(opacity.ravel()[order]) >= 0).all()
    coded = np.array([DIGITS.index(digit) for digit in root.get("data-cells")]).reshape(share.shape) / 63
    assert np.abs(coded - share).max() < 0.02
    assert any("allowed per block" in text for text in texts(root))


def test_a_long_mask_is_small_and_needs_no_table(monkeypatch):
    monkeypatch.setattr(masks.Mask, "dense", lambda *_: pytest.fail("built n x n"))
    monkeypatch.setattr(masks.Mask, "dense_chunks", lambda *_, **__: pytest.fail("built n x n in chunks"))
    for mask in (masks.causal(131_072), masks.block_two_stream(512, 64)):
        assert len(figure(mask).markup) < 60_000


@pytest.mark.parametrize("size", [3, 33, 64])
def test_every_label_is_drawn(size):
    names = [f"w{position}" for position in range(size)]
    root = parse_svg(figure(masks.causal(size), labels=names, size=64).markup)
    assert sorted(texts(root)) == sorted(2 * names)
    assert min(float(text.get("font-size")) for text in root.iter("text")) >= 10
    assert "w2" in report.page(masks.causal(size), labels=names).html


def test_labels_that_have_no_room_are_refused():
    with pytest.raises(
        ValueError, match=r"for at most 64 positions, got 65: .* or draw a part, such as mask\[:64, :64\]"
    ):
        figure(masks.causal(65), labels=["w"] * 65)
    page = report.page(masks.causal(65), labels=["word"] * 65).html
    assert "Its 65 labels stand in the Hasse diagram." in page
    assert "word" in page


@pytest.mark.parametrize("size", [0, 6, 24, 5000])
def test_a_printed_mask_is_a_small_picture(size):
    lines = str(masks.causal(size)).splitlines()
    assert lines[0] == repr(masks.causal(size))
    assert max(map(len, lines)) <= 36
    assert len(lines) <= 24
    assert ("a sign: " in str(masks.causal(size))) == (size > 32)  # reduced


HALVES = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}


def picture(text, mask):
    """The lines of the picture, without header, axis, row numbers and key."""
    body = text.split("\n\n")[1].splitlines()
    label = len(str(mask.num_queries - 1))
    lines = [line for line in body if line[: label + 2].strip().isdigit() or not line[: label + 2].strip()]
    return [line[label + 2 :] for line in lines]


@settings(max_examples=100)
@given(st.one_of(dense_masks(9), permuted_masks(9)), st.booleans())
def test_small_masks_show_every_pair(mask, plain):
    text = mask_text(mask, width=60, ascii_only=plain)
    assert " ".join(text.split()).startswith(repr(mask)[:40].rstrip())  # wrapped between words
    if 0 in mask.shape:
        assert text.endswith("no pairs to show")
        return
    lines = picture(text, mask)[1:]
    yes, no = ("#", ".") if plain else ("■", "·")
    assert [line.split(" ") for line in lines] == [
        [yes if allowed else no for allowed in row] for row in mask.dense().tolist()
    ]
    assert not plain or text.isascii()


@pytest.mark.parametrize(
    "mask", [masks.butterfly(15), masks.causal(63), masks.big_bird(64, 4), masks.full(33, 60)], ids=repr
)
def test_half_blocks_are_exact(mask):
    lines = picture(mask_text(mask, width=100, ascii_only=False), mask)[1:]
    rows = [[HALVES[sign] for sign in line.ljust(mask.num_keys)] for line in lines]
    table = np.array([[pair[half] for pair in row] for row in rows for half in (0, 1)], dtype=bool)
    assert np.array_equal(table[: mask.num_queries], mask.dense().numpy())
    assert not table[mask.num_queries :].any()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "mask", [masks.causal(500), masks.big_bird(2048), masks.full(10, 3000), masks.full(3000, 10)], ids=repr
)
def test_shades_say_nothing_some_all(mask, plain):
    text = mask_text(mask, width=80, ascii_only=plain)
    lines = picture(text, mask)[1:]
    step = next(s for s in range(1, 10_000) if f" by {s:,} key" in text)
    shades = " .-+#" if plain else " ░▒▓█"
    table = mask.dense().numpy()
    assert len(lines) == -(-mask.num_queries // (2 * step))
    for r, line in enumerate(lines):
        for c, sign in enumerate(line.ljust(-(-mask.num_keys // step))):
            part = table[2 * r * step : 2 * (r + 1) * step, c * step : (c + 1) * step]
            assert (sign == " ") == (not part.any())
            assert (sign == shades[-1]) == part.all()
            if 0 < part.mean() < 1:
                assert shades.index(sign) == 1 + min(2, int(part.mean() * 3))


@settings(max_examples=80)
@given(st.integers(20, 140), st.integers(0, 700), st.integers(0, 700), st.booleans())
@example(20, 1, 10, False)  # two queries per line
def test_it_fits_the_width(width, queries, keys, plain):
    text = mask_text(masks.full(queries, keys), width=width, ascii_only=plain)
    assert all(len(line) <= width for line in text.splitlines())
    assert len(text.splitlines()) <= 45
    assert not plain or text.isascii()


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (masks.big_bird(96, 12), [128, 12, 6]),
        (masks.big_bird(1024), [128, 64, 32]),
        (masks.big_bird(32, 2), [128, 2]),
        (masks.big_bird(256, 128), [128, 64, 32]),
        (masks.block_causal(90, 9), [128, 9, 3]),
        (masks.causal(64), [128, 32, 16]),
    ],
    ids=repr,
)
def test_masks_of_blocks_are_counted_at_sizes_that_divide_them(mask, sizes):
    assert block_sizes(mask) == sizes
