"""What a mask generates: its order, its Hasse diagram, how receptive fields grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from attnflow._core.markup import grouped, percent, plural, shorten
from attnflow.order.flow import Flow
from attnflow.report import charts, html
from attnflow.report.facts import growth
from attnflow.report.hasse_svg import hasse_svg, runs
from attnflow.report.html import Content, Html, tag
from attnflow.report.subject import Section, Subject

_CLASSES: Final = 8
_WIDE: Final = 640  # pixels above which a diagram takes the width of the page


def order(subject: Subject) -> Section | None:
    """The Hasse diagram and the classes."""
    if not subject.masks:
        return None
    flow = subject.flow
    if flow is None:
        return Section("order", "Order", html.note("neutral", html.paragraph(f"No order: {subject.no_order}.")))
    if flow.size == 0:
        return None
    lead = (
        "Positions that can read each other form a class. An arrow leads from a class to the next one that reads it "
        "(a cover of the order): information flows upwards, and only upwards."
    )
    if flow.num_layers is not None:
        lead += " For a stack of layers, this is the order that repeating the whole stack generates."
    body = html.paragraph(lead, kind="lead") + diagram(subject, flow, (), html.facts(_facts(flow)))
    return Section("order", "Order and Hasse diagram", body + _classes(flow))


def diagram(subject: Subject, flow: Flow, path: Sequence[int], beside: Html) -> Html:
    """The Hasse diagram, a path emphasised, with something beside it, or below it where the diagram is wide."""
    svg = hasse_svg(flow.hasse, labels=subject.labels, highlight=path, standalone=False)
    caption = "Dashed: one layer moves the information past several covers." if "stroke-dasharray" in svg else None
    width = float(svg.split(' width="', 1)[1].split('"', 1)[0])
    return tag(
        "div", html.figure(svg, caption, kind="centre"), beside, class_="beside" if width < _WIDE else "beside wide"
    )


def _facts(flow: Flow) -> list[tuple[str, Content]]:
    hasse, classes = flow.hasse, flow.classes
    lower, upper = {a for a, _ in hasse.edges}, {b for _, b in hasse.edges}
    levels = np.bincount(np.array(hasse.levels, dtype=np.int64))
    largest = max(map(len, classes))
    densities = [percent(mask.density) for mask in flow.masks]
    one = f"{densities[0]} of all" if len(set(densities)) == 1 else "differs by layer"
    rows: list[tuple[str, Content]] = [
        ("Positions", grouped(flow.size)),
        ("Classes", grouped(len(classes))),
        ("Largest class", plural(largest, "position")),
        ("Covers", grouped(len(hasse.edges))),
        ("Levels", f"{grouped(len(levels))}, up to {plural(int(levels.max()), 'class', 'classes')} each"),
        ("Read no other class", plural(len(classes) - len(upper), "class", "classes")),
        ("Read by no other class", plural(len(classes) - len(lower), "class", "classes")),
        ("Pairs in the closure", f"{percent(flow.closure_density)} of all"),
        (
            "Pairs in one layer",
            one,
        ),
        ("Depth", plural(flow.depth, "layer")),
        ("Dense", "yes: one layer does all" if flow.is_dense else "no"),
    ]
    return rows


def _classes(flow: Flow) -> Html:
    count = len(flow.classes)
    below = np.bincount(np.array([b for _, b in flow.hasse.edges], dtype=np.int64), minlength=count)
    above = np.bincount(np.array([a for a, _ in flow.hasse.edges], dtype=np.int64), minlength=count)
    shown = (
        list(range(count)) if count <= _CLASSES + 2 else [*range(_CLASSES // 2), *range(count - _CLASSES // 2, count)]
    )
    rows: list[list[Content]] = []
    for previous, index in zip([-1, *shown], shown, strict=False):
        if index != previous + 1:
            rows.append([f"… {grouped(index - previous - 1)} more", "", "", "", ""])
        members = flow.classes[index]
        rows.append(
            [
                shorten(runs(members), 80),
                grouped(len(members)),
                grouped(flow.hasse.levels[index]),
                grouped(int(below[index])),
                grouped(int(above[index])),
            ]
        )
    title = tag("h3", "Classes, lower ones first, with their covers below and above")
    return title + html.table(["positions", "size", "level", "below", "above"], rows)


def growth_by_layer(subject: Subject) -> Section | None:
    """How much of its final receptive field a position has after each number of layers."""
    flow = subject.flow
    if flow is None or flow.size == 0:
        return None
    grown = growth(flow)
    whole = "every position" if grown.complete else f"{len(grown.positions)} evenly spaced positions"
    layers = plural(flow.depth, "layer")
    if flow.depth == 1:
        first = "After one layer every position has everything that can ever reach it: more layers add no new source."
    else:
        first = f"It takes {layers} until every position has everything that can ever reach it."
    if flow.num_layers is not None and flow.num_layers > flow.depth:
        first += f" The stack has {flow.num_layers}."
    shares = grown.shares
    key = tag(
        "ul",
        tag("li", tag("span", class_="swatch-mean"), "mean"),
        tag("li", tag("span", class_="swatch-range"), "least to largest position"),
        class_="keyline",
    )
    charts_ = tag("div", Html(charts.growth_chart(shares, 640.0)), class_="only-wide") + tag(
        "div", Html(charts.growth_chart(shares, 350.0, 220.0)), class_="only-narrow"
    )
    caption = f"Share of the final receptive field (a row of the closure) after each number of layers, over {whole}."
    picture = html.figure(charts_, caption)
    rows = [
        [
            grouped(layer),
            f"{grown.sizes[layer].mean():.1f}",
            percent(float(shares[layer].min())),
            percent(float(shares[layer].mean())),
            percent(float(shares[layer].max())),
        ]
        for layer in _milestones(len(shares) - 1)
    ]
    numbers = html.table(["layers", "mean size", "least", "mean", "largest"], rows, text_columns=0)
    body = html.paragraph(first) + tag("div", tag("div", key, picture), numbers, class_="pair")
    return Section("growth", "Depth and receptive fields", body)


def _milestones(last: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and the last layer: where growth is worth a row."""
    doubling = [0, *(1 << power for power in range(20) if 1 << power < last)]
    return [*doubling, last] if last else [0]
