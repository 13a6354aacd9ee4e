"""The picture of one answer: every line and mark has a name, widths are amounts, and long texts are folded."""

import re
from dataclasses import replace

import pytest
import torch

import attnflow as af
from attnflow.explain.explanation import Explanation, SourceGraph
from attnflow.report.explain_picture import entry_words
from tests.models import tiny
from tests.report.reading import parse_page, parse_svg, texts, with_class
from tests.results_samples import sample

FOR, AGAINST = "#0072b2", "#c85200"


def drawn(result, **options):
    return parse_svg(af.report.figure(result, **options).markup)


def lines(picture):
    return [node for node in picture.iter("path") if node.get("d", "").startswith("M")]


def of_length(tokens, layers=2, heads=4):
    """An explanation of a size, of which only places and amounts are made up."""
    found = sample(Explanation)
    spread = [
        replace(edge, layer=i % layers, head=i % heads, query=tokens - 1 - i % 3, key=(7 * i) % (tokens - 3))
        for i, edge in enumerate(found.edges * 10)
    ]
    sizes = {
        "arrived": torch.linspace(0, 1, layers + 1)[:, None].expand(-1, tokens),
        "heads": torch.ones(layers, heads),
    }
    return replace(
        found, texts=tuple(f" w{i}" for i in range(tokens)), position=tokens - 1, edges=tuple(spread), **sizes,
        reach=(1,) * (tokens - 1) + (0,),
    )  # fmt: skip


def test_every_line_is_as_wide_as_what_it_carries_and_says_its_name():
    result = sample(Explanation)
    found = lines(drawn(result))
    assert len(found) == len(result.edges)
    by_name = {line.findtext("title"): line for line in found}
    widest = max(float(line.get("stroke-width")) for line in found)
    strongest = max(abs(item.carried) for item in (*result.edges, *result.entries[:5]))
    for edge in result.edges:
        start = f"{edge.name} carries "
        line = next(
            line for name, line in by_name.items()
            if name.startswith(start) and f"({edge.key}) to" in name and f"({edge.query}) at" in name
        )  # fmt: skip
        assert line.get("stroke") == (FOR if edge.carried >= 0 else AGAINST)
        assert float(line.get("stroke-width")) == pytest.approx(max(0.8, 9 * abs(edge.carried) / strongest), abs=0.05)
    assert widest <= 9


def test_entries_are_marks_with_what_they_promote():
    result = sample(Explanation)
    names = [node.findtext("title") for node in drawn(result).iter("circle")]
    assert entry_words(result, result.entries[0]) in names
    assert "promotes" in entry_words(replace(result), replace(result.entries[0], promotes=(" a",)))
    assert "“my note”" in entry_words(result, replace(result.entries[0], text="my note"))


def test_what_was_measured_and_what_a_bias_added_is_said():
    result = sample(Explanation)
    edge = replace(result.edges[0], removed=0.5, bias=-0.25)
    said = " ".join(filter(None, (line.findtext("title") for line in lines(drawn(replace(result, edges=(edge,)))))))
    assert "removed +0.5" in said
    assert "an attached bias adds −0.25 to the score" in said
    page = parse_page(af.report.page(replace(result, edges=(edge,))).html)
    assert "removed weight bias" in page.text


@pytest.mark.parametrize(("tokens", "layers", "heads"), [(14, 30, 9), (200, 30, 9), (64, 80, 64)])
@pytest.mark.parametrize("width", [980, 358])
def test_no_size_is_too_large_for_a_screen(tokens, layers, heads, width):
    result = of_length(tokens, layers, heads)
    picture = drawn(result, width=width)
    assert float(picture.get("width")) == width + 28
    assert float(picture.get("height")) < 900
    places = [float(x) for line in lines(picture) for x in re.findall(r"(-?[\d.]+) -?[\d.]+", line.get("d"))]
    assert 0 <= min(places) <= max(places) <= width  # and a margin at either side
    written = [node for node in picture.iter("text") if "w" in "".join(node.itertext())]
    assert any(f"w{tokens - 1}" in text for text in texts(picture))
    folded = next((text for text in texts(picture) if "folded" in text), None)
    assert (folded is None) == (tokens == 14)
    assert len(written) < 60


def test_a_page_is_small_and_opens_with_the_answer_and_the_four_questions():
    page = af.report.page(of_length(64, 30, 9))
    assert len(page.html) < 500_000
    assert page.ok
    text = parse_page(page.html).text
    assert [section.name for section in page.sections] == ["flow", "edges", "sources"]
    asked = ["Who may send?", "How strongly?", "In which geometry?", "From which store?"]
    assert sorted(map(text.index, asked)) == list(map(text.index, asked))
    assert page.html.count("<svg") == 2  # for a screen, and for a telephone


def test_the_table_of_sources_adds_up():
    result = sample(Explanation)
    text = parse_page(af.report.page(result).html).text.replace("−", "-")
    amounts = re.search(r"all carried (.*?) The sum agrees", text).group(1)
    *parts, whole = map(float, re.findall(r"[-+][\d.]+", amounts))
    assert sum(parts) == pytest.approx(whole, abs=0.01)
    assert whole == pytest.approx(result.value, abs=0.01)


def test_a_leak_is_drawn_and_opens_the_page():
    result = sample(Explanation)
    leaking = replace(result, leaks=(replace(result.edges[0], query=0, key=2),))
    assert [node.get("stroke-dasharray") for node in with_class(drawn(leaking), "af-hot")] == ["4 3"]
    page = af.report.page(leaking)
    assert not page.ok
    assert "1 pair that the declared order forbids" in parse_page(page.html).text


def test_an_encoder_stands_before_its_decoder():
    result = af.explain.answer(
        tiny("T5", torch.float32),
        {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[1, 8]])},
        answer=3,
        against=4,
    )
    names = [line.findtext("title") for line in lines(drawn(result, lines=400))]
    assert any(name.startswith("cross L") for name in names)
    assert any(name.startswith("encoder L") for name in names)
    assert parse_page(af.report.page(result).html)


def test_a_class_has_no_position():
    result = replace(sample(Explanation), position=None)
    assert "gain by layer" in texts(drawn(result))


def test_a_graph_links_its_sources():
    picture = drawn(sample(SourceGraph))
    (link,) = lines(picture)
    assert link.findtext("title") == "token gave L1N7 +0.3"
    assert {"a", "L1N7"} <= set(texts(picture))


@pytest.mark.parametrize("options", [{"width": 10}, {"lines": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        af.report.figure(sample(Explanation), **options)
