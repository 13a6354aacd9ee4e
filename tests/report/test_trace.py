"""The report on a trace: what it says, whole and safe, with and without direct effects."""

from dataclasses import replace

import pytest
import torch

from attnflow.report import TRACE_SECTIONS, figure, save_figure, trace_report
from tests.knowledge.test_provenance import made
from tests.report.reading import Page, parse_svg


def read(report):
    page = Page()
    page.feed(report.html)
    assert page.open == []
    return page


def test_sections_and_what_they_say():
    found = made()
    report = trace_report(found, details={"Store": "folder"})
    assert [section.name for section in report.sections] == ["entries", "maps", "layers"]
    page = read(report)
    strongest = found.fired(-1, count=1)[0]
    assert (
        f"{strongest.entry} of layer {strongest.layer}, {'raises' if strongest.effect > 0 else 'lowers'}" in page.text
    )
    assert "folder" in page.text
    assert 'Paris | is,↵"big"' in page.text
    rows = report.sections[0].body.markup.split("<tr>")[2:]
    assert len(rows) == len(found.fired(-1))
    bars = parse_svg("<svg" + report.html.split("<svg")[1].split("</svg>")[0] + "</svg>")
    assert len(bars.findall(".//{*}rect")) == len(found.fired(-1))
    numbers = report.sections[2].body.markup
    assert "is the sum of entries" in numbers
    assert f"{float(found.layer(2).effect[-1]):+.3g}".replace("-", "−") in numbers
    assert report.html.count("<script") == 1


def test_without_effects_it_says_why():
    report = trace_report(made(effects=False))
    text = read(report).text
    assert "Direct effects on the logits are not defined: norms lie between" in text
    assert "the sum of" not in text
    assert len(report.sections) == len(TRACE_SECTIONS)


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "\x00\u202e", '"><img src=x>'])
def test_texts_and_tokens_stay_text(hostile):
    found = made()
    entry = found.fired(-1, count=1)[0].entry
    report = trace_report(replace(found, tokens=(hostile,) * 4, texts={entry: hostile}, model=hostile))
    read(report)
    assert report.html.count("<script") == 1
    assert "<img src=x" not in report.html


def test_nothing_fired_for_the_last_token():
    found = made()
    for one in found:
        one.ids[-1] = -1
    assert "No entry fired for the last token" in read(trace_report(found)).text


@pytest.mark.parametrize("effects", [True, False])
def test_figure_shows_layers_tokens_and_entries(effects, tmp_path):
    pytest.importorskip("matplotlib")
    found = made(effects)
    drawn = figure(found, count=5, title="the $title")
    shares, written, bars = drawn.axes[:3]
    assert shares.images[0].get_array().shape == (2, 3)
    expected = [one.active / 20 for one in found]
    assert torch.allclose(torch.tensor(shares.images[0].get_array()), torch.stack(expected).double())
    table = [one.effect if effects else one.output_norm for one in found]
    assert torch.equal(torch.tensor(written.images[0].get_array()), torch.stack(table).double())
    strongest = found.fired(-1, count=5)
    sizes = [one.effect if effects else one.norm for one in strongest]
    assert [patch.get_width() for patch in bars.patches] == pytest.approx(sizes)
    assert [text.get_text() for text in bars.get_yticklabels()] == [f"{one.layer} · {one.entry}" for one in strongest]
    for suffix in ("png", "svg"):
        assert save_figure(drawn, tmp_path / f"trace.{suffix}").stat().st_size > 5000
    with pytest.raises(ValueError, match=r"position must be one of the traced \[0, 1, 3\]"):
        figure(found, position=2)
