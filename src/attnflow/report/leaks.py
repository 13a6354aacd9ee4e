"""What checks of a task found: leaks with their witnesses, positions that serve nothing, a merged task on a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from attnflow._core.markup import grouped, percent, plural, shorten
from attnflow.report import html
from attnflow.report.hasse_svg import runs
from attnflow.report.html import Html, code, tag
from attnflow.report.order import diagram
from attnflow.report.page import Context, Part, Section
from attnflow.tasks.leaks import Leak, LeakReport
from attnflow.tasks.verification import Verification

_DRAWN: Final = 2  # leaks with a diagram of their own
_LISTED: Final = 24  # rows of a list before the rest is only counted


def leak_part(report: LeakReport, context: Context) -> Part:
    """Labels that reach the position that predicts them, each with its witness path by layer."""
    leaks, dead = len(report.leaks), len(report.dead)
    reading = [f"No label can leak: this is proved for all {grouped(report.num_labels)}."]
    if leaks:
        first = report.leaks[0]
        reading = [
            f"{plural(leaks, 'label')} can be read by the position that must predict it; the first "
            f"comes to position {first.position} from {first.carrier} in {plural(len(first.witness) - 1, 'layer')}."
        ]
    if dead:
        reading.append(
            f" {plural(dead, 'position')} {'reaches' if dead == 1 else 'reach'} no label and could be dropped."
        )
    numbers = [
        ("Leaks", tag("span", grouped(leaks) if leaks else "none", class_="bad-ink" if leaks else "good-ink")),
        ("Dead positions", tag("span", grouped(dead) if dead else "none", class_="bad-ink" if dead else None)),
    ]
    sections = [_leaks(report, context), _idle(report)]
    return Part("Leaks", sections, reading, numbers, failed=not report.ok)


def _leaks(report: LeakReport, context: Context) -> Section:
    if not report.leaks:
        within = "any number of layers" if report.layers is None else plural(report.layers, "layer")
        sentence = f"None of {plural(report.num_labels, 'label')} can be read by the position that predicts it"
        return Section("leaks", "Leaks", html.note("good", html.paragraph(f"{sentence}, within {within}.")))
    count = plural(len(report.leaks), "label")
    sentence = f"{count} can be read by the position that must predict it: the model would learn to copy."
    parts = [html.note("bad", html.paragraph(sentence))]
    parts += [_leak(leak, context, drawn=index < _DRAWN) for index, leak in enumerate(report.leaks[:_LISTED])]
    return Section("leaks", "Leaks", html.join([*parts, html.rest(len(report.leaks) - _LISTED)]))


def _leak(leak: Leak, context: Context, drawn: bool) -> Html:
    data = leak.label.data_index
    token = f"token {leak.label.target_id}" + ("" if data is None else f" (data token {data})")
    title = tag("h3", f"Position {leak.position} must predict {token}")
    way = _steps(leak.witness, context.labels)
    if not drawn or context.flow is None or context.flow.size <= max(leak.witness):
        return title + way
    return title + diagram(context.flow.hasse, context.labels, leak.witness, way)


def _steps(path: Sequence[int], labels: Sequence[str] | None) -> Html:
    names = [str(p) if labels is None else f"{p} “{shorten(labels[p], 16)}”" for p in path]
    if len(path) == 1:
        alone = f"Position {names[0]} is itself made of the token that it must predict."
        return tag("ul", tag("li", alone), class_="path")
    items = [tag("li", tag("span", "input"), f" at {names[0]}")]
    for layer, (source, target) in enumerate(pairwise(range(len(path))), 1):
        stays = " (stays)" if path[source] == path[target] else ""
        items.append(tag("li", tag("span", f"layer {layer}"), f" {names[source]} → {names[target]}{stays}"))
    if len(items) > 40:
        items = [*items[:20], tag("li", f"… {len(items) - 40} more layers"), *items[-20:]]
    return tag("ul", *items, class_="path")


def _idle(report: LeakReport) -> Section:
    """Positions that no labelled position reads, and data tokens that nothing predicts."""
    dead, unsupervised = sorted(report.dead), sorted(report.unsupervised)
    parts: list[Html] = []
    if dead:
        count = f"{plural(len(dead), 'position')} ({percent(len(dead) / report.num_positions)})"
        verb = "reaches" if len(dead) == 1 else "reach"
        sentence = f"{count} {verb} no labelled position: computing it trains nothing."
        parts.append(html.note("bad", html.paragraph(sentence), html.paragraph(code(shorten(runs(dead), 400)))))
    else:
        parts.append(html.note("good", html.paragraph("Every position can reach a labelled one: none is dead.")))
    if unsupervised:
        verb = "has" if len(unsupervised) == 1 else "have"
        sentence = f"{plural(len(unsupervised), 'data token')} {verb} no label: "
        parts.append(html.note("neutral", html.paragraph(sentence, code(shorten(runs(unsupervised), 400)))))
    return Section("dead", "Dead positions and unsupervised tokens", html.join(parts))


def verification_part(result: Verification, _: Context) -> Part:
    """How far one pass over a merged task is from its subtasks alone, on a real model."""
    gradients = "not compared" if result.gradient_difference is None else f"{result.gradient_difference:.1e}"
    losses = f"{result.loss_difference:.1e}"
    lead = f"One pass over the merged task against {plural(len(result.tasks), 'subtask')} run alone, on the same model."
    rows = [[str(t.task), f"{t.output_difference:.1e}", f"{t.loss:.4g}"] for t in result.tasks[:_LISTED]]
    body = html.paragraph(lead, kind="lead") + html.facts(
        [
            (
                "Largest relative difference",
                f"{result.output_difference:.1e} of outputs, {losses} of losses, {gradients} of gradients",
            ),
            ("Summed loss", f"{result.merged_loss:.6g}"),
        ]
    )
    body += html.table(["subtask", "output difference", "loss"], rows) + html.rest(len(result.tasks) - _LISTED)
    title = "Merged against its subtasks"
    reading = f"In one pass it gives what its subtasks give, but for {result.output_difference:.1e} of the outputs."
    if not result.ok:
        reading = (
            f"The merged task does NOT give what its subtasks give: outputs differ by {result.output_difference:.1e}, "
            f"losses by {losses}."
        )
        body = html.note("bad", html.paragraph(f"Beyond the tolerance of {result.tolerance:.0e}.")) + body
    return Part(title, [Section("verification", title, body)], [reading], failed=not result.ok)
