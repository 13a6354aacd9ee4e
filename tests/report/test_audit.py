"""The figure of an audit: its title names the place of the leak whole, and its looks differ without colour."""

import dataclasses
import re

import pytest

from attnflow import report
from attnflow.audit.report import ModuleResult, Violation
from tests.report.reading import parse_page
from tests.report.test_page import audit_report, bad_audit

LAYER_NORM = "post_attention_layernorm"


def leak(module=LAYER_NORM, layer=12, **changes):
    places = [(f"model.layers.{at}.{name}", at) for at in range(16) for name in ("self_attn", LAYER_NORM)]
    modules = [ModuleResult(place, at, "clean" if at < 12 else "carries") for place, at in places]
    path = module if layer is None else f"model.layers.{layer}.{module}".rstrip(".")
    found = audit_report([Violation("order", layer, path, 7, 2, 0.25)], modules)
    return dataclasses.replace(found, **changes)


def title(result, **options):
    return report.figure(result, **options).get_suptitle()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (leak(), f"Leak: layer 12, {LAYER_NORM} (order: causal)\n1 violation; 87.5 % of the forbidden pairs tested"),
        (leak(module=""), "Leak: layer 12 (order: causal)\n1 violation; 87.5 % of the forbidden pairs tested"),
        (leak(module="model.norm", layer=None), "Leak: model.norm (order: causal)"),
        (leak(violations=()), "Clean (order: causal)\n87.5 % of the forbidden pairs tested"),
        (leak(violations=(), forbidden=0), "Nothing tested (order: causal)\nthe order (causal) forbids no pair"),
        (leak(violations=(Violation("missing", 3, "layers.3.attn", 0, 5, 0.0),)), "Missing flow: layer 3, attn (order"),
    ],
)
def test_the_title_names_the_place_and_the_order(result, expected):
    assert title(result).startswith(expected)


def test_a_title_is_wrapped_and_never_cut():
    order = "causal within 3 packed documents, 5 + 7 + 4 tokens; window 4096 in 24 of 30 layers"
    figure = report.figure(leak(order=order))
    assert order in " ".join(figure.get_suptitle().split())
    figure.draw_without_rendering()
    for drawn in (figure, report.figure(bad_audit())):
        drawn.draw_without_rendering()
        box = drawn._suptitle.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= drawn.bbox.width
    assert title(leak(), title="mine") == "mine"


def test_each_status_has_a_hatch_of_its_own_in_the_figure_and_on_a_page():
    figure = report.figure(bad_audit())
    hatches = {patch.get_label(): patch.get_hatch() for patch in figure.legends[0].get_patches()}
    assert len(set(hatches.values())) == len(hatches) == 3
    drawn = [patch.get_hatch() for axes in figure.axes for patch in axes.patches]
    assert sorted(set(drawn), key=str) == sorted(set(hatches.values()), key=str)
    page = report.page(bad_audit()).html
    parse_page(page)
    wanted = set(re.findall(r'fill="url\(#([^)]+)\)"', page))
    assert wanted
    assert wanted <= set(re.findall(r'id="([^"]+)"', page))  # a pattern that is missing would leave the cells black


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"forbidden": 0, "coverage": 1.0, "order": "bidirectional"}, "a bidirectional model forbids no pair"),
        ({"forbidden": 0, "coverage": 1.0}, "the order (causal) forbids no pair"),
        ({"untested": ("of logits: its shape has no axis of positions",)}, "of logits: its shape has no axis"),
        ({"coverage": 0.0}, "none of 28 forbidden pairs could be tested"),
    ],
)
def test_an_audit_without_a_verdict_says_why_and_paints_nothing_green(changes, why):
    found = leak(violations=(), **changes)
    said = parse_page(report.page(found).html).text.replace("\xa0", " ")
    assert f"The audit tested nothing: {why}" in said or f"tested, {why}" in said
    assert "100 % of" not in said
    assert "modules watched" not in said
    labels = [patch.get_label() for patch in report.figure(found).legends[0].get_patches()]
    assert "clean" not in labels
