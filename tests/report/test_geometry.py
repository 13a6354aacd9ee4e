"""The geometry of models on a page and as charts: complete, well-formed, escaped."""

import inspect
import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from matplotlib.colors import to_rgb
from transformers import LlamaConfig, LlamaForCausalLM

from attnflow import report
from attnflow.geometry.score import GeometrySurvey, score
from attnflow.geometry.scores import full_scores
from attnflow.geometry.table import GeometryScores, MatrixScores, chance_bands
from attnflow.report import geometry as charts
from attnflow.report import page
from attnflow.report.geometry import background
from tests.report.reading import parse_page, parse_svg, texts

HOSTILE = '<script>alert(1)</script> & "quotes" \x00'


def scores(model="one", layers=4, heads=3, parts=(("", "self"),), notes=(), **reading):
    flags, rows = {(1, 0): ("zero",)}, []
    for (tower, kind), layer, head in product(parts, range(layers), ("all", *range(heads))):
        values = math.nan if kind == "cross" else 0.01 * layer, -0.02 * layer, 1.0, 0, 1
        rows.append(MatrixScores(layer, head, kind, *values, tower, flags=flags.get((layer, head), ())))
    return GeometryScores(model, tuple(rows), notes=notes, **reading)


def test_one_model():
    report = page(scores(notes=("found by its shapes",)))
    shown = parse_page(report.html)
    assert [section.name for section in report.sections] == ["geometry", "layers", "heads"]
    assert "Symmetry 0.015, directionality −0.030 (median of 4 layers)." in shown.text
    for words in ("4 layers", "12 heads", "0.007 to 0.022", "gamma 2 and mode excess", "1/sqrt(head_dim)"):
        assert words in shown.text
    assert "1 matrix flagged “zero”." in shown.text
    assert "Found by its shapes." in shown.text
    assert f"{len(background())} published records" in shown.text


def test_a_model_in_memory_is_not_called_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=17, **sizes)).save_pretrained("runs/step-10")
    for place in ("./runs/step-10/", str(tmp_path / "runs" / "step-10")):
        assert page(score(LlamaForCausalLM.from_pretrained(place))).title == "Geometry of step-10"


def test_several_models_with_the_published_values_and_a_failure():
    parts = (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
    models = [scores("EleutherAI/pythia-70m", layers=6), scores("two", parts=parts)]
    report = page(GeometrySurvey(tuple(models), {"three": "the file is truncated"}))
    text = parse_page(report.html).text
    assert report.title == "Geometry of 2 models"
    assert report.sections[0].name == "problems"
    assert "three could not be shown: the file is truncated" in text
    assert "published, 6 layers 0.008 0.007 to 0.010 0.215" in text
    assert "interleaved by head" in text
    assert "two: decoder, cross" in text
    assert "decoder, cross: 4 layers none" in text
    plane = parse_svg(re.search(r"<svg.*?</svg>", report.html, re.DOTALL).group())
    names = ["EleutherAI/pythia-70m", "two: encoder, self", "two: decoder, self"]  # cross has no place
    assert [text for text in texts(plane) if text.startswith(("EleutherAI", "two"))] == names
    marks = [node for node in plane.iter() if node.get("class", "").startswith("af-fill-s")]
    assert {node.get("class").split()[0] for node in marks} >= {"af-fill-s0", "af-fill-s1", "af-fill-s2"}


def test_names_are_escaped():
    report = page(scores(HOSTILE, notes=(HOSTILE,)), problems={HOSTILE: HOSTILE})
    shown = parse_page(report.html)
    assert len(shown.of("script")) == 1
    assert "alert(1)" in shown.text
    assert not any(name.startswith("on") for _, attributes in shown.tags for name in attributes)


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
    assert (mark.lines[0].get_xdata()[0], mark.lines[0].get_ydata()[0]) == pytest.approx((0.015, -0.03))
    horizontal = mark.lines[2][0].get_segments()[0]
    assert horizontal[:, 0] == pytest.approx([0.0075, 0.0225])
    assert "symmetry" in axes.get_xlabel()
    assert "excess, gamma 2" in axes.get_ylabel()
    figure.savefig(tmp_path / "plane.svg")
    assert (tmp_path / "plane.svg").stat().st_size > 5000


def test_layers_have_a_line_for_each_model():
    figure = report.figure(scores(), scores("two", layers=5), picture="layers", title="both")
    symmetry, directionality = figure.axes
    assert [list(line.get_xdata()) for line in symmetry.lines[1:]] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert list(symmetry.lines[1].get_ydata()) == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert list(directionality.lines[1].get_ydata()) == pytest.approx([0.0, -0.02, -0.04, -0.06])


def test_heads_are_maps_of_layers_by_heads():
    figure = report.figure(scores(parts=(("", "self"), ("", "cross"))), picture="heads")
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert [m.shape for m in maps] == [(4, 3)] * 4
    assert maps[0][:, 1].tolist() == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert figure.axes[0].get_ylim()[0] < figure.axes[0].get_ylim()[1]  # layers go up
    assert {axes.images[0].get_cmap().name for axes in figure.axes if axes.images} == {"attnflow"}
    assert maps[2].mask.all()  # no symmetry, and no colour that would look like one


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


def band(axes, index=0):
    return [patch for patch in axes.patches if patch.get_label().startswith("chance")][index]


def of_width(scores, width):
    return replace(scores, matrices=tuple(replace(row, width=width) for row in scores))


@pytest.mark.parametrize(("mode", "spread"), [("excess", 4.8), ("norm", 3.4)])
def test_the_band_of_chance_is_that_of_what_is_plotted(mode, spread):
    model = of_width(scores(mode=mode), 256)  # four layers, each with its place, and their median
    figure = report.figure(model)
    to_data = figure.axes[0].transData.inverted()
    layer, median = (band(figure.axes[0], index).get_window_extent().transformed(to_data) for index in (0, 1))
    assert (layer.y0, layer.y1) == pytest.approx((-2 * spread / 16, 2 * spread / 16))
    # The median of four normal numbers, the mean of the middle two, has 0.298 of their variance.
    assert (median.y0, median.y1) == pytest.approx(
        (-2 * spread / 16 * 0.298**0.5, 2 * spread / 16 * 0.298**0.5), rel=0.02
    )
    symmetry, directionality = report.figure(model, picture="layers").axes
    assert symmetry.patches[0].get_height() == pytest.approx(5.6 / 256)
    assert band(directionality).get_height() == pytest.approx(4 * spread / 16)
    assert not [label for label in labels(report.figure(scores(mode=mode))) if "chance" in label]


def test_each_model_of_a_plane_has_the_band_of_its_own_width_and_depth():
    models = [of_width(scores("deep", layers=16), 256), of_width(scores("narrow"), 64)]
    figure = report.figure(*models)
    names = ["chance, median of 16 layers of width 256", "chance, median of 4 layers of width 64"]
    assert [label for label in labels(figure) if "chance" in label] == names
    heights = [band(figure.axes[0], index).get_height() for index in (0, 1)]
    assert heights[1] / heights[0] == pytest.approx(2 * (0.298 / 0.0926) ** 0.5, rel=0.03)
    colours = [band(figure.axes[0], index).get_facecolor()[:3] for index in (0, 1)]
    marks = {mark.get_label(): mark.lines[0].get_color() for mark in figure.axes[0].containers}
    assert colours == [pytest.approx(to_rgb(marks[name])) for name in ("deep", "narrow")]
    many = [of_width(scores(f"model {width}"), width) for width in (32, 48, 64, 96, 128)]
    assert [label for label in labels(report.figure(*many)) if "chance" in label] == ["chance, in each model’s colour"]


def test_the_reading_and_the_table_judge_a_median_by_its_own_chance():
    """A directionality that one layer in four would have, but hardly a median of thirty."""
    rows = tuple(replace(row, directionality=-0.245, symmetry=0.094) for row in scores(layers=30, heads=0))
    text = parse_page(page(of_width(replace(scores(), matrices=rows), 576)).html).text
    assert (
        "Symmetry 0.094, directionality −0.245 (median of 30 layers). Random weights would hardly give either." in text
    )
    assert "The key’s side has more of the outstanding norms." in text
    assert "30 layers 0.094 0.094 to 0.094 0.001 to 0.003 −0.245 −0.245 to −0.245 −0.090 to 0.090" in text
    shallow = of_width(replace(scores(), matrices=rows[:3]), 384)
    assert "this directionality is within chance" in parse_page(page(shallow).html).text
    both = [replace(of_width(replace(scores(), matrices=rows), 576), model="deep"), replace(shallow, model="shallow")]
    assert "1 of 2 have a directionality beyond chance." in parse_page(page(*both).html).text


@pytest.mark.parametrize(
    ("width", "heads", "key_heads", "layers"), [(128, 4, 4, 1), (128, 4, 4, 6), (128, 4, 1, 7), (576, 9, 3, 30)]
)
def test_chance_is_what_random_weights_do(width, heads, key_heads, layers):
    """Also where query heads share keys, as in SmolLM2 (576, 9 and 3 heads, 30 layers), and for medians of layers."""
    torch.manual_seed(0)
    dim = width // heads
    drawn = [
        full_scores(torch.randn(heads * dim, width), torch.randn(key_heads * dim, width), heads, key_heads)
        for _ in range(300)
    ]
    for name in ("symmetry", "directionality"):
        values = torch.stack([getattr(one, name) for one in drawn]).double()
        medians = values[torch.randint(len(values), (4000, layers))].quantile(0.5, dim=1)
        low, high = chance_bands(width, "excess", layers)[name]
        inside = ((medians > low) & (medians < high)).double().mean()
        assert 0.92 < inside < 0.985, (name, inside)
        assert float(medians.std()) == pytest.approx((high - low) / 4, rel=0.15), name
