"""Figures of scores: what they show, and what they refuse."""

import math
import sys

import numpy as np
import pytest

from attnflow import MissingExtra, report
from attnflow.geometry import published_scores
from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.report import score_figures as figures


def scores(model="one", layers=3, heads=2, kinds=("self",), **reading):
    rows = [
        MatrixScores(layer, head, kind, 0.1 * layer if kind == "self" else math.nan, -0.2, 1.0, 0, 1)
        for layer in range(layers)
        for kind in kinds
        for head in ("all", *range(heads))
    ]
    return GeometryScores(model, tuple(rows), **reading)


def labels(figure):
    return [
        text.get_text() for axes in figure.axes for legend in [axes.get_legend()] if legend for text in legend.texts
    ]


def test_plane_has_a_mark_with_whiskers_for_each_model_and_the_published_ones_behind(tmp_path):
    figure = report.figure(scores(), scores("two"), picture="plane")
    (axes,) = figure.axes
    assert labels(figure) == [f"published ({len(figures.background())} records)", "one", "two"]
    mark = next(c for c in axes.containers if c.get_label() == "one")
    assert (mark.lines[0].get_xdata()[0], mark.lines[0].get_ydata()[0]) == pytest.approx((0.1, -0.2))
    horizontal = mark.lines[2][0].get_segments()[0]
    assert horizontal[:, 0] == pytest.approx([0.05, 0.15])
    assert "symmetry" in axes.get_xlabel()
    assert "excess, gamma 2" in axes.get_ylabel()
    figure.savefig(tmp_path / "plane.svg")
    assert (tmp_path / "plane.svg").stat().st_size > 5000


def test_the_background_leaves_out_what_is_wrong_or_not_comparable():
    assert 0 < len(figures.background()) < len(published_scores())
    assert all(not record.fault for record in figures.background())
    figure = report.figure(scores(mode="norm"), picture="plane")
    assert labels(figure) == ["one"]


def test_attention_without_symmetry_is_not_in_the_plane_but_among_the_layers():
    both = scores(kinds=("self", "cross"))
    assert labels(report.figure(both, picture="plane"))[1:] == ["one: self"]
    assert labels(report.figure(both, picture="layers")) == ["one: self", "one: cross"]


def test_layers_have_a_line_for_each_model():
    figure = figures.layers([scores(), scores("two", layers=5)], title="both")
    symmetry, directionality = figure.axes
    assert [list(line.get_xdata()) for line in symmetry.lines[1:]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert list(symmetry.lines[1].get_ydata()) == pytest.approx([0.0, 0.1, 0.2])
    assert list(directionality.lines[1].get_ydata()) == [-0.2] * 3


def test_heads_are_maps_of_heads_by_layers():
    figure = report.figure(scores(layers=4, heads=3, kinds=("self", "cross")), picture="heads")
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert [m.shape for m in maps] == [(3, 4)] * 4
    assert maps[0][1].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert maps[2].mask.all()  # no symmetry, and no colour that would look like one


def test_layers_with_fewer_heads_leave_a_gap():
    rows = [MatrixScores(0, 0, "self", 0.5, 0.1, 1.0, 0, 0), MatrixScores(2, 1, "self", -0.5, 0.2, 1.0, 0, 0)]
    grid = figures.head_grid(rows, "symmetry")
    assert np.array_equal(grid, [[0.5, math.nan, math.nan], [math.nan, math.nan, -0.5]], equal_nan=True)


def test_models_that_were_read_in_different_ways_are_not_mixed():
    with pytest.raises(ValueError, match="excess, gamma 2 and norm, gamma 2; score them alike"):
        report.figure(scores(), scores(mode="norm"), picture="plane")
    with pytest.raises(ValueError, match="got no models"):
        figures.layers([])


def test_what_a_figure_cannot_show_is_named():
    with pytest.raises(ValueError, match="per_head=True"):
        report.figure(scores(heads=0), picture="heads")
    with pytest.raises(ValueError, match="one model"):
        report.figure(scores(), scores("two"), picture="heads")
    draw = getattr(figures.score_figure, "__wrapped__", figures.score_figure)
    with pytest.raises(ValueError, match="got 'pie'"):
        draw(scores(), picture="pie")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"attnflow\[report\]"):
        report.figure(scores())
