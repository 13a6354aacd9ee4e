"""Every kind of result shows itself: as a picture, on a page, in a notebook, in a file."""

import sys

import pytest

from attnflow import masks, report
from attnflow._core.results import Result
from attnflow.order import analyze
from attnflow.report import registry
from attnflow.report.svg import Svg
from attnflow.tasks import check
from tests.bias.test_map import make as bias_map
from tests.knowledge.test_provenance import made as trace
from tests.report.reading import parse_page, parse_svg
from tests.report.test_entry import entry_report
from tests.report.test_geometry import scores
from tests.report.test_page import bad_audit, clean_task, leaking_task

MAKERS = {
    "Mask": lambda: masks.butterfly(5),
    "Flow": lambda: analyze(masks.tree([-1, 0, 0, 1])),
    "Hasse": lambda: analyze(masks.causal(3)).hasse,
    "LeakReport": lambda: check(leaking_task()),
    "AuditReport": bad_audit,
    "BiasMap": bias_map,
    "BiasGraph": lambda: bias_map().graph(),
    "GeometryScores": scores,
    "Survey": lambda: registry.Survey((scores(), scores("two")), {}),
    "Trace": trace,
    "EntryReport": entry_report,
    "Removal": lambda: entry_report().ablate([5, 6, 7]),
}


def test_every_registered_kind_is_tried_here():
    assert {kind.__name__ for kind in registry.KINDS} == set(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_it_shows_itself_in_a_notebook_and_on_a_page(name):
    result = MAKERS[name]()
    shown = result._repr_html_() if isinstance(result, Result) else report.notebook(result)
    parse_page(shown)
    drawn = registry.kind_of(result).figure is not None
    assert shown.startswith("<div")
    assert ("<svg" in shown) or not drawn
    page = report.encode(result, ".html").decode()
    assert page.startswith("<!doctype html>")
    assert parse_page(page).of("section")[:-1]  # besides the provenance


@pytest.mark.parametrize("name", MAKERS)
def test_it_has_a_picture_in_every_format_or_says_that_it_has_none(name, tmp_path):
    result = MAKERS[name]()
    if registry.kind_of(result).figure is None:
        with pytest.raises(
            TypeError, match=f"{name} has no picture, report.page shows it; there are pictures of Audit"
        ):
            report.figure(result)
        return
    picture = report.figure(result)
    charts = () if isinstance(picture, Svg) else ((".png", b"\x89PNG"), (".pdf", b"%PDF"))
    for suffix, start in ((".svg", b"<"), *charts):
        assert report.encode(result, suffix).startswith(start)
    picture.savefig(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size
    if isinstance(picture, Svg):
        parse_svg(picture.markup)


@pytest.mark.parametrize("name", MAKERS)
def test_without_matplotlib_pages_hold_tables_and_name_the_extra(name, monkeypatch):
    result = MAKERS[name]()
    for module in [module for module in sys.modules if module.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    charts = {"Flow", "Mask", "AuditReport", "BiasMap", "GeometryScores", "Survey", "Trace", "EntryReport"}
    assert ("attnflow[report]" in report.page(result).html) == (name in charts)
    assert report.notebook(result).startswith("<div")


def test_a_task_is_its_order_and_its_proof():
    assert [section.name for section in report.page(clean_task()).sections][-2:] == ["leaks", "dead"]
    assert report.page(clean_task()).ok


def test_anything_else_is_refused():
    for show in (report.figure, report.page, report.notebook):
        with pytest.raises(TypeError, match=r"expected a result \(AuditReport, .*Trace.*\), got dict"):
            show({})
