"""The report on the geometry of models: complete, well-formed, escaped, and small whatever the number of heads."""

import math
import re

import pytest

from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.report import geometry_report
from attnflow.report.score_figures import background
from tests.report.reading import parse_page, parse_svg, with_class

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
    report = geometry_report([scores(notes=("found by its shapes",))])
    page = parse_page(report.html)
    assert [section.name for section in report.sections] == ["geometry", "layers", "heads"]
    assert "the median symmetry is 0.015 and the median directionality −0.030: the key’s side" in page.text
    for words in ("4 layers", "12 heads", "0.007 to 0.022", "gamma 2 and mode excess", "1/sqrt(head_dim)"):
        assert words in page.text
    assert "1 matrix flagged “zero”." in page.text
    assert "Found by its shapes." in page.text
    assert f"{len(background())} published records" in page.text


def test_several_models_with_the_published_values_and_a_failure():
    parts = (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
    models = [scores("EleutherAI/pythia-70m", layers=6), scores("two", parts=parts)]
    report = geometry_report(models, unscored={"three": "the file is truncated"})
    text = parse_page(report.html).text
    assert report.title == "Geometry of 2 models"
    assert "three was not scored: the file is truncated" in text
    assert "published, 6 layers 0.008 0.007 to 0.010 0.215" in text
    assert "interleaved by head" in text
    assert "two: decoder, cross" in text
    assert "decoder, cross: 4 layers none" in text
    plane = next(svg for svg in svgs(report) if with_class(svg, "af-published"))
    assert len(with_class(plane, "af-published")) == len(background())
    marks = [node for node in plane.iter("g") if node.get("class", "").startswith("af-series")]
    assert [node.get("class") for node in marks] == ["af-series-0", "af-series-1", "af-series-2"]  # cross has no place


def test_layers_have_a_line_for_each_attention_and_a_table():
    report = geometry_report([scores(parts=(("decoder", "self"), ("decoder", "cross")))])
    charts = [svg for svg in svgs(report) if svg.find("title").text in ("symmetry by layer", "directionality by layer")]
    lines = [len([g for g in svg.iter("g") if g.get("class", "").startswith("af-series")]) for svg in charts]
    assert lines == [1, 1, 2, 2]  # no symmetry of cross-attention between different widths; wide and narrow drawings
    assert "Numbers of org/model: decoder, cross" in parse_page(report.html).text


def test_maps_of_heads_colour_by_sign_and_size():
    report = geometry_report([scores(layers=3, heads=2)])
    symmetry = next(svg for svg in svgs(report) if svg.find("title").text.startswith("symmetry of each head"))
    shades = {float(node.get("fill-opacity")): node.get("class") for node in symmetry.iter("path")}
    assert shades == {0.0: "af-negative", 0.5: "af-positive", 1.0: "af-positive"}
    directionality = next(svg for svg in svgs(report) if svg.find("title").text.startswith("directionality of"))
    assert {node.get("class") for node in directionality.iter("path")} == {"af-negative"}


def test_a_report_on_hundreds_of_layers_and_heads_stays_small():
    report = geometry_report([scores(layers=126, heads=128)])
    assert len(report.html) < 2_000_000
    parse_page(report.html)


def test_without_heads_there_are_no_maps():
    assert [section.name for section in geometry_report([scores(heads=0)]).sections] == ["geometry", "layers"]


def test_only_failures():
    report = geometry_report([], unscored={"one": "no such file"})
    assert [section.name for section in report.sections] == ["geometry"]
    assert "one was not scored: no such file" in parse_page(report.html).text


def test_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one model"):
        geometry_report([])


def test_attention_without_symmetry_alone():
    page = parse_page(geometry_report([scores(parts=(("decoder", "cross"),))]).html)
    assert "No model has a full matrix of self-attention" in page.text


def test_names_are_escaped():
    report = geometry_report([scores(HOSTILE, notes=(HOSTILE,))], unscored={HOSTILE: HOSTILE})
    page = parse_page(report.html)
    assert len(page.of("script")) == 1
    assert "alert(1)" in page.text
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


@pytest.mark.parametrize("mode", ["norm"])
def test_other_readings_have_no_published_background(mode):
    report = geometry_report([scores(mode=mode)])
    assert 'class="af-published"' not in report.html
    assert "mode norm" in parse_page(report.html).text
