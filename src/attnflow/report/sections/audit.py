"""What the audit of a model found: the first offending module first, and how far each break is carried."""

from __future__ import annotations

from typing import Final

from attnflow._core.markup import grouped, percent, plural
from attnflow.audit.findings import AuditReport, Violation
from attnflow.report import charts, html
from attnflow.report.audit_chart import audit_chart
from attnflow.report.html import Content, code, tag
from attnflow.report.part import Context, Part, Section

_LISTED: Final = 24  # rows of a list before the rest is only counted


def audit_part(report: AuditReport, _: Context) -> Part:
    """The verdict, what was tested, each violation, every watched module."""
    count = len(report.violations)
    if report.ok:
        tested = percent(report.coverage)
        reading: list[Content] = [
            f" The audit found no flow against its order ({tested} of the forbidden pairs tested)."
        ]
        verdict = html.note("good", html.paragraph(f"No output moved against the order: {report.order}."))
    elif not report.violations:
        reading = [" The audit tested nothing: the order forbids no pair of these inputs."]
        verdict = html.note("neutral", html.paragraph(f"Nothing was tested: {report.order}."))
    else:
        first = report.violations[0]
        reading = ["The audit found flow against its order, first in ", code(first.module), "."]
        where = "" if first.layer is None else f" (layer {first.layer})"
        sentence = f"Information flows against the declared order in {plural(count, 'place')}. The first is "
        verdict = html.note("bad", html.paragraph(sentence, code(first.module), f"{where}."))
    body = verdict + html.facts(_effort(report))
    if report.violations:
        head = ["kind", "module", "layer", "source", "target", "change"]
        rows = [_violation(violation) for violation in report.violations[:_LISTED]]
        body += html.table(head, rows, text_columns=2, marked=[0])
        if count > _LISTED:
            body += html.paragraph(f"… and {grouped(count - _LISTED)} more.", kind="lead")
    if report.modules:
        watched = f"{plural(len(report.modules), 'module')} watched"
        body += tag("h3", watched) + charts.in_page(lambda: audit_chart(report, title=" "), watched)
    for remark in report.notes:
        body += html.note("neutral", html.paragraph(remark))
    ink = "bad-ink" if count else "good-ink" if report.ok else ""
    verdict_ = tag("span", plural(count, "violation") if count else report.verdict, class_=ink)
    sections = [Section("audit", "Audit of the model", body)]
    return Part("Audit", sections, reading, [("Audit", verdict_)], failed=bool(report.violations))


def _effort(report: AuditReport) -> list[tuple[str, Content]]:
    passes = plural(report.forward_passes, "forward pass", "forward passes")
    if report.backward_passes:
        passes += f", {plural(report.backward_passes, 'backward pass', 'backward passes')}"
    tested = f"{percent(report.coverage)} of {grouped(report.forbidden)}"
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
