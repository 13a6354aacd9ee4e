"""The report on the geometry of models: complete, well-formed, escaped, and small whatever the number of heads."""

import math
import re

import pytest

from attnflow.geometry.score import Survey
from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.report import page
from attnflow.report.geometry import background
from tests.report.reading import parse_page, parse_svg, texts

HOSTILE = '<script>alert(1)</script> & "quotes" \x00'


def scores(model="org/model", layers=4, heads=3, parts=(("", "self"),), notes=(), **reading):
    rows = [
        MatrixScores(
            layer,
            head,
            kind,
            math.nan if kind == "cross" else 0.01 * layer,
            -0.02 * layer,
            1.0,
            0,
            1,
            tower,
            flags=("zero",) if (layer, head) == (1, 0) else (),
        )
        for tower, kind in parts
        for layer in range(layers)
        for head in ("all", *range(heads))
    ]
    return GeometryScores(model, tuple(rows), notes=notes, **reading)


def svgs(report):
    return [parse_svg(text) for text in re.findall(r"<svg.*?</svg>", report.html, re.DOTALL)]


def test_one_model():
    report = page(scores(notes=("found by its shapes",)))
    shown = parse_page(report.html)
    assert [section.name for section in report.sections] == ["geometry", "layers", "heads"]
    assert "the median symmetry is 0.015 and the median directionality −0.030: the key’s side" in shown.text
    for words in ("4 layers", "12 heads", "0.007 to 0.022", "gamma 2 and mode excess", "1/sqrt(head_dim)"):
        assert words in shown.text
    assert "1 matrix flagged “zero”." in shown.text
    assert "Found by its shapes." in shown.text
    assert f"{len(background())} published records" in shown.text


def test_several_models_with_the_published_values_and_a_failure():
    parts = (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
    models = [scores("EleutherAI/pythia-70m", layers=6), scores("two", parts=parts)]
    report = page(Survey(tuple(models), {"three": "the file is truncated"}))
    text = parse_page(report.html).text
    assert report.title == "Geometry of 2 models"
    assert report.sections[0].name == "problems"
    assert "three could not be shown: the file is truncated" in text
    assert "published, 6 layers 0.008 0.007 to 0.010 0.215" in text
    assert "interleaved by head" in text
    assert "two: decoder, cross" in text
    assert "decoder, cross: 4 layers none" in text
    plane = svgs(report)[0]
    names = ["EleutherAI/pythia-70m", "two: encoder, self", "two: decoder, self"]  # cross has no place
    assert [text for text in texts(plane) if text.startswith(("EleutherAI", "two"))] == names
    marks = [node for node in plane.iter() if node.get("class", "").startswith("af-fill-s")]
    assert {node.get("class").split()[0] for node in marks} >= {"af-fill-s0", "af-fill-s1", "af-fill-s2"}


def test_layers_have_a_line_for_each_attention_and_a_table():
    report = page(scores(parts=(("decoder", "self"), ("decoder", "cross"))))
    (chart,) = svgs(report)[1:2]
    assert chart.find("title").text == "Scores by layer"
    lines = [node.get("class") for node in chart.iter("path") if "af-stroke-s" in node.get("class", "")]
    assert {"af-stroke-s0", "af-stroke-s1"} <= set(lines)
    assert "Numbers of org/model: decoder, cross" in parse_page(report.html).text


def test_heads_are_one_pixel_each():
    report = page(scores(layers=3, heads=2))
    heads = next(svg for svg in svgs(report) if svg.find("title").text.startswith("Scores of each head"))
    maps = [(node.get("width"), node.get("height")) for node in heads.iter("image")]
    assert maps.count(("2", "3")) == 2


def test_a_report_on_hundreds_of_layers_and_heads_stays_small():
    report = page(scores(layers=126, heads=128))
    assert len(report.html) < 2_000_000
    parse_page(report.html)


def test_without_heads_there_are_no_maps():
    assert [section.name for section in page(scores(heads=0)).sections] == ["geometry", "layers"]


def test_only_failures():
    report = page(problems={"one": "no such file"})
    assert [section.name for section in report.sections] == ["problems"]
    assert "one could not be shown: no such file" in parse_page(report.html).text


def test_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one result"):
        page()


def test_attention_without_symmetry_alone():
    shown = parse_page(page(scores(parts=(("decoder", "cross"),))).html)
    assert "No model has a full matrix of self-attention" in shown.text


def test_names_are_escaped():
    report = page(scores(HOSTILE, notes=(HOSTILE,)), problems={HOSTILE: HOSTILE})
    shown = parse_page(report.html)
    assert len(shown.of("script")) == 1
    assert "alert(1)" in shown.text
    assert not any(name.startswith("on") for _, attributes in shown.tags for name in attributes)


@pytest.mark.parametrize("mode", ["norm"])
def test_other_readings_have_no_published_background(mode):
    report = page(scores(mode=mode))
    assert "published" not in parse_page(report.html).text
    assert "mode norm" in parse_page(report.html).text
