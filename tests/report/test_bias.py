"""The report on a bias: what it says, whole and safe, on hostile tokens and on a bias of zero."""

from dataclasses import replace

import pytest
import torch

from attnflow import masks
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.report import BIAS_SECTIONS, bias_report, model_report
from tests.report.reading import Page, parse_svg, texts, with_class

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
    page = Page()
    page.feed(report.html)
    assert page.open == []
    return page


def svgs(html):
    return [parse_svg("<svg" + part.split("</svg>")[0] + "</svg>") for part in html.split("<svg")[1:]]


def test_sections_and_what_they_say():
    given = found()
    report = bias_report(given, details={"Bias": "folder"})
    assert [section.name for section in report.sections] == ["bias", "maps", "weights", "graph"]
    page = read(report)
    assert "drawn most to cat (position 1)" in page.text
    assert f"strongest in layer {4}" in page.text
    assert "the graph is acyclic" in page.text
    assert "folder" in page.text
    rows = report.sections[0].body.markup.split("<tr>")[2:]
    assert len(rows) == 2
    assert f"{given.layer(4).strength:#.3g}" in rows[1]
    assert report.html.count("<script") == 1
    assert "Content-Security-Policy" in report.html
    assert len(report.html.encode()) < 400_000


def test_the_map_has_a_cell_for_each_allowed_pair():
    given = found()
    last, *layers = svgs(bias_report(given).sections[1].body.markup)
    titles = [n.text for n in last.iter("title")][1:]
    assert len(titles) == 2 * N
    assert f"4 ← cat: {float(given.layer(4).bias[0, 5, 1]):+.3f}" in titles
    assert len(layers) == 2
    whole = [n.text for n in layers[1].iter("title")][1:]
    assert len(whole) == N * (N + 1) // 2
    assert with_class(last, "af-attract")
    assert with_class(last, "af-repel")
    assert {"The", "cat", "mat"} <= set(texts(last))


def test_weights_beside_each_other():
    given = found()
    (chart,) = svgs(bias_report(given).sections[2].body.markup)
    assert {"base model", "same queries and keys, without it", "with the bias"} <= set(texts(chart))
    titles = [n.text for n in chart.iter("title")]
    assert (
        f"cat: weight {float(given.layer(4).weights[0, 5, 1]):.3f}, bias {float(given.layer(4).bias[0, 5, 1]):+.3f}"
        in titles
    )
    (without,) = svgs(bias_report(found(base=False)).sections[2].body.markup)
    assert "base model" not in texts(without)


def test_a_bias_of_zero_says_so():
    report = bias_report(found(scale=0.0))
    assert [section.name for section in report.sections] == ["bias"]
    assert "attends exactly as its base model does" in read(report).text


def test_one_query_and_encoders():
    report = bias_report(found(queries=[5]))
    assert "every query" not in read(report).text
    assert "explains everything" in read(report).text
    assert "may have cycles" in read(bias_report(found(causal=False))).text


@pytest.mark.parametrize("token", ["</script><script>alert(1)</script>", "\u202e\x00", "&lt;", "字" * 40, ""])
def test_hostile_tokens(token):
    given = found(tokens=[token, "b", "c", "d", "e", token])
    report = bias_report(given, title=token)
    page = read(report)
    assert report.html.count("<script") == 1
    assert "\x00" not in report.html
    assert "\u202e" not in page.text
    for svg in svgs(report.html):
        assert svg.tag == "svg"


def test_chosen_sections_and_titles():
    report = bias_report(found(), title="Mine", sections=BIAS_SECTIONS[:1])
    assert report.title == "Mine"
    assert [section.name for section in report.sections] == ["bias"]
    assert bias_report(replace(found(), model="m")).title == "Attention bias of m"


def test_a_section_of_the_report_on_a_model():
    report = model_report("tiny", None, flow=masks.causal(N), bias=found())
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
    report = bias_report(long)
    assert len(report.html.encode()) < 1_500_000
    assert "Shown are the 180 of 3\u202f000 keys with the largest bias" in report.html
    assert "with the largest weights" in report.html
    drawn = svgs(report.sections[1].body.markup)[0]
    assert any(node.text.startswith("0 ← w1234: +") for node in drawn.iter("title"))
