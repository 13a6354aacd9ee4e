"""What was found: leaks with their witnesses, positions that serve nothing, the audit of a model."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from attnflow._core.markup import grouped, percent, plural, shorten
from attnflow.report import html
from attnflow.report.hasse_svg import runs
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.sections.order import diagram
from attnflow.report.subject import Section, Subject

if TYPE_CHECKING:
    from attnflow.audit import AuditReport
    from attnflow.audit.findings import Violation
    from attnflow.tasks.leaks import Leak

_DRAWN: Final = 2  # leaks with a diagram of their own
_LISTED: Final = 24  # rows of a list before the rest is only counted
_MODULES: Final = 4000


def leaks(subject: Subject) -> Section | None:
    """Labels that reach the position that predicts them, each with its witness path by layer."""
    check = subject.check
    if check is None:
        return None
    if not check.leaks:
        within = "any number of layers" if check.layers is None else plural(check.layers, "layer")
        sentence = f"None of {plural(check.num_labels, 'label')} can be read by the position that predicts it"
        return Section("leaks", "Leaks", html.note("good", html.paragraph(f"{sentence}, within {within}.")))
    count = plural(len(check.leaks), "label")
    sentence = f"{count} can be read by the position that must predict it: the model would learn to copy."
    parts = [html.note("bad", html.paragraph(sentence))]
    parts += [_leak(subject, leak, drawn=index < _DRAWN) for index, leak in enumerate(check.leaks[:_LISTED])]
    if len(check.leaks) > _LISTED:
        parts.append(html.paragraph(f"… and {grouped(len(check.leaks) - _LISTED)} more.", kind="lead"))
    return Section("leaks", "Leaks", html.join(parts))


def _leak(subject: Subject, leak: Leak, drawn: bool) -> Html:
    path = list(leak.witness)
    title = tag("h3", f"Position {leak.position} must predict {_token(subject, leak)}")
    way = _steps(subject, path)
    if not drawn or subject.flow is None:
        return title + way
    return title + diagram(subject, subject.flow, path, way)


def _token(subject: Subject, leak: Leak) -> str:
    data = leak.label.data_index
    return f"token {leak.label.target_id}" + ("" if data is None else f" (data token {data})")


def _steps(subject: Subject, path: list[int]) -> Html:
    if len(path) == 1:
        alone = f"Position {_position(subject, path[0])} is itself made of the token that it must predict."
        return tag("ul", tag("li", alone), class_="path")
    items = [tag("li", tag("span", "input"), f" at {_position(subject, path[0])}")]
    for layer, (source, target) in enumerate(pairwise(path), 1):
        stays = " (stays)" if source == target else ""
        move = f" {_position(subject, source)} → {_position(subject, target)}{stays}"
        items.append(tag("li", tag("span", f"layer {layer}"), move))
    if len(items) > 40:
        items = [*items[:20], tag("li", f"… {len(items) - 40} more layers"), *items[-20:]]
    return tag("ul", *items, class_="path")


def _position(subject: Subject, position: int) -> str:
    if subject.labels is None:
        return str(position)
    return f"{position} “{shorten(subject.labels[position], 16)}”"


def idle(subject: Subject) -> Section | None:
    """Positions that no labelled position reads, and data tokens that nothing predicts."""
    check = subject.check
    if check is None:
        return None
    dead, unsupervised = sorted(check.dead), sorted(check.unsupervised)
    parts: list[Html] = []
    if dead:
        share = percent(len(dead) / subject.flow.size) if subject.flow is not None and subject.flow.size else ""
        verb = "reaches" if len(dead) == 1 else "reach"
        sentence = (
            f"{plural(len(dead), 'position')} ({share}) {verb} no labelled position: computing it trains nothing."
        )
        parts.append(html.note("bad", html.paragraph(sentence), html.paragraph(code(shorten(runs(dead), 400)))))
    else:
        parts.append(html.note("good", html.paragraph("Every position can reach a labelled one: none is dead.")))
    if unsupervised:
        verb = "has" if len(unsupervised) == 1 else "have"
        sentence = f"{plural(len(unsupervised), 'data token')} {verb} no label: "
        parts.append(html.note("neutral", html.paragraph(sentence, code(shorten(runs(unsupervised), 400)))))
    return Section("dead", "Dead positions and unsupervised tokens", html.join(parts))


def verification(subject: Subject) -> Section | None:
    """How far one pass over a merged task is from its subtasks alone, on a real model."""
    result = subject.verification
    if result is None:
        return None
    gradients = "not compared" if result.gradient_difference is None else f"{result.gradient_difference:.1e}"
    lead = f"One pass over the merged task against {plural(len(result.tasks), 'subtask')} run alone, on the same model."
    rows = [[str(t.task), f"{t.output_difference:.1e}", f"{t.loss:.4g}"] for t in result.tasks[:_LISTED]]
    body = html.paragraph(lead, kind="lead") + html.facts(
        [
            ("Largest relative difference", f"{result.output_difference:.1e} of outputs, {gradients} of gradients"),
            ("Summed loss", f"{result.merged_loss:.6g}"),
        ]
    )
    more = len(result.tasks) - _LISTED
    body += html.table(["subtask", "output difference", "loss"], rows)
    if more > 0:
        body += html.paragraph(f"… and {grouped(more)} more.", kind="lead")
    return Section("verification", "Merged against its subtasks", body)


def audit(subject: Subject) -> Section | None:
    """What the audit of a real model found, first offending layer and module first."""
    report = subject.audit
    if report is None:
        return None
    name = subject.model or "the model"
    if report.ok:
        clean = html.paragraph("No output of ", code(name), f" moved against its order: {report.order}.")
        verdict = html.note("good", clean)
    else:
        first = report.violations[0]
        where = "" if first.layer is None else f" (layer {first.layer})"
        sentence = f"Information flows against the declared order in {plural(len(report.violations), 'place')}. "
        verdict = html.note("bad", html.paragraph(sentence, "The first is ", code(first.module), f"{where}."))
    body = verdict + html.facts(_effort(report))
    if report.violations:
        head = ["kind", "module", "layer", "source", "target", "change"]
        rows = [_violation(violation) for violation in report.violations[:_LISTED]]
        body += html.table(head, rows, text_columns=2, marked=[0])
        if len(report.violations) > _LISTED:
            body += html.paragraph(f"… and {grouped(len(report.violations) - _LISTED)} more.", kind="lead")
    body += _modules(report)
    for remark in report.notes:
        body += html.note("neutral", html.paragraph(remark))
    return Section("audit", "Audit of the model", body)


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
    change = f"{violation.change:.3g}"
    return [violation.kind, code(violation.module), layer, source, target, change]


def _modules(report: AuditReport) -> Html:
    """A square per watched module, a row per layer: where a violation starts and how far it is carried."""
    if not report.modules or len(report.modules) > _MODULES:
        return Html("")
    rows: list[tuple[str, list[Html]]] = []
    for result in report.modules:
        name = "outside" if result.layer is None else f"layer {result.layer}"
        if not rows or rows[-1][0] != name:
            rows.append((name, []))
        rows[-1][1].append(tag("li", title=f"{result.module}: {result.status}", class_=result.status))
    meaning = (("good", "clean"), ("bad", "breaks the order"), ("carried", "carries a break on"))
    key = tag(
        "ul", *(tag("li", tag("span", class_=f"swatch-{kind}"), text) for kind, text in meaning), class_="keyline"
    )
    lines = (tag("div", tag("span", name), tag("ul", *squares)) for name, squares in rows)
    strip = tag("div", *lines, class_="modules")
    return tag("h3", f"{plural(len(report.modules), 'module')} watched, in order of execution") + key + strip
