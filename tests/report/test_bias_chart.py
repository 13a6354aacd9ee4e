"""Figures of a map: signed, blue positive, zero in the middle, names that can be read."""

import numpy as np
import pytest
import torch

from attnflow import report
from attnflow._core.errors import MissingExtra
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.report.svg import encode
from tests.bias.test_map import make


def image(figure):
    return figure.axes[0].images[0]


def test_all_layers_of_the_last_query():
    found = make(produced=("", "", "", "11"))
    figure = report.figure(found)
    axes = figure.axes[0]
    assert image(figure).get_cmap().name == "coolwarm_r"
    low, high = image(figure).get_clim()
    assert low == -high
    table = np.stack([found.layer(n).bias[0, 3] for n in (0, 2)])
    np.testing.assert_allclose(image(figure).get_array(), table)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["a", "b", "↵", "<d>"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "2"]
    assert "query <d> → 11" in axes.get_title()
    blue, red = (image(figure).to_rgba(np.array([v]))[0] for v in (high, low))
    assert blue[2] > blue[0]
    assert red[0] > red[2]


def test_one_layer_leaves_forbidden_pairs_out():
    found = make()
    figure = report.figure(found, layer=2)
    shown = image(figure).get_array()
    assert np.ma.getmaskarray(shown).tolist() == (~found.allowed(2)).tolist()
    assert figure.axes[0].get_ylabel() == "query"
    weights = report.figure(found, picture="weights", layer=2)
    assert image(weights).get_clim()[0] == 0.0
    row = report.figure(found, layer=2, query=1, head=None)
    assert image(row).get_array().shape == (1, 2)  # keys that this query cannot see are not there
    with pytest.raises(ValueError, match="layer must be one of"):
        report.figure(found, layer=1)


def test_three_ways():
    daa, alibi = make(seed=1), make(seed=2)
    figure = report.figure(alibi, daa, picture="compare", names=["ALiBi", "DAA"], layer=0)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == ["base model", "ALiBi", "DAA"]
    heights = [[patch.get_height() for patch in axes.patches] for axes in panels]
    expected = [alibi.layer(0).weights_base, alibi.layer(0).weights, daa.layer(0).weights]
    for bars, weights in zip(heights, expected, strict=True):
        np.testing.assert_allclose(bars, weights[0, 3].tolist(), rtol=1e-6)
    names = [axes.get_title(loc="left") for axes in report.figure(daa, picture="compare", layer=0).axes]
    assert names[:3] == ["base model", "same queries and keys, without it", "with the bias"]
    other = BiasMap("tiny", ("x", "b", "c", "d"), daa.queries, daa.layers)
    with pytest.raises(ValueError, match="'b' has other tokens than 'a'"):
        report.figure(daa, other, picture="compare", names=["a", "b"])
    with pytest.raises(ValueError, match="a name for each of 2 maps, got 1"):
        report.figure(daa, alibi, picture="compare", names=["a"])
    with pytest.raises(ValueError, match='compared by picture="compare"'):
        report.figure(daa, alibi)


def test_a_dominant_first_token_is_cut_and_says_its_weight():
    layer = make().layers[0]
    weights = torch.tensor([[[0.9, 0.05, 0.03, 0.02]]])
    one = LayerMap(0, "x", *(t[:, 3:] for t in (layer.bias, layer.raw, layer.allowed)), weights, weights, weights)
    found = BiasMap("tiny", make().tokens, (3,), (one,))
    figure = report.figure(found, picture="compare")
    assert figure.axes[0].patches[0].get_height() < 0.1
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.90"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_equal_figures_make_equal_files(suffix):
    files = [encode(report.figure(make()), f".{suffix}") for n in range(2)]
    assert files[0] == files[1]
    with pytest.raises(ValueError, match=r"ends in \.svg, \.png or \.pdf, got '\.txt'"):
        encode(report.figure(make()), ".txt")


def test_long_contexts_and_zero_maps():
    n, zero = 200, torch.zeros(1, 2, 200)
    allowed = torch.ones(1, 2, n, dtype=torch.bool)
    one = LayerMap(0, "x", zero, zero, allowed, zero + 1 / n, zero + 1 / n)
    found = BiasMap("tiny", tuple(map(str, range(n))), (198, 199), (one,))
    figure = report.figure(found)
    labels = [t.get_text() for t in figure.axes[0].get_xticklabels()]
    assert len(labels) < 30
    assert image(figure).get_clim() == (-1.0, 1.0)
    assert figure.get_size_inches()[0] <= 12


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'attnflow\[report\]'"):
        report.figure(make())


def test_dollar_signs_are_no_formulas():
    given = make()
    found = BiasMap("$m$", ("$", "$5^{", "a$b$", "\\$"), given.queries, given.layers, produced=("$", "$", "$", "$_$"))
    compared = report.figure(found, picture="compare", names=["$a$"])
    for figure in (report.figure(found), report.figure(found, layer=0), compared):
        encode(figure, ".svg")
    assert report.figure(found).axes[0].get_title().count(r"\$") == 3
