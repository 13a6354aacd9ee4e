"""The HTML report: one file, well-formed, locked down, escaped, complete, and written whole or not at all."""

import base64
import dataclasses
import hashlib
import os
import re
import stat
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow import masks
from attnflow.audit.report import AuditReport, ModuleResult, Violation
from attnflow.order import analyze
from attnflow.report import charts, page
from attnflow.report.svg import CELL, HOT, standalone
from attnflow.tasks import Label, Task, Token, check
from attnflow.tasks.verification import TaskDifference, Verification
from tests.report.reading import parse_page

HOSTILE = "<script>alert(1)</script> & \"quotes\" 'single' \x00 \u202e </title> <!-- ]]>"


def leaking_task():
    """Position 0 must predict token 3, which reaches it by 3 -> 1 -> 0; position 4 serves nothing."""
    tokens = [Token(100 + i, i) for i in range(5)]
    mask = masks.from_edges([(1, 3), (0, 1), (2, 2), (4, 4)], 5, name="a leak")
    return Task(tokens, [Label(0, target=tokens[3]), Label(2, target=tokens[1])], mask)


def clean_task():
    tokens = [Token(100 + i, i) for i in range(5)]
    return Task(tokens[:4], [Label(i, target=tokens[i + 1]) for i in range(4)], masks.causal(4))


def audit_report(violations=(), modules=()):
    return AuditReport(
        violations=tuple(violations),
        order="causal",
        mode="perturb",
        layers=2,
        positions=8,
        batch=2,
        forward_passes=17,
        coverage=0.875,
        forbidden=28,
        noise=0.0,
        modules=tuple(modules),
        notes=("a remark of the audit",),
        seconds=1.25,
    )


def bad_audit():
    order = Violation("order", 1, "model.layers.1.self_attn", 7, 2, 0.25)
    batch = Violation("batch", None, "model.norm", 3, 4, 1e-3, source_row=0, target_row=1)
    cache = Violation("cache", 0, "model.layers.0", None, 5, 0.5, path="cached")
    statuses = [("embed", None, "clean"), ("model.layers.0", 0, "breaks"), ("model.layers.1", 1, "carries")]
    return audit_report([order, batch, cache], [ModuleResult(*result) for result in statuses])


def full_report():
    task = leaking_task()
    differences = tuple(TaskDifference(i, 1e-13, 2.5, 3e-13) for i in range(3))
    return page(
        task.flow,
        check(task),
        Verification(1e-13, 2e-13, 3e-13, 7.5, differences, 1e-9),
        bad_audit(),
        labels=["the", "quick", "brown", "fox", "."],
        details={"Command": "attnflow check"},
    )


REPORTS = {
    "everything": full_report,
    "causal": lambda: page(masks.causal(64)),
    "butterfly": lambda: page(analyze(masks.butterfly(16))),
    "two streams": lambda: page(masks.block_two_stream(8, 4)),
    "big_bird": lambda: page(masks.big_bird(1024)),
    "stack": lambda: page(analyze([masks.causal(20), masks.sliding_window(20, 3), masks.causal(20)])),
    "model": lambda: page(analyze([masks.causal(8)] * 2), audit_report(), title="org/model"),
    "audit alone": lambda: page(bad_audit()),
    "measured": lambda: page(analyze(masks.causal(8)), title="org/model"),
    "not square": lambda: page(masks.full(5, 9)),
    "no positions": lambda: page(masks.causal(0)),
    "no keys": lambda: page(masks.full(3, 0)),
    "one position": lambda: page(masks.causal(1)),
    "nothing allowed": lambda: page(~masks.full(6)),
}


@pytest.fixture(params=REPORTS, scope="module")
def made(request):
    return REPORTS[request.param]()


def test_the_page_is_well_formed_and_self_contained(made):
    shown = parse_page(made.html)
    assert len(made.html.encode()) < 200_000
    assert not {tag for tag, _ in shown.tags} & {"img", "iframe", "object", "embed", "base", "form", "input"}
    for tag, attributes in shown.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")], tag
        inline = "data:image/png;base64," if tag == "image" else "data:,"  # the pixels of a chart's map
        assert attributes.get("href", "#").startswith(("#", inline))
    outside = re.findall(r"""(?:https?:)?//[^\s"'<>]+""", made.html)
    assert {address for address in outside if "/" in address} <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in shown.inline["style"]
    assert "@import" not in shown.inline["style"]
    assert shown.of("html") == [{"lang": "en"}]
    assert shown.of("meta")[0] == {"charset": "utf-8"}


def test_the_policy_allows_exactly_what_is_there(made):
    shown = parse_page(made.html)
    policy = next(m["content"] for m in shown.of("meta") if m.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert (rules["base-uri"], rules["form-action"]) == ("'none'", "'none'")
    for rule, tag in (("style-src", "style"), ("script-src", "script")):
        inline = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", made.html, re.DOTALL)
        assert "".join(inline) == shown.inline[tag]
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
        assert rules[rule] == " ".join(f"'sha256-{digest}'" for digest in digests)


def test_anchors_lead_to_the_sections(made):
    shown = parse_page(made.html)
    ids = [attributes["id"] for _, attributes in shown.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {link["href"][1:] for link in shown.of("a")} == {section.name for section in made.sections} <= set(ids)
    for section in made.sections:
        assert section.title in shown.text


def test_everything_asked_for_is_shown():
    made = full_report()
    # What failed comes first.
    names = ["leaks", "dead", "audit", "mask", "order", "growth", "blocks", "verification"]
    assert not made.ok
    assert [section.name for section in made.sections] == names
    text = parse_page(made.html).text
    for part in (
        "1 label can be read by the position that must predict it",
        "layer 1 3 “fox” → 1 “quick”",
        "layer 2 1 “quick” → 0 “the”",
        "Position 0 must predict token 103 (data token 3)",
        "model.layers.1.self_attn",
        "87.5 % of 28",
        "a remark of the audit",
        "3 modules watched",
        "of outputs 1.0e-13, of losses 3.0e-13, of gradients 2.0e-13",
        "attnflow check",
        af.__version__,
        "a leak",
    ):
        assert part in text, part
    assert "1 position (20 %) reaches no labelled position" in text


def test_the_reading_says_what_was_found():
    def reading(made):
        return re.search(r'<p class="reading">(.*?)</p>', made.html).group(1).replace("\xa0", " ")

    assert "form a chain, in which each reads all below it; one layer" in reading(page(masks.causal(9)))
    assert "the order is a single class; it takes 2 layers" in reading(page(masks.big_bird(12, 1)))
    assert "8 classes read nothing of each other" in reading(page(~masks.full(8)))
    assert "an order of 3 levels" in reading(page(masks.tree([-1, 0, 0, 1])))
    assert "there is nothing to allow" in reading(page(masks.causal(0)))
    assert "no order to report" in reading(page(masks.full(2, 3)))
    assert "No label can leak: this is proved for all 4." in reading(page(clean_task()))
    leak = reading(page(leaking_task().mask, check(leaking_task())))
    assert "1 label can be read" in leak
    assert "the first comes to position 0 from 3 in 2 layers" in leak
    assert "No leak found, 87.5 % of the forbidden pairs tested." in reading(page(audit_report()))
    leak = "Leak found, first in <code>model.layers.1.self_attn</code> (layer 1): 3 violations, 87.5 % of"
    assert leak in reading(page(bad_audit()))


def test_hostile_names_stay_text():
    task = leaking_task()
    mask = masks.from_dense(torch.ones(3, 3, dtype=torch.bool), name=HOSTILE)
    audit = audit_report([dataclasses.replace(bad_audit().violations[0], module=HOSTILE)], [])
    pages = [
        page(mask, title=HOSTILE, labels=[HOSTILE, "\ud800", ""], details={HOSTILE: HOSTILE}),
        page(task, labels=[HOSTILE] * 5),
        page(mask, audit, title=HOSTILE),
    ]
    for made in pages:
        shown = parse_page(made.html)
        assert len(shown.of("script")) == 1
        assert not shown.of("b")
        assert "alert(1)" not in shown.inline["script"]
        assert "<script>alert(1)</script>" in shown.text
        assert "\u202e" not in made.html
        assert "\x00" not in made.html
        made.html.encode("utf-8")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="a label for each of 3 positions, got 1"):
        page(masks.causal(3), labels=["a"])
    with pytest.raises(ValueError, match="at least one result, got none"):
        page()
    with pytest.raises(TypeError, match=r"expected a result \(ActivityReport, AuditReport, .*\), got list"):
        page([masks.causal(3)])


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    made = page(masks.causal(4))
    path = made.save(tmp_path / "out.html")
    assert path.read_text(encoding="utf-8") == made.html
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        page(masks.causal(5)).save(path)
    assert path.read_text(encoding="utf-8") == made.html
    assert [item.name for item in tmp_path.iterdir()] == ["out.html"]
    with pytest.raises(FileNotFoundError, match="create it first"):
        made.save(tmp_path / "missing" / "out.html")
    with pytest.raises(IsADirectoryError, match="got the folder"):
        made.save(tmp_path)
    assert repr(made).startswith("Page('causal(n=4)': mask, order, growth, blocks; ")


@pytest.mark.parametrize("mask", [masks.causal(16_384), masks.butterfly(5461), masks.longformer(16_384, 256)], ids=repr)
def test_long_sequences_make_small_pages(mask, monkeypatch):
    monkeypatch.setattr(masks.Mask, "dense", lambda *_: pytest.fail("built n x n"))
    made = page(mask)
    assert len(made.html.encode()) < 200_000
    parse_page(made.html)


def test_the_order_of_a_huge_mask_is_left_out():
    made = page(masks.causal(40_000))
    assert "the order is not computed above 32768 positions" in parse_page(made.html).text
    assert [section.name for section in made.sections] == ["mask", "order", "blocks"]


def test_reports_charts_and_the_studio_have_one_palette():
    """Blue for and orange against, in the light and in the dark: read from the sheets of styles themselves."""
    sheets = [
        Path(charts.__file__).with_name("assets") / "report.css",
        Path(__file__).parents[2] / "frontend/src/studio.css",
    ]
    names = [("s0", "s1", "hot", "good", "cell"), ("for", "against", "leak", "good", "cell")]
    found = [[re.findall(rf"--{name}: (#\w+);", sheet.read_text()) for name in all_names]
             for sheet, all_names in zip(sheets, names, strict=True)]  # fmt: skip
    assert found[0] == found[1]
    assert all(len(shades) == 3 and shades[1] == shades[2] for shades in found[0])
    assert tuple(shades[0] for shades in found[0]) == (charts.POSITIVE, charts.NEGATIVE, HOT, found[0][3][0], CELL)
    alone = standalone('<svg class="af-svg"><title></title></svg>').markup
    for (light, dark, _), name in zip((*found[0][:3], found[0][4]), ("s0", "s1", "hot", "cell"), strict=True):
        assert len(re.findall(rf'"{light}"\]\{{\w+:var\(--af-{name},{light}\)', alone)) == 2
        assert alone.count(f"--af-{name}:{dark}") == 2


def test_what_only_one_mask_allows_differs_in_grey():
    """The studio shows three kinds of cells, the common ones half as strong as elsewhere; print has their lightness."""
    style = (Path(__file__).parents[2] / "frontend/src/studio.css").read_text()
    panel, cell, given, missing, extra = (
        np.array([int(re.search(rf"--{name}: #(\w+);", style)[1][at : at + 2], 16) for at in (0, 2, 4)])
        for name in ("panel", "cell", "given", "missing", "extra")
    )
    shades = [float(ink @ (0.2126, 0.7152, 0.0722)) for ink in (panel, given, missing, extra)]
    assert np.abs(given - (panel + cell) / 2).max() <= 0.5
    assert min(a - b for a, b in pairwise(sorted(shades, reverse=True))) > 30
