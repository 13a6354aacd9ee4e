"""The picture and the page of one entry, and of a model without it."""

import re
from dataclasses import replace

import pytest
import torch

import attnflow as af
from attnflow.report import figure, page
from tests.models import tiny
from tests.report.reading import parse_page

TEXTS = [[5, 6, 7, 8], [11, 12], [3, 4]]


def entry_report(name="Llama", **options):
    torch.manual_seed(0)
    return af.knowledge.entry(af.knowledge.from_ffn(tiny(name, torch.float32)), 7, texts=TEXTS, count=3, **options)


def test_the_chart_shows_tokens_near_entries_and_texts():
    found = entry_report()
    pushes, by_value, by_key, cells = figure(found).axes[:4]
    strengths = [one.strength for one in (*found.raised, *reversed(found.lowered))]
    assert [bar.get_width() for bar in pushes.patches] == pytest.approx(strengths)
    assert {text.get_text() for text in pushes.texts} == {one.token for one in (*found.raised, *found.lowered)}
    for axes, near in ((by_value, found.near_by_value), (by_key, found.near_by_key)):
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([one.cosine for one in near])
        assert [label.get_text() for label in axes.get_yticklabels()] == [one.name for one in near]
    table = cells.images[0].get_array()
    middle = table.shape[1] // 2
    assert table[:, middle].tolist() == pytest.approx([one.weight for one in found.examples])
    assert cells.texts[0].get_text() == found.examples[0].tokens[0]
    assert all(axes.get_xlabel() or axes is not pushes for axes in (pushes, by_key))
    assert len(figure(replace(found, examples=())).axes) == 3


def test_the_page_says_what_the_chart_shows():
    found = entry_report()
    shown = page(found)
    assert [section.name for section in shown.sections] == ["entry", "texts", "near"]
    text = parse_page(shown.html).text
    for one in (*found.near_by_value, *found.near_by_key):
        assert one.name in text
    rows = re.findall(r"token traced", shown.sections[1].body.markup)
    assert len(rows) == len(found.examples) == 3
    bare = entry_report("Bert")
    assert "its tokens are unknown" in str(bare)
    assert f"Its tokens are unknown: {bare.without}" in parse_page(page(bare).html).text


def test_a_removal_has_two_bars_for_each_token():
    removal = entry_report(ablate=[5, 6, 7]).removal
    axes = figure(removal).axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    chances = removal.chances
    assert widths == pytest.approx([one.before for one in chances] + [one.after for one in chances])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["with the entry", "without it"]
