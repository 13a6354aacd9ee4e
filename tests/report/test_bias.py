"""The report on a bias: what it says, whole and safe, on hostile tokens and on a bias of zero."""

from dataclasses import replace

import pytest
import torch

from attnflow import masks
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.order import analyze
from attnflow.report import html, page
from tests.report.reading import parse_page, parse_svg, texts

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


def read(report):
    return parse_page(report.html)


def svgs(html):
    return [parse_svg("<svg" + part.split("</svg>")[0] + "</svg>") for part in html.split("<svg")[1:]]


def test_sections_and_what_they_say():
    given = found()
    report = page(given, details={"Bias": "folder"})
    assert [section.name for section in report.sections] == ["bias", "maps", "weights", "graph"]
    shown = read(report)
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


def test_maps_name_layers_queries_and_tokens():
    last, *layers = svgs(page(found()).sections[1].body.markup)
    assert {"The", "cat", "mat", "0", "4", "layer", "key"} <= set(texts(last))
    assert len(layers) == 2
    assert "bias, row-centred: layer 4, mean over heads" in texts(layers[1])
    for svg in (last, *layers):
        (image,) = [node for node in svg.iter("image") if node.get("width") == str(N)]
        assert image.get("href").startswith("data:image/png;base64,")
        assert image.get("height") == str(2 if svg is last else N)  # a pixel for each pair


def test_the_extremes_are_listed_in_numbers():
    given = found()
    listed = page(given).sections[1].body.markup
    assert f"cat {float(given.layer(4).bias[0, 5, 1]):+.3f}" in listed


def test_weights_beside_each_other():
    (chart,) = svgs(page(found()).sections[2].body.markup)
    assert {"base model", "same queries and keys, without it", "with the bias"} <= set(texts(chart))
    (without,) = svgs(page(found(base=False)).sections[2].body.markup)
    assert "base model" not in texts(without)


def test_a_bias_of_zero_says_so():
    report = page(found(scale=0.0))
    assert [section.name for section in report.sections] == ["bias"]
    assert "attends exactly as its base model does" in read(report).text


def test_one_query_and_encoders():
    report = page(found(queries=[5]))
    assert "every query" not in read(report).text
    assert "explains everything" in read(report).text
    assert "may have cycles" in read(page(found(causal=False))).text


@pytest.mark.parametrize("token", ["</script><script>alert(1)</script>", "\u202e\x00", "&lt;", "字" * 40, ""])
def test_hostile_tokens(token):
    given = found(tokens=[token, "b", "c", "d", "e", token])
    report = page(given, title=token)
    shown = read(report)
    assert report.html.count("<script") == 1
    assert "\x00" not in report.html
    assert "\u202e" not in shown.text
    for svg in svgs(report.html):
        assert svg.tag == "svg"


def test_titles():
    assert page(found(), title="Mine").title == "Mine"
    assert page(replace(found(), model="m")).title == "Attention bias of m"


def test_an_order_and_a_bias_on_one_page():
    report = page(analyze(masks.causal(N)), found())
    names = [section.name for section in report.sections]
    assert names[-4:] == ["bias", "maps", "weights", "graph"]
    assert "order" in names
    assert "drawn most to cat" in read(report).text


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
