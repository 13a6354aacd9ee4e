"""What a mask generates: its order, its Hasse diagram, how receptive fields grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from attnflow._core.markup import grouped, percent, plural, shorten
from attnflow.order.flow import Flow
from attnflow.order.hasse import Hasse
from attnflow.report import charts, html
from attnflow.report.growth_chart import growth_chart
from attnflow.report.hasse_svg import hasse_svg, runs
from attnflow.report.html import Content, Html, tag
from attnflow.report.mask_facts import growth
from attnflow.report.part import Context, Part, Section

_CLASSES: Final = 8
_WIDE: Final = 640  # pixels above which a diagram takes the width of the page


def hasse_part(hasse: Hasse, context: Context) -> Part:
    """A diagram alone."""
    title = f"Hasse diagram of {plural(len(hasse.nodes), 'class', 'classes')}"
    return Part(title, [Section("order", "Hasse diagram", diagram(hasse, context.labels))])


def order(flow: Flow, labels: Sequence[str] | None) -> Section:
    """The Hasse diagram and the classes."""
    lead = (
        "Positions that can read each other form a class. An arrow leads from a class to the next one that reads it "
        "(a cover of the order): information flows upwards, and only upwards."
    )
    if flow.num_layers is not None:
        lead += " For a stack of layers, this is the order that repeating the whole stack generates."
    body = html.paragraph(lead, kind="lead") + diagram(flow.hasse, labels, (), html.facts(_facts(flow)))
    return Section("order", "Order and Hasse diagram", body + _classes(flow))


def diagram(
    hasse: Hasse,
    labels: Sequence[str] | None,
    path: Sequence[int] = (),
    beside: Html = Html(""),  # noqa: B008
) -> Html:
    """The Hasse diagram, a path emphasised, with something beside it, or below it where the diagram is wide."""
    svg = hasse_svg(hasse, labels=labels, highlight=path, standalone=False)
    caption = "Dashed: one layer moves the information past several covers." if "stroke-dasharray" in svg else None
    width = float(svg.split(' width="', 1)[1].split('"', 1)[0])
    kind = "beside" if width < _WIDE else "beside wide"
    return tag("div", html.figure(svg, caption, kind="centre"), beside, class_=kind)


def reading(flow: Flow) -> str:
    """The order in a sentence."""
    count, size = len(flow.classes), flow.size
    if size == 1:
        return " The only position reads itself."
    if count == 1:
        shape = "Every position can read every other, so that the order is a single class"
    elif not flow.hasse.edges:
        shape = f"Its {plural(count, 'class', 'classes')} read nothing of each other"
    elif max(flow.hasse.levels) == count - 1:
        shape = f"Its {grouped(count)} classes form a chain, in which each reads all below it"
    else:
        shape = f"Its {grouped(count)} classes form an order of {plural(max(flow.hasse.levels) + 1, 'level')}"
    if flow.depth == 1:
        return f" {shape}; one layer lets everything flow that ever will."
    return f" {shape}; it takes {plural(flow.depth, 'layer')} until everything has flowed."


def numbers(flow: Flow) -> list[tuple[str, Content]]:
    """The numbers of an order that head a page."""
    classes, levels = len(flow.classes), max(flow.hasse.levels) + 1
    depth = tag("span", grouped(flow.depth), tag("small", "dense" if flow.is_dense else "layers"))
    return [
        ("Depth", depth),
        ("Classes", tag("span", grouped(classes), tag("small", f"on {plural(levels, 'level')}"))),
    ]


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


def growth_by_layer(flow: Flow) -> Section:
    """How much of its final receptive field a position has after each number of layers."""
    grown = growth(flow)
    whole = "every position" if grown.complete else f"{len(grown.positions)} evenly spaced positions"
    if flow.depth == 1:
        first = "After one layer every position has everything that can ever reach it: more layers add no new source."
    else:
        first = f"It takes {plural(flow.depth, 'layer')} until every position has everything that can ever reach it."
    if flow.num_layers is not None and flow.num_layers > flow.depth:
        first += f" The stack has {flow.num_layers}."
    shares = grown.shares
    caption = f"Share of the final receptive field (a row of the closure) after each number of layers, over {whole}."
    picture = charts.in_page(lambda: growth_chart(flow), "Receptive fields by layer", caption)
    rows = [
        [grouped(layer), f"{grown.sizes[layer].mean():.1f}", *(percent(float(part(shares[layer]))) for part in _PARTS)]
        for layer in _milestones(len(shares) - 1)
    ]
    table = html.table(["layers", "mean size", "least", "mean", "largest"], rows, text_columns=0)
    body = html.paragraph(first) + tag("div", picture, table, class_="pair")
    return Section("growth", "Depth and receptive fields", body)


_PARTS: Final = (np.min, np.mean, np.max)


def _milestones(last: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and the last layer: where growth is worth a row."""
    doubling = [0, *(1 << power for power in range(20) if 1 << power < last)]
    return [*doubling, last] if last else [0]
