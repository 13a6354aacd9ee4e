"""Figures of scores: what they show, and what they refuse."""

import inspect
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnflow import MissingExtra, report
from attnflow.geometry import directionality, symmetry
from attnflow.geometry.published import published_scores
from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.report import geometry as charts


def scores(model="one", layers=3, heads=2, kinds=("self",), **reading):
    rows = [
        MatrixScores(layer, head, kind, 0.1 * layer if kind == "self" else math.nan, -0.2, 1.0, 0, 1)
        for layer in range(layers)
        for kind in kinds
        for head in ("all", *range(heads))
    ]
    return GeometryScores(model, tuple(rows), **reading)


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.texts]


def test_plane_has_a_mark_with_whiskers_for_each_model_and_the_published_ones_behind(tmp_path):
    figure = report.figure(scores(), scores("two"), picture="plane")
    (axes,) = figure.axes
    *published, one, two = labels(figure)
    assert (one, two) == ("one", "two")
    counts = [int(label.rpartition("(")[2].rstrip(")")) for label in published]
    assert sum(counts) == len(charts.background())
    assert [label.partition("(")[0] for label in published] == [
        "published, language ", "published, vision ", "published, audio "
    ]  # fmt: skip
    mark = next(c for c in axes.containers if c.get_label() == "one")
    assert (mark.lines[0].get_xdata()[0], mark.lines[0].get_ydata()[0]) == pytest.approx((0.1, -0.2))
    horizontal = mark.lines[2][0].get_segments()[0]
    assert horizontal[:, 0] == pytest.approx([0.05, 0.15])
    assert "symmetry" in axes.get_xlabel()
    assert "excess, gamma 2" in axes.get_ylabel()
    figure.savefig(tmp_path / "plane.svg")
    assert (tmp_path / "plane.svg").stat().st_size > 5000


def test_the_background_leaves_out_what_is_wrong_or_not_comparable():
    assert 0 < len(charts.background()) < len(published_scores())
    assert all(not record.fault for record in charts.background())
    figure = report.figure(scores(mode="norm"), picture="plane")
    assert labels(figure) == ["layers, by number", "one"]


def test_attention_without_symmetry_is_not_in_the_plane_but_among_the_layers():
    both = scores(kinds=("self", "cross"))
    assert labels(report.figure(both, picture="plane"))[3:] == ["layers, by number", "one: self"]
    assert labels(report.figure(both, picture="layers")) == ["one: self", "one: cross"]


def test_layers_have_a_line_for_each_model():
    figure = report.figure(scores(), scores("two", layers=5), picture="layers", title="both")
    symmetry, directionality = figure.axes
    assert [list(line.get_xdata()) for line in symmetry.lines[1:]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert list(symmetry.lines[1].get_ydata()) == pytest.approx([0.0, 0.1, 0.2])
    assert list(directionality.lines[1].get_ydata()) == [-0.2] * 3


def test_heads_are_maps_of_layers_by_heads():
    figure = report.figure(scores(layers=4, heads=3, kinds=("self", "cross")), picture="heads")
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert [m.shape for m in maps] == [(4, 3)] * 4
    assert maps[0][:, 1].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]  # layer 0 is at the top
    assert {axes.images[0].get_cmap().name for axes in figure.axes if axes.images} == {"coolwarm_r"}
    assert maps[2].mask.all()  # no symmetry, and no colour that would look like one


def test_layers_with_fewer_heads_leave_a_gap():
    rows = [MatrixScores(0, 0, "self", 0.5, 0.1, 1.0, 0, 0), MatrixScores(2, 1, "self", -0.5, 0.2, 1.0, 0, 0)]
    grid = charts.head_grid(rows, "symmetry")
    assert np.array_equal(grid, [[0.5, math.nan], [math.nan, math.nan], [math.nan, -0.5]], equal_nan=True)


def test_models_that_were_read_in_different_ways_are_not_mixed():
    with pytest.raises(ValueError, match="excess, gamma 2 and norm, gamma 2; score them alike"):
        report.figure(scores(), scores(mode="norm"), picture="plane")


def test_what_a_figure_cannot_show_is_named():
    with pytest.raises(ValueError, match="per_head=True"):
        report.figure(scores(heads=0), picture="heads")
    with pytest.raises(ValueError, match="one model"):
        report.figure(scores(), scores("two"), picture="heads")
    draw = inspect.unwrap(charts.score_chart)
    with pytest.raises(ValueError, match="got 'pie'"):
        draw(scores(), picture="pie")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"attnflow\[report\]"):
        report.figure(scores())


def band(axes):
    return next(patch for patch in axes.patches if patch.get_label().startswith("chance"))


@pytest.mark.parametrize(("mode", "spread"), [("excess", 4.7), ("norm", 3.2)])
def test_the_band_of_chance_is_drawn_where_the_width_is_known(mode, spread):
    rows = tuple(replace(row, width=256) for row in scores(mode=mode))
    figure = report.figure(replace(scores(mode=mode), matrices=rows))
    bounds = band(figure.axes[0]).get_window_extent().transformed(figure.axes[0].transData.inverted())
    assert (bounds.y0, bounds.y1) == pytest.approx((-2 * spread / 16, 2 * spread / 16))
    symmetry, directionality = report.figure(replace(scores(mode=mode), matrices=rows), picture="layers").axes
    assert band(symmetry).get_height() == pytest.approx(5.6 / 256)
    assert band(directionality).get_height() == pytest.approx(4 * spread / 16)
    assert not [label for label in labels(report.figure(scores(mode=mode))) if "chance" in label]


def test_chance_is_what_random_weights_do():
    torch.manual_seed(0)
    width, low, high = 128, -1.8 / 128, 3.8 / 128
    forms = torch.stack([torch.randn(32, width).T @ torch.randn(32, width) for _ in range(200)])
    inside = (symmetry(forms) > low) & (symmetry(forms) < high)
    assert inside.double().mean() > 0.9
    assert (directionality(forms).abs() < 2 * 4.7 / width**0.5).double().mean() > 0.9


def test_each_layer_of_a_single_model_is_numbered_and_coloured():
    figure = report.figure(scores(layers=4))
    assert {text.get_text() for text in figure.axes[0].texts} == {"0", "1", "2", "3"}
    dots = next(c for c in figure.axes[0].collections if c.get_label() == "layers, by number")
    assert dots.get_array().tolist() == [0, 1, 2, 3]
    assert figure.axes[0].get_title() == "one: symmetry and directionality"
