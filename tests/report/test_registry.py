"""Every kind of result shows itself: as a picture, on a page, in a notebook, in a file."""

import re
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from attnflow import audit, bias, explain, geometry, knowledge, masks, report, tasks
from attnflow._core.handles import Handle
from attnflow._core.results import Result
from attnflow.bias.map import LayerQuery, QueryBias
from attnflow.explain.explanation import Explanation
from attnflow.knowledge.reading.results import ActivityReport, LayerActivity
from attnflow.models.passes.recording import ComponentName
from attnflow.order import analyze
from attnflow.report import registry, svg
from attnflow.report.svg import Svg
from attnflow.tasks import Label, Task, Token, check
from tests.bias.test_map import make as bias_map
from tests.knowledge.test_attach import modular, store_of
from tests.knowledge.test_edit import FRANCE, TEXT, WORDS, converted
from tests.knowledge.test_provenance import made as trace
from tests.models import tiny
from tests.models.saved import word_tokenizer
from tests.report.reading import parse_page, parse_svg, texts
from tests.report.test_attribution import made as attribution
from tests.report.test_bias import found as bias_page_map
from tests.report.test_entry import entry_report
from tests.report.test_geometry import scores
from tests.report.test_page import audit_report, bad_audit, clean_task, leaking_task
from tests.results_samples import sample
from tests.test_results import kinds


def batch():
    return torch.arange(3, 19).reshape(2, 8)


def monitored():
    model = tiny("Llama", torch.float32)
    with geometry.monitor(model, every=2) as handle:
        for _ in range(4):
            with torch.no_grad():
                next(model.parameters()).mul_(0.9)
            handle.step()
    return handle


def guarded():
    model = tiny("Llama", torch.float32)
    with audit.guard(model) as handle:
        model(batch())
    return handle


def edited():
    tokenizer = word_tokenizer(["[PAD]", "[UNK]", *WORDS], pad_token="[PAD]")
    return knowledge.edit(converted(), [FRANCE], text=TEXT, tokenizer=tokenizer, layers=[1])


def attached():
    model = modular()
    return knowledge.attach(model, store_of(model), write=True)


HANDLES = {
    "Guard": guarded,
    "MaskHandle": lambda: masks.attach(tiny("Llama"), per_layer=[masks.causal(8), masks.full(8)]),
    "BiasHandle": lambda: bias.attach(tiny("Llama", torch.float32)),
    "Monitor": monitored,
    "AnswerReading": lambda: explain.reading(tiny("Llama", torch.float32), [5, 6, 7]),
    "AttentionReading": lambda: geometry.reading(tiny("Llama", torch.float32), [5, 6, 7]),
    "SharedPrefixes": lambda: tasks.share_prefixes(tiny("Llama", torch.float32)),
    "Edited": edited,
    "Attached": attached,
    "AttachedFeatures": lambda: knowledge.attach_features(
        tiny("Llama"), {1: {"W_enc": torch.ones(32, 40), "W_dec": torch.ones(40, 32)}}
    ),
    "AveragedTokens": lambda: tasks.average_embeddings(tiny("Llama")),
}


@dataclass(frozen=True)
class Work(Result):
    """A result of somebody else's, which has no picture of its own."""

    def rows(self):
        return [{"worker": name, "pairs": 9000 // i, "seconds": 8.0 / i} for i, name in enumerate("abc", 1)]

    def __str__(self):
        return "the work of three"


MAKERS = {
    "Mask": lambda: masks.butterfly(5),
    "MaskGrid": lambda: masks.per_head([masks.causal(4), masks.full(4)]),
    "Flow": lambda: analyze(masks.tree([-1, 0, 0, 1])),
    "Task": leaking_task,
    "MergedTask": lambda: tasks.merge(tasks.butterfly([5, 6, 7, 8])),
    "Monitor": monitored,
    "Handle": HANDLES["BiasHandle"],
    "Result": Work,
    "Hasse": lambda: analyze(masks.causal(3)).hasse,
    "LeakReport": lambda: check(leaking_task()),
    "AuditReport": bad_audit,
    "BiasMap": bias_map,
    "BiasGraph": lambda: bias_map().graph(),
    "GeometryScores": scores,
    "GeometrySurvey": lambda: registry.GeometrySurvey((scores(), scores("two")), {}),
    "ScoreAttribution": attribution,
    "Trace": trace,
    "EntryReport": entry_report,
    "EntryRemoval": lambda: entry_report(ablate=[5, 6, 7]).removal,
    "Explanation": lambda: sample(Explanation),
}


def made(name):
    kind = next(kind for kind in registry.DISPLAYS if kind.__name__ == name)
    return MAKERS[name]() if name in MAKERS else sample(kind)


KINDS = sorted(kind.__name__ for kind in registry.DISPLAYS)


def _hostile_entry(text):
    found = entry_report()
    example = replace(found.examples[0], tokens=(text,) * len(found.examples[0].tokens))
    return replace(found, examples=(example,), raised=(replace(found.raised[0], token=text),))


def _hostile_trace(text):
    found = trace()
    return replace(found, tokens=(text,) * 4, texts={found.fired(-1, count=1)[0].entry: text}, model=text)


def _hostile_explanation(text):
    found = sample(Explanation)
    sources = tuple(replace(source, promotes=(text,)) if source.neuron else source for source in found.sources)
    return replace(found, texts=(text,) * len(found.texts), sources=sources, answer=text, against=(text,), model=text)


def _hostile_attribution(text):
    result = attribution(model=text, query_token=text, tokens=(text,) * 5)
    return replace(result, components=(ComponentName(None, text, text), *result.components[1:]))


HOSTILE = {
    "BiasMap": lambda text: bias_page_map(tokens=[text, "b", "c", "d", "e", text]),
    "EntryReport": _hostile_entry,
    "Explanation": _hostile_explanation,
    "ScoreAttribution": _hostile_attribution,
    "Trace": _hostile_trace,
}


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "\x00\u202e", '"><img src=x>', "$x^2$", "&lt;", ""]
)
@pytest.mark.parametrize("name", HOSTILE)
def test_tokens_and_names_stay_text(name, text):
    shown = report.page(HOSTILE[name](text), title=text or None).html
    assert shown.count("<script") == 1
    assert "<img src=x" not in shown
    assert "\x00" not in shown
    assert "\u202e" not in parse_page(shown).text


AS_TABLES = {
    *("AloneReport", "BatchReport", "Decoded", "Decoder", "Diagnosis", "Duplicates", "EditReport", "FlowCut"),
    *("OrderDifference", "PairScores", "Removal", "Scores", "SharingReport", "StoreStats", "TokenWriters"),
    "Verification",
}


def test_every_result_has_a_figure_or_is_a_table_on_purpose():
    """A figure is one function under `@draws(Class)`; a class whose rows say it all stands in the list above."""
    known = set(registry.DISPLAYS) - {Result}
    assert {kind.__name__ for kind in kinds(Result) if not known & set(kind.__mro__)} == AS_TABLES


def test_every_handle_is_tried_here():
    assert {kind.__name__ for kind in kinds(Handle)} == set(HANDLES)


@pytest.mark.parametrize("name", KINDS)
def test_it_shows_itself_in_a_notebook_and_on_a_page(name):
    result = made(name)
    shown = result._repr_html_() if isinstance(result, Result) else report.notebook(result)
    parse_page(shown)
    drawn = registry.kind_of(result).figure is not None
    assert shown.startswith("<div")
    assert ("<svg" in shown and "background:#" not in shown) or not drawn
    page = report.encode(result, ".html").decode()
    assert page.startswith("<!doctype html>")
    assert parse_page(page).of("section")[:-1]  # besides the provenance


@pytest.mark.parametrize("name", KINDS)
def test_it_has_a_picture_in_every_format(name, tmp_path):
    result = made(name)
    picture = report.figure(result)
    for suffix, start in ((".svg", b"<"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        assert svg.encode(picture, suffix).startswith(start)
    picture.savefig(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size
    if isinstance(picture, Svg):
        parse_svg(picture.markup)


@pytest.mark.parametrize("name", [*KINDS, "MaskHandle"])
def test_it_takes_a_title(name):
    result = HANDLES[name]() if name in HANDLES else made(name)
    picture = report.figure(result, title="As in section 3")
    if isinstance(picture, Svg):
        assert "As in section 3" in texts(parse_svg(picture.markup))
    else:
        assert "As in section 3" in (
            picture.get_suptitle(),
            *(axes.get_title(where) for axes in picture.axes for where in ("left", "center")),
        )


def test_a_page_shows_nothing_twice():
    merged = tasks.merge(tasks.butterfly([5, 6, 7, 8]))
    once = [section.name for section in report.page(merged).sections]
    for again in (merged, merged.task, merged.task.flow, merged.task.mask, check(merged.task)):
        assert [section.name for section in report.page(merged, again).sections] == once
    assert len(report.page(merged, masks.causal(3)).sections) > len(once)


def test_labels_of_a_page_name_positions():
    words = ["a", "b", "c", "d", "e"]
    assert "3 “d”" in report.page(check(leaking_task()), labels=words).html
    with pytest.raises(ValueError, match="a mask, an order or leaks for the labels, got none"):
        report.page(Work(), labels=words)
    with pytest.raises(ValueError, match="a label for each of 5 positions, got 4"):
        report.page(check(leaking_task()), labels=words[:4])


@pytest.mark.parametrize("name", HANDLES)
def test_a_handle_is_drawn_as_what_it_holds(name):
    handle = HANDLES[name]()
    picture = report.figure(handle)
    held = handle.results()
    if name == "MaskHandle":
        assert len(parse_svg(picture.markup).findall("g")) == len(held) == 2
    elif name == "Monitor":
        assert picture.axes[0].lines[0].get_xdata().tolist() == list(handle.history) == [0, 2, 4]
    elif not held:
        assert set(" ".join(texts(parse_svg(picture.markup))).split()) >= set(str(handle).split())
    else:
        assert svg.encode(picture, ".svg") == report.encode(held[-1], ".svg")
    parse_page(report.page(handle).html)
    handle.remove()


def test_the_picture_of_a_table_has_its_cells_and_its_bars():
    drawn = parse_svg(report.figure(Work()).markup)
    for row in Work().rows():
        assert str(row["worker"]) in texts(drawn)
        assert f"{row['pairs']:,}".replace(",", "\u202f") in texts(drawn)
    widths = [float(bar.get("width")) for bar in drawn.iter("rect")]
    seconds = [row["seconds"] for row in Work().rows()]
    assert widths[len(seconds) + 2] / widths[len(seconds)] == pytest.approx(seconds[2] / seconds[0], abs=0.01)
    assert "other heading" in texts(parse_svg(report.figure(Work(), title="other heading").markup))


def test_leaks_are_drawn_as_paths_through_the_layers():
    task = leaking_task()
    drawn = parse_svg(report.figure(check(task)).markup)
    assert [text for text in texts(drawn) if text.isdecimal()] == ["3", "1", "0"]  # the witness
    assert {"layer 1", "layer 2", "holds it", "predicts it"} <= set(texts(drawn))
    tooltips = [node.findtext("title") for node in drawn.iter("rect")]
    assert [tooltip for tooltip in tooltips if tooltip] == ["reads its label: 0", "fine: 1–3", "dead: 4"]
    clean = texts(parse_svg(report.figure(check(clean_task())).markup))
    assert "no label leaks within any number of layers." in clean


def test_a_long_leak_keeps_both_of_its_ends():
    tokens = [Token(100 + at, at) for at in range(40)]
    chain = masks.from_edges([(at, at + 1) for at in range(39)], 40)
    drawn = texts(parse_svg(report.figure(check(Task(tokens, [Label(0, target=tokens[39])], chain))).markup))
    assert [int(text) for text in drawn if text.isdecimal()] == [39, 38, 37, 36, 3, 2, 1, 0]
    assert "… 32 more" in drawn


def test_a_task_is_drawn_as_its_mask_with_its_tokens_its_order_or_its_leaks():
    task = leaking_task()
    assert {"100@0", "104@4"} <= set(texts(parse_svg(report.figure(task).markup)))
    order = report.figure(task, picture="hasse").markup
    assert "the path of the information from 3 to 0" in order
    assert report.figure(task, picture="leaks").markup == report.figure(check(task)).markup
    stacked = Task(task.inputs, task.labels, [task.mask, masks.causal(5)])
    assert "Hasse diagram" in repr(report.figure(stacked))
    merged = tasks.merge(tasks.butterfly([5, 6, 7, 8]))
    assert report.figure(merged).markup == report.figure(merged.task).markup
    assert "5+7@1" in texts(parse_svg(report.figure(merged).markup))
    with pytest.raises(ValueError, match='picture must be "mask", "hasse" or "leaks", got \'loss\''):
        report.figure(task, picture="loss")


def test_active_and_idle_entries_are_drawn_layer_by_layer():
    layers = (
        LayerActivity(0, 0, "h.0", 9, 40, True, 10.0, 20, 4),
        LayerActivity(3, 1, "h.3", 9, 80, True, 8.0, 16, 40),
    )
    picture = report.figure(ActivityReport(layers, 80, (7,)))
    active, never = picture.axes
    assert [bar.get_width() for bar in active.patches] == [25.0, 10.0]
    assert [bar.get_width() for bar in never.patches] == [10.0, 50.0]
    assert [label.get_text() for label in active.get_yticklabels()] == ["0", "3"]
    assert not active.yaxis_inverted()  # layers go up


def test_the_bias_of_a_query_is_drawn_by_layer_and_key():
    one = LayerQuery(2, "layers.2.attn", 1.0, 0.5, {}, (1.5, -0.5, None))
    result = QueryBias("model", ("a", "b", "c"), 1, None, None, (one,), (0.5, 0.5, 0.0), None)
    (image,) = report.figure(result).axes[0].images
    assert image.get_array().tolist() == [[1.5, -0.5, None]]
    assert report.figure(one).axes[0].images[0].get_array().tolist() == [[1.5, -0.5, None]]


def test_an_audit_without_modules_is_drawn_as_the_table_of_its_violations():
    found = audit_report(bad_audit().violations)
    assert "model.layers.1.self_attn" in texts(parse_svg(report.figure(found).markup))


def test_a_monitor_without_a_record_says_how_to_make_one():
    monitor = geometry.monitor(torch.nn.TransformerEncoderLayer(16, 4, 32))
    with pytest.raises(ValueError, match="has no record yet: use it in a with block"):
        report.figure(monitor)


def test_a_page_of_a_result_without_a_part_of_its_own_shows_its_picture_and_short_numbers():
    html = report.page(MAKERS["EntryRemoval"]()).html
    assert "<svg" in html
    assert not re.search(r">-?\d\.\d{8,}<", html)


def test_what_is_drawn_alone_refuses_company():
    with pytest.raises(TypeError, match="Work is drawn alone, got 1 more"):
        report.figure(Work(), Work())


@pytest.mark.parametrize("name", MAKERS)
def test_without_matplotlib_pages_hold_tables_and_name_the_extra(name, monkeypatch):
    result = MAKERS[name]()
    for module in [module for module in sys.modules if module.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    charts = {
        *("Flow", "Mask", "AuditReport", "BiasMap", "GeometryScores", "ScoreAttribution", "GeometrySurvey", "Trace"),
        *("EntryReport", "EntryRemoval", "MaskGrid", "Task", "MergedTask", "Monitor"),
    }
    assert ("attnflow[report]" in report.page(result).html) == (name in charts)
    assert report.notebook(result).startswith("<div")


def test_a_task_is_its_order_and_its_proof():
    assert [section.name for section in report.page(clean_task()).sections][-2:] == ["leaks", "dead"]
    assert report.page(clean_task()).ok


def test_anything_else_is_refused_by_a_list_of_what_is_accepted():
    for show in (report.figure, report.page, report.notebook):
        with pytest.raises(TypeError, match=", any other, or a handle\\), got dict") as error:
            show({})
        listed = str(error.value).removeprefix("expected a result (").split(", any other")[0].split(", ")
        assert listed == [name for name in KINDS if name not in ("Handle", "Result")]  # each of which is drawn above
