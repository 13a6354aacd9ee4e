"""Page sections for orders: the Hasse diagram, receptive fields, and leaking labels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow._core.markup import grouped, percent, plural, runs, shorten
from attnflow.masks.intervals import IntervalRows
from attnflow.order.flow import Flow
from attnflow.order.hasse import Hasse
from attnflow.report import charts, html
from attnflow.report.charts import POSITIVE, Figure, blank, chart
from attnflow.report.displays import describes, draws
from attnflow.report.hasse_svg import hasse_svg
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.page import Context, PagePart, Section
from attnflow.tasks.leaks import Leak, LeakReport

_WIDE: Final = 640  # pixels above which a diagram takes the width of the page
_FEW: Final = 256  # positions up to which the receptive field of every one is followed
_SAMPLE: Final = 64
_POINTS: Final = 160  # layers up to which a chart shows each
_SPREAD: Final = (np.min, np.mean, np.max)
_DRAWN: Final = 2  # leaks with a diagram of their own
_LISTED: Final = 24  # rows of a list before the rest is only counted
_NOTHING: Final = Html("")


@describes(Hasse)
def hasse_part(hasse: Hasse, context: Context) -> PagePart:
    title = f"Hasse diagram of {plural(len(hasse.nodes), 'class', 'classes')}"
    return PagePart(title, [Section("order", "Hasse diagram", diagram(hasse, context.labels))])


def order(flow: Flow, labels: Sequence[str] | None) -> Section:
    lead = (
        "Positions that can read each other form a class. An arrow leads from a class to the next one that reads it "
        "(a cover of the order): information flows upwards, and only upwards."
    )
    if flow.num_layers is not None:
        lead += " For a stack of layers, this is the order that repeating the whole stack generates."
    body = html.paragraph(lead, kind="lead") + diagram(flow.hasse, labels, (), html.facts(_facts(flow)))
    return Section("order", "Order and Hasse diagram", body)


def diagram(hasse: Hasse, labels: Sequence[str] | None, path: Sequence[int] = (), beside: Html = _NOTHING) -> Html:
    """Draws the Hasse diagram with a path emphasised, next to `beside`, or above it if the diagram is wide."""
    svg = hasse_svg(hasse, labels=labels, highlight=path)
    caption = "Dashed: one layer moves the information past several covers." if "stroke-dasharray" in svg else None
    width = float(svg.split(' width="', 1)[1].split('"', 1)[0])
    kind = "beside" if width < _WIDE else "beside wide"
    return tag("div", html.figure(svg, caption, kind="centre natural"), beside, class_=kind)


def reading(flow: Flow) -> str:
    count, levels = len(flow.classes), max(flow.hasse.levels) + 1
    if flow.size == 1:
        return " The only position reads itself."
    if count == 1:
        shape = "Every position can read every other, so that the order is a single class"
    elif not flow.hasse.edges:
        shape = f"Its {plural(count, 'class', 'classes')} read nothing of each other"
    elif levels == count:
        shape = f"Its {grouped(count)} classes form a chain, in which each reads all below it"
    else:
        shape = f"Its {grouped(count)} classes form an order of {plural(levels, 'level')}"
    if flow.depth == 1:
        return f" {shape}; one layer lets everything flow that ever will."
    return f" {shape}; it takes {plural(flow.depth, 'layer')} until everything has flowed."


def numbers(flow: Flow) -> list[tuple[str, Content]]:
    levels = plural(max(flow.hasse.levels) + 1, "level")
    return [
        ("Depth", tag("span", grouped(flow.depth), tag("small", "layer suffices" if flow.is_dense else "layers"))),
        ("Classes", tag("span", grouped(len(flow.classes)), tag("small", f"on {levels}"))),
    ]


def _facts(flow: Flow) -> list[tuple[str, Content]]:
    hasse, count = flow.hasse, len(flow.classes)
    levels = np.bincount(hasse.levels)
    densities = {percent(mask.density) for mask in flow.masks}
    return [
        ("Positions", grouped(flow.size)),
        ("Classes", grouped(count)),
        ("Largest class", plural(max(map(len, flow.classes)), "position")),
        ("Covers", grouped(len(hasse.edges))),
        ("Levels", f"{grouped(len(levels))}, up to {plural(int(levels.max()), 'class', 'classes')} each"),
        ("Read no other class", plural(count - len({upper for _, upper in hasse.edges}), "class", "classes")),
        ("Read by no other class", plural(count - len({lower for lower, _ in hasse.edges}), "class", "classes")),
        ("Pairs in the closure", f"{percent(flow.closure_density)} of all"),
        ("Pairs in one layer", f"{densities.pop()} of all" if len(densities) == 1 else "differs by layer"),
        ("Depth", plural(flow.depth, "layer")),
        ("One layer suffices", "yes" if flow.is_dense else "no"),
    ]


def growth_by_layer(flow: Flow) -> Section:
    sizes, positions = growth(flow)
    shares = sizes / sizes[-1]
    whole = "every position" if len(positions) == flow.size else f"{len(positions)} evenly spaced positions"
    if flow.depth == 1:
        first = "After one layer every position has everything that can ever reach it: more layers add no new source."
    else:
        first = f"It takes {plural(flow.depth, 'layer')} until every position has everything that can ever reach it."
    if flow.num_layers is not None and flow.num_layers > flow.depth:
        first += f" The stack has {flow.num_layers}."
    caption = f"Share of the final receptive field (a row of the closure) after each number of layers, over {whole}."
    picture = charts.in_page(lambda: growth_chart(flow), "Receptive fields by layer", caption)
    last = len(shares) - 1
    milestones = sorted({0, last, *(1 << power for power in range(20) if 1 << power < last)})
    rows = [
        [grouped(layer), f"{sizes[layer].mean():.1f}", *(percent(float(part(shares[layer]))) for part in _SPREAD)]
        for layer in milestones
    ]
    table = html.table(["layers", "mean size", "least", "mean", "largest"], rows, text_columns=0)
    body = html.paragraph(first) + tag("div", picture, table, class_="pair")
    return Section("growth", "Depth and receptive fields", body)


@chart
def growth_chart(flow: Flow, *, title: str | None = None) -> Figure:
    sizes, _ = growth(flow)
    last = len(sizes) - 1
    layers = np.unique(np.linspace(0, last, min(_POINTS, last + 1)).round().astype(np.int64))
    figure = blank(6.4, 2.7)
    axes = figure.add_subplot()
    low, mean, high = (100 * reduce((sizes / sizes[-1])[layers], axis=1) for reduce in _SPREAD)
    axes.fill_between(layers, low, high, color=POSITIVE, alpha=0.16, linewidth=0, label="least to largest position")
    axes.plot(layers, mean, color=POSITIVE, marker="o" if last <= 40 else "", markersize=4, label="mean")
    axes.set(xlabel="layers", ylabel="% of what ever arrives", ylim=(0, 104), title=title or "")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="lower right")
    return figure


def growth(flow: Flow) -> tuple[IntArray, IntArray]:
    """Returns receptive-field sizes, int64[layers + 1, p], and the p positions. Cost: O(p (intervals + n))."""
    n = flow.size
    if n == 0:
        raise ValueError("expected the order of at least one position to show how it grows, got one of none")
    positions = np.arange(n) if n <= _FEW else np.linspace(0, n - 1, _SAMPLE).astype(np.int64)
    if flow.num_layers is not None:
        return flow.growth().numpy()[:, positions], positions
    rows, rank = flow.masks[0].relabelled()
    return _walk(rows, positions if rank is None else rank[positions]), positions


def _walk(rows: IntervalRows, starts: IntArray) -> IntArray:
    count, n = len(starts), rows.num_keys
    seen = np.zeros((count, n), dtype=bool)
    walker, node = np.arange(count), starts
    seen[walker, node] = True
    sizes = [np.ones(count, dtype=np.int64)]
    while True:
        # Only what is new can bring something new; the intervals of a walker are merged before they are spelled out.
        ahead = rows.take(node)
        owner = walker[ahead.row_index()]
        walker, node = IntervalRows.build(owner, ahead.starts, ahead.ends, count, n).expand()
        fresh = ~seen[walker, node]
        walker, node = walker[fresh], node[fresh]
        if len(node) == 0:
            return np.stack(sizes)
        seen[walker, node] = True
        sizes.append(sizes[-1] + np.bincount(walker, minlength=count))


@draws(Flow)
def flow_figure(flow: Flow, *, picture: str = "hasse", **options: Any) -> str | Figure:
    if picture not in ("hasse", "growth"):
        raise ValueError(f'picture must be "hasse" or "growth", got {picture!r}')
    return hasse_svg(flow.hasse, **options) if picture == "hasse" else growth_chart(flow, **options)


@describes(LeakReport)
def leak_part(report: LeakReport, context: Context) -> PagePart:
    leaks, dead = len(report.leaks), len(report.dead)
    reading = f"No label can leak: this is proved for all {grouped(report.num_labels)}."
    if leaks:
        first = report.leaks[0]
        reading = (
            f"{plural(leaks, 'label')} can be read by the position that must predict it; the first "
            f"comes to position {first.position} from {first.carrier} in {plural(len(first.witness) - 1, 'layer')}."
        )
    if dead:
        reading += f" {plural(dead, 'position')} {'reaches' if dead == 1 else 'reach'} no label and could be dropped."
    numbers = [
        ("Leaks", tag("span", grouped(leaks) if leaks else "none", class_="bad-ink" if leaks else "good-ink")),
        ("Dead positions", tag("span", grouped(dead) if dead else "none", class_="bad-ink" if dead else None)),
    ]
    sections = [_leaks(report, context), _idle(report)]
    return PagePart("Leaks", sections, [reading], numbers, failed=not report.ok)


def _leaks(report: LeakReport, context: Context) -> Section:
    if not report.leaks:
        within = "any number of layers" if report.layers is None else plural(report.layers, "layer")
        sentence = f"None of {plural(report.num_labels, 'label')} can be read by the position that predicts it"
        return Section("leaks", "Leaks", html.note("good", html.paragraph(f"{sentence}, within {within}.")))
    count = plural(len(report.leaks), "label")
    sentence = f"{count} can be read by the position that must predict it: the model would learn to copy."
    leaks = [_leak(leak, context, drawn=index < _DRAWN) for index, leak in enumerate(report.leaks[:_LISTED])]
    rest = html.rest(len(report.leaks) - _LISTED)
    return Section("leaks", "Leaks", html.join([html.note("bad", html.paragraph(sentence)), *leaks, rest]))


def _leak(leak: Leak, context: Context, drawn: bool) -> Html:
    data = "" if leak.label.data_index is None else f" (data token {leak.label.data_index})"
    title = tag("h3", f"Position {leak.position} must predict token {leak.label.target_id}{data}")
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
    for layer, (source, target) in enumerate(pairwise(names), 1):
        stays = " (stays)" if source == target else ""
        items.append(tag("li", tag("span", f"layer {layer}"), f" {source} → {target}{stays}"))
    if len(items) > 40:
        items = [*items[:20], tag("li", f"… {len(items) - 40} more layers"), *items[-20:]]
    return tag("ul", *items, class_="path")


def _idle(report: LeakReport) -> Section:
    dead, unsupervised = sorted(report.dead), sorted(report.unsupervised)
    parts: list[Html] = []
    if dead:
        verb = "reaches" if len(dead) == 1 else "reach"
        count = f"{plural(len(dead), 'position')} ({percent(len(dead) / report.num_positions)})"
        sentence = f"{count} {verb} no labelled position: computing it trains nothing."
        parts.append(html.note("bad", html.paragraph(sentence), html.paragraph(code(shorten(runs(dead), 400)))))
    else:
        parts.append(html.note("good", html.paragraph("Every position can reach a labelled one: none is dead.")))
    if unsupervised:
        verb = "has" if len(unsupervised) == 1 else "have"
        sentence = f"{plural(len(unsupervised), 'data token')} {verb} no label: "
        parts.append(html.note("neutral", html.paragraph(sentence, code(shorten(runs(unsupervised), 400)))))
    return Section("dead", "Dead positions and unsupervised tokens", html.join(parts))
