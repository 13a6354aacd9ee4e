"""Mask pictures: what is filled is what is allowed."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks, report
from attnflow.report.mask_picture import mask_svg
from attnflow.report.svg import encode
from tests.report.reading import parse_svg, texts, with_class
from tests.strategies import dense_masks, permuted_masks

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
@given(st.one_of(dense_masks(7), permuted_masks(7)), st.booleans())
def test_small_masks_are_drawn_pair_by_pair(mask, standalone):
    root = parse_svg(mask_svg(mask, standalone=standalone))
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
    root = parse_svg(mask_svg(mask))
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
        assert len(mask_svg(mask)) < 60_000


def test_labels_name_both_axes():
    root = parse_svg(mask_svg(masks.causal(3), labels=["<the>", "c" * 40, "\x00"]))
    assert texts(root).count("<the>") == 2
    assert texts(root).count("c" * 11 + "…") == 2
    assert with_class(root, "af-named")
    with pytest.raises(ValueError, match="square mask of 2 positions"):
        mask_svg(masks.causal(3), labels=["a", "b"])


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1), (1, 200)])
def test_odd_shapes_are_drawn(shape):
    parse_svg(mask_svg(masks.full(*shape)))
    assert encode(report.figure(masks.full(*shape)), ".png", 30).startswith(b"\x89PNG")


def test_a_float_dense_mask_cannot_come_this_far():
    with pytest.raises(TypeError, match="bool"):
        mask_svg(masks.from_dense(torch.zeros(2, 2)))
