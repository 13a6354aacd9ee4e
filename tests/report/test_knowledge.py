"""The report on a trace: what it says, whole and safe, with and without direct effects."""

import re
from dataclasses import replace

import pytest
import torch

import attnflow as af
from attnflow._core.markup import token_label
from attnflow.report import figure, page
from attnflow.report.knowledge import entry_name
from attnflow.report.svg import encode
from tests.knowledge.test_layer_numbers import moe
from tests.knowledge.test_provenance import made
from tests.report.reading import parse_page, parse_svg, texts


def read(report):
    return parse_page(report.html)


def numbers_of(rows):
    cells = [re.findall(r'<td class="n">([^<]*)</td>', row) for row in rows]
    return [[cell for cell in column if cell != "–"] for column in zip(*cells, strict=True)]


def test_sections_and_what_they_say():
    found = made()
    report = page(found, details={"Store": "folder"})
    assert [section.name for section in report.sections] == ["prompt", "entries", "maps", "layers"]
    shown = read(report)
    strongest = found.fired(-1, count=1)[0]
    assert f"the largest effect, {strongest.name}, is {'for' if strongest.effect > 0 else 'against'}" in shown.text
    assert "folder" in shown.text
    assert 'Paris | is,↵"big"' in shown.text
    assert all(token_label(token) in report.sections[0].body.markup for token in found.tokens)
    assert report.sections[0].body.markup.count("token traced") == len(found.positions)
    rows = report.sections[1].body.markup.split("<tr>")[2:]
    assert len(rows) == len(found.fired(-1))
    decimals = [{len(cell.partition(".")[2]) for cell in column} for column in numbers_of(rows)]
    assert all(len(one) == 1 for one in decimals), decimals  # the numbers of a column stand under one another
    bars = parse_svg("<svg" + report.html.split("<svg")[1].split("</svg>")[0] + "</svg>")
    assert {entry_name(one) for one in found.fired(-1)} <= set(texts(bars))
    numbers = report.sections[3].body.markup
    assert "is the sum of entries" in numbers
    effect = float(found.layer(2).direct_effect[-1])
    assert any(abs(float(cell.replace("−", "-")) - effect) < 0.02 for cell in re.findall(r"[+−]\d+\.\d+", numbers))
    assert report.html.count("<script") == 1


def test_without_effects_it_says_why():
    report = page(made(effects=False))
    text = read(report).text
    assert "Direct effects on the logits are not defined: norms lie between" in text
    assert "the sum of" not in text
    assert [section.name for section in report.sections] == ["prompt", "entries", "maps", "layers"]


def test_nothing_fired_for_the_last_token():
    found = made()
    for one in found:
        one.ids[-1] = -1
    assert "No entry fired for the last token" in read(page(found)).text


@pytest.mark.parametrize("effects", [True, False])
def test_figure_shows_layers_tokens_and_entries(effects):
    found = made(effects)
    drawn = figure(found, count=5, title="the $title")
    shares, written, bars = drawn.axes[:3]
    assert shares.images[0].get_array().shape == (2, 3)
    expected = [one.active / 20 for one in found]
    assert torch.allclose(torch.tensor(shares.images[0].get_array()), torch.stack(expected).double())
    table = [one.direct_effect if effects else one.output_norm for one in found]
    assert torch.equal(torch.tensor(written.images[0].get_array()), torch.stack(table).double())
    strongest = found.fired(-1, count=5)
    if effects:  # those for the answer come first
        strongest = [*(one for one in strongest if one.effect > 0), *(one for one in strongest if one.effect <= 0)]
    sizes = [one.effect if effects else one.norm for one in strongest]
    assert [patch.get_width() for patch in bars.patches] == pytest.approx(sizes)
    assert [text.get_text() for text in bars.get_yticklabels()] == [one.name for one in strongest]
    for axes in (shares, written):
        assert axes.get_ylim()[0] < axes.get_ylim()[1]  # layers go up
        assert axes.get_xlabel() == ("token → answer" if effects else "token")
        assert axes.get_ylabel() == "layer"
    assert bars.get_ylabel() == "layer · entry"
    assert ("logits" in bars.get_xlabel()) == effects
    for suffix in (".png", ".svg"):
        assert len(encode(drawn, suffix)) > 5000
    with pytest.raises(ValueError, match=r"position must be one of the traced \[0, 1, 3\]"):
        figure(found, position=2)


def test_outliers_do_not_hide_the_rest_of_a_map_and_it_says_so():
    found = made()
    layers = [replace(one, direct_effect=torch.full((3,), 0.1)) for one in found]
    plain = figure(replace(found, layers=tuple(layers)), picture="layers").axes[1]
    assert "clipped" not in plain.get_title()
    layers[0].direct_effect[1] = 50.0
    axes = figure(replace(found, layers=tuple(layers)), picture="layers").axes[1]
    limit = axes.images[0].get_clim()[1]
    assert limit == pytest.approx(float(torch.tensor([0.1] * 5 + [50.0]).double().quantile(0.99)))
    assert limit < 50
    assert "clipped at the 99th percentile\n(largest: 50)" in axes.get_title()


def test_both_effects_stand_side_by_side_with_the_probability():
    found = made()
    last = found.layers[1]
    for name in ("ablated_effects", "probability_effects"):
        last = replace(last, **{name: torch.full((3, 4), torch.nan)})
    last.ablated_effects[2, 0], last.probability_effects[2, 0] = -0.125, 0.0625
    shown = replace(found, layers=(found.layers[0], last), probabilities=torch.tensor([0.1, 0.2, 0.75]))
    bars = figure(shown, picture="entries").axes[0]
    assert bars.patches[-1].get_width() == -0.125
    assert "p = 75\xa0%" in bars.get_title()
    assert bars.get_legend().get_texts()[0].get_text() == "effect"
    body = page(shown).sections[1].body.markup
    assert all(word in body for word in ("Effect", "Direct effect", "Ablated", "Probability lost", "−0.125", "+0.0625"))
    assert "Ablated" not in page(found).sections[1].body.markup
    assert "probability 75\xa0%" in page(shown).html


def test_thresholds_are_left_out_where_all_are_zero():
    found = made()
    assert "Threshold" in page(found).html
    assert "threshold" in found.table()
    bare = replace(found, layers=tuple(replace(one, thresholds=one.thresholds * 0) for one in found))
    assert "Threshold" not in page(bare).html
    assert "threshold" not in bare.table()


def test_modules_of_one_layer_have_names_of_their_own():
    found = af.knowledge.trace(af.knowledge.from_ffn(moe()), [3, 4, 5, 6])
    labels = ["0 experts", "0 shared_expert", "1 experts", "1 shared_expert"]
    shown = page(found)
    rows = shown.sections[-1].body.markup.split("<tr>")[2:]
    assert [re.sub("<.*?>", "", row.split("</t", 1)[0]) for row in rows] == labels
    for axes in figure(found, picture="layers").axes[:2]:
        assert [label.get_text() for label in axes.get_yticklabels()] == labels
