"""The terminal picture against the dense table."""

import io
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow.report.mask_picture import mask_text
from tests.strategies import dense_masks, permuted_masks

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
    assert repr(mask)[:40] in text
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
def test_it_fits_the_width(width, queries, keys, plain):
    text = mask_text(masks.full(queries, keys), width=width, ascii_only=plain)
    assert all(len(line) <= width for line in text.splitlines())
    assert len(text.splitlines()) <= 45
    assert not plain or text.isascii()


def test_the_terminal_decides_what_is_not_given(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert mask_text(masks.causal(4)).isascii()
    assert max(map(len, mask_text(masks.causal(400)).splitlines())) <= 30
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert "■" in mask_text(masks.causal(4))
    monkeypatch.setenv("COLUMNS", "300")
    assert max(map(len, mask_text(masks.causal(4000)).splitlines())) <= 100


def test_too_narrow_is_refused():
    with pytest.raises(ValueError, match="width must be at least 20, got 7"):
        mask_text(masks.causal(3), width=7)
