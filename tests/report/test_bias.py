"""A bias as a page, as charts and as a graph: signed, blue positive, named, whole and safe."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from attnflow import report
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.report import figure, html, page
from attnflow.report.bias import STRONGEST
from attnflow.report.charts import NEGATIVE, POSITIVE
from attnflow.report.svg import encode
from tests.bias.test_map import BIAS, TRIANGLE, make, table
from tests.report.reading import parse_page, parse_svg, texts, with_class

N = 6


def found(scale=1.0, queries=range(N), causal=True, base=True, tokens=None):
    """A map of two layers; the bias of layer 4 draws every query to key 1."""
    torch.manual_seed(0)
    shape = torch.ones(N, N, dtype=torch.bool)
    allowed = (shape.tril() if causal else shape)[list(queries)][None]

    def layer(number, pull):
        raw = torch.randn(1, len(queries), N) * scale
        raw[..., 1] += pull * scale
        raw = raw.masked_fill(~allowed, 0.0)
        bias = (raw - raw.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)).masked_fill(~allowed, 0.0)
        score = torch.randn(1, len(queries), N)
        weights, without = (s.masked_fill(~allowed, -torch.inf).softmax(-1) for s in (score + bias, score))
        return LayerMap(number, f"l{number}", bias, raw, allowed, weights, without, without if base else None)

    names = tuple(tokens or ["The", " cat", " sat", " on", " the", " mat"])
    return BiasMap("tiny", names, tuple(queries), (layer(0, 0.0), layer(4, 5.0)), (), causal)


def test_sections_and_what_they_say():
    given = found()
    report = page(given, details={"Bias": "folder"})
    assert [section.name for section in report.sections] == ["bias", "maps", "weights", "graph"]
    shown = parse_page(report.html)
    assert "drawn most to cat (position 1)" in shown.text
    assert f"strongest in layer {4}" in shown.text
    assert "the graph is acyclic" in shown.text
    assert "folder" in shown.text
    rows = report.sections[0].body.markup.split("<tr>")[2:]
    assert len(rows) == 2
    strengths = html.numbers([given.layer(0).strength, given.layer(4).strength])
    assert strengths[1] in rows[1]
    assert strengths[0] in rows[0]
    assert report.html.count("<script") == 1
    assert "Content-Security-Policy" in report.html
    assert len(report.html.encode()) < 400_000


def test_a_bias_of_zero_says_so():
    report = page(found(scale=0.0))
    assert [section.name for section in report.sections] == ["bias"]
    assert "attends exactly as its base model does" in parse_page(report.html).text


def test_long_contexts_show_the_keys_that_matter():
    n, torch_n = 3000, torch.ones(1, 8, 3000)
    bias = 0.1 * torch.randn(1, 8, n)
    bias[..., 1234] = 9.0
    bias -= bias.mean(-1, keepdim=True)
    weights = bias.softmax(-1)
    one = LayerMap(0, "x", bias, bias, torch_n.bool(), weights, torch_n / n)
    long = BiasMap("tiny", tuple(f"w{i}" for i in range(n)), tuple(range(n - 8, n)), (one,), (), False)
    report = page(long)
    assert len(report.html.encode()) < 1_500_000
    assert "the 180 of 3\u202f000 with the largest values" in report.html
    assert "w1234 +" in report.sections[1].body.markup


def image(figure):
    return figure.axes[0].images[0]


def test_all_layers_of_the_last_query():
    found = make(produced=("", "", "", "11"))
    figure = report.figure(found)
    axes = figure.axes[0]
    assert image(figure).get_cmap().name == "attnflow"
    low, high = image(figure).get_clim()
    assert low == -high
    table = np.stack([found.layer(n).bias[0, 3] for n in (0, 2)])
    np.testing.assert_allclose(image(figure).get_array(), table)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["a", "b", "↵", "<d>"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "2"]
    assert "query <d> → 11" in axes.get_title()
    ends = image(figure).to_rgba(np.array([high, low]))
    assert [to_hex(end) for end in ends] == [POSITIVE, NEGATIVE]


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


def test_dollar_signs_are_no_formulas():
    given = make()
    found = BiasMap("$m$", ("$", "$5^{", "a$b$", "\\$"), given.queries, given.layers, produced=("$", "$", "$", "$_$"))
    compared = report.figure(found, picture="compare", names=["$a$"])
    for drawn in (report.figure(found), report.figure(found, layer=0), compared):
        encode(drawn, ".svg")
    assert report.figure(found).axes[0].get_title().count(r"\$") == 3


def test_svg_has_a_box_for_each_token_and_an_arrow_for_each_edge():
    graph = table(BIAS, TRIANGLE, tokens=["<5>", "+", " six "]).graph(top_k=2)
    root = parse_svg(figure(graph).markup)
    assert len(with_class(root, "af-node")) == 3
    assert len(with_class(root, "af-edge")) == 3
    assert {"<5>", "+", "six"} <= set(texts(root))
    heights = {node.find("title").text: float(node.find("rect").get("y")) for node in with_class(root, "af-node")}
    assert heights["'<5>', position 0"] > heights["'+', position 1"] > heights["' six ', position 2"]  # flows upwards
    assert {"2.00", "1.00", "0.50"} <= set(texts(root))  # each arrow carries its bias
    strongest = with_class(root, "af-edge")[-1]
    assert strongest.find("title").text == "<5> → +: +2.000"
    assert figure(graph) == figure(graph)


def test_large_graphs_show_their_strongest_edges():
    torch.manual_seed(0)
    n = 40
    triangle = torch.ones(1, n, n, dtype=torch.bool).tril()
    graph = table(torch.randn(n, n).tril().tolist(), triangle).graph(top_k=5)
    assert len(graph.edges) > 100
    assert len(with_class(parse_svg(figure(graph).markup), "af-edge")) == STRONGEST
    root = parse_svg(figure(graph, max_edges=30).markup)
    assert len(with_class(root, "af-edge")) == 30
    assert f"the 30 strongest of {len(graph.edges)} edges" in " ".join(" ".join(texts(root)).split())
