"""Page sections and a chart for an audit: the first offending module, and how far each leak is carried."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from attnflow._core.markup import grouped, percent, plural, runs
from attnflow.audit.report import AuditReport, ModuleResult, Violation
from attnflow.report import charts, html
from attnflow.report.charts import Figure, blank, chart, literal
from attnflow.report.displays import describes, draws
from attnflow.report.html import Content, code, tag
from attnflow.report.page import Context, PagePart, Section
from attnflow.report.svg import HOT
from attnflow.report.tables import table_svg

LISTED: Final = 24  # rows of a list before the rest is only counted
_LOOKS: Final = {  # colour, hatch for print and for readers who do not tell red from green, and meaning
    "clean": ("#9fcdb3", "", "clean"),
    "breaks": (HOT, "xxxx", "breaks the order"),
    "carries": ("#e8a9ac", "////", "carries a break on"),
}
_EDGE: Final = "#1c2024"  # on light cells, in the dark, too
_ROWS: Final = 48  # runs of layers that a chart shows


@describes(AuditReport)
def audit_part(report: AuditReport, _: Context) -> PagePart:
    count, tested = len(report.violations), _tested(report)
    if report.ok:
        reading: list[Content] = [f"No leak found, {tested}."]
        verdict = html.note("good", html.paragraph(f"No output moved against the order: {report.order}."))
    elif not report.violations:
        reading = [f"The audit tested nothing: {_untested(report)}."]
        verdict = html.note("neutral", html.paragraph(f"Nothing was tested: {_untested(report)}."))
    else:
        first = report.violations[0]
        where = "" if first.layer is None else f" (layer {first.layer})"
        what = "Flow is missing" if first.kind == "missing" else "Leak found"
        reading = [f"{what}, first in ", code(first.module), f"{where}: {plural(count, 'violation')}, {tested}."]
        sentence = f"Information flows against the declared order in {plural(count, 'place')}. The first is "
        verdict = html.note("bad", html.paragraph(sentence, code(first.module), f"{where}."))
    body = verdict + html.facts(effort(report))
    if report.violations:
        head = ["kind", "module", "layer", "source", "target", "change"]
        rows = [_violation(violation) for violation in report.violations[:LISTED]]
        body += html.table(head, rows, text_columns=2, marked=[0]) + html.rest(count - LISTED)
    if report.modules and (report.ok or count):
        watched = f"{plural(len(report.modules), 'module')} watched"
        body += tag("h3", watched) + charts.in_page(lambda: audit_chart(report, title=" "), watched)
    for remark in (*report.untested, *report.notes):
        body += html.note("neutral", html.paragraph(remark))
    ink = "bad-ink" if count else "good-ink" if report.ok else ""
    numbers = [("Audit", tag("span", plural(count, "violation") if count else report.verdict, class_=ink))]
    return PagePart("Audit", [Section("audit", "Audit of the model", body)], reading, numbers, failed=count > 0)


def _tested(report: AuditReport) -> str:
    return f"{percent(report.coverage)} of the forbidden pairs tested" if report.forbidden else _untested(report)


def _untested(report: AuditReport) -> str:
    if not report.forbidden:
        who = "a bidirectional model" if report.order == "bidirectional" else f"the order ({report.order})"
        return f"{who} forbids no pair of these inputs"
    if report.untested:
        return f"not every output could be tested, {report.untested[0]}"
    return f"none of {plural(report.forbidden, 'forbidden pair')} could be tested"


def effort(report: AuditReport) -> list[tuple[str, Content]]:
    passes = plural(report.forward_passes, "forward pass", "forward passes")
    tested = f"{percent(report.coverage)} of {grouped(report.forbidden)}" if report.forbidden else "none is forbidden"
    return [
        ("Order tested", report.order),
        ("Inputs", f"{plural(report.batch, 'sequence')}, {plural(report.positions, 'position')}"),
        ("Forbidden pairs tested", tested),
        ("Mode", report.mode),
        ("Effort", f"{passes}, {report.seconds:.1f} s"),
        ("Noise between equal runs", f"{report.noise:.2g}"),
    ]


def _violation(violation: Violation) -> list[Content]:
    source = "–" if violation.source is None else grouped(violation.source)
    target = grouped(violation.target)
    if violation.kind == "batch":
        source, target = f"{source} (row {violation.source_row})", f"{target} (row {violation.target_row})"
    layer = "–" if violation.layer is None else str(violation.layer)
    return [violation.kind, code(violation.module), layer, source, target, f"{violation.change:.3g}"]


Strip = tuple[str, tuple[str, ...], list[tuple[str, tuple[str | None, ...]]]]
"""The modules of one stack of layers: its name, a column for each module, a named row for layers that are alike."""


@draws(AuditReport)
def audit_figure(report: AuditReport, **options: Any) -> str | Figure:
    """The watched modules; the audit of a function watches none, and its violations are a table."""
    return audit_chart(report, **options) if report.modules else table_svg(report, **options)


@chart
def audit_chart(report: AuditReport, *, title: str | None = None) -> Figure:
    """Draws every watched module, layers upwards: where a leak starts and how far it is carried."""
    from matplotlib.patches import Patch

    strips = strips_of(report.modules)
    if not strips:
        raise ValueError("no module was watched: there is nothing to draw")
    widest = max(len(names) for _, names, _ in strips)
    heights = [0.24 * min(len(rows), _ROWS) + 0.085 * max(map(len, names)) + 0.35 for _, names, rows in strips]
    figure = blank(min(14.0, max(5.0, 1.9 + 0.3 * widest)), sum(heights) + 0.8)
    panels = figure.subplots(len(strips), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, strip in zip(panels, strips, strict=True):
        _draw(axes, strip, widest)
    lines = [title] if title else _heading(report)
    letters = int(12.5 * figure.get_figwidth())  # of a line
    figure.suptitle(literal("\n".join(part for line in lines for part in textwrap.wrap(line, letters) or [line])))
    meanings = {status: meaning for status, (*_, meaning) in _LOOKS.items()}
    if not (report.ok or report.violations):
        meanings["clean"] = "watched, nothing to see"
    handles = [Patch(**_look(status), label=meaning) for status, meaning in meanings.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, handleheight=1.4, handlelength=2.4)
    return figure


def _heading(report: AuditReport) -> list[str]:
    """Returns the verdict with the module where a leak starts, and what was tested: a line each."""
    tested = _tested(report).replace("\xa0", " ")
    if not report.violations:
        return [f"{report.verdict.capitalize()} (order: {report.order})", tested]
    first = report.violations[0]
    match = None if first.layer is None else _in_layer(first.layer, first.module)
    where = first.module if match is None else f"layer {first.layer}" + (f", {match[2]}" if match[2] else "")
    what = "Missing flow" if first.kind == "missing" else "Leak"
    return [f"{what}: {where} (order: {report.order})", f"{plural(len(report.violations), 'violation')}; {tested}"]


def _look(status: str) -> dict[str, Any]:
    colour, hatch, _ = _LOOKS[status]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": _EDGE, "linewidth": 0.4}


def _in_layer(layer: int, module: str) -> re.Match[str] | None:
    """Matches the path of a module in a layer: before the layer's number, and after it."""
    return re.match(rf"(.*?\b){layer}(?:\.(.+))?$", module)


def _draw(axes: Any, strip: Strip, widest: int) -> None:
    from matplotlib.patches import Rectangle

    stack, names, every = strip
    rows = every[:_ROWS]
    for y, (_, cells) in enumerate(rows):
        for x, status in enumerate(cells):
            if status is not None:
                axes.add_patch(Rectangle((x - 0.42, y - 0.42), 0.84, 0.84, **_look(status)))
                if status == "breaks":
                    sign = {"boxstyle": "circle,pad=0.1", "facecolor": "#8f0320", "linewidth": 0}
                    axes.text(x, y, "!", color="white", weight="bold", ha="center", va="center_baseline", bbox=sign)
    axes.set(xlim=(-0.6, widest - 0.4), ylim=(-0.6, len(rows) - 0.4))  # layers go up
    axes.set_xticks(range(len(names)), [literal(name) for name in names], rotation=90)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    remark = f" (the first {_ROWS} rows)" if len(every) > _ROWS else ""
    axes.set_title(literal(stack) + remark, loc="left", fontsize=9)
    axes.set_aspect("equal", anchor="NW")


def strips_of(modules: Sequence[ModuleResult]) -> list[Strip]:
    """Groups the watched modules by stack, layer and name; modules outside all layers come last."""
    cells: dict[str, dict[int, dict[str, str]]] = {}  # path before the layer's number -> layer -> name -> status
    outside: dict[str, str] = {}
    for result in modules:
        match = None if result.layer is None else _in_layer(result.layer, result.module)
        if match is None or result.layer is None:
            outside[result.module] = result.status
        else:
            stack = cells.setdefault(match[1].rstrip(".") or "layers", {})
            stack.setdefault(result.layer, {})[match[2] or "(layer)"] = result.status
    strips: list[Strip] = []
    for stack, layers in cells.items():
        names = tuple(dict.fromkeys(name for layer in layers.values() for name in layer))
        cells_of = [(number, tuple(layer.get(name) for name in names)) for number, layer in sorted(layers.items())]
        alike = [([number for number, _ in group], row) for row, group in groupby(cells_of, itemgetter(1))]
        rows = [(f"layer{'s' if len(numbers) > 1 else ''} {runs(numbers)}", row) for numbers, row in alike]
        strips.append((stack, names, rows))
    if outside:
        strips.append(("outside the layers", tuple(outside), [("", tuple(outside.values()))]))
    return strips
