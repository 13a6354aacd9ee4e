"""The Hasse diagram as SVG and as plain data: in layers, with information flowing upwards."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from typing import Final

import numpy as np

from attnflow._core import checks
from attnflow._core.markup import columns, element, escape, grouped, number, percent, plural, shorten, visible
from attnflow.order.hasse import Hasse
from attnflow.report import hasse_summary as summary
from attnflow.report import layered_layout as layout
from attnflow.report.hasse_summary import Box, Grouping
from attnflow.report.layered_layout import Placement, Point
from attnflow.report.svg import MONO, SANS, STYLE

Words = tuple[str, str, str]  # first line, second line, tooltip

_HOT: Final = "#d1495b"  # readable on white and on near-black; a page overrides it by the class af-hot
_MARGIN: Final = 14.0
_MAX_WIDTH, _MAX_HEIGHT = 1240.0, 1700.0
_LABEL, _FULL = 20, 400  # characters shown in a box, and in its tooltip
MAX_POINTED: Final = 4096  # positions up to which each one's box is named


def hasse_svg(
    hasse: Hasse,
    *,
    labels: Sequence[str] | None = None,
    highlight: Sequence[int] = (),
    max_nodes: int = 60,
    standalone: bool = True,
) -> str:
    """Draws a Hasse diagram as one `<svg>` for light and dark pages and for screen readers.

    Beyond `max_nodes` boxes it is summarised, and the picture says how: chains become one box, then classes with the
    same neighbours (only names are lost), then classes with equally many covers below and above. Where that does not
    help, it draws a profile by level. `highlight` is a path with the layer of each move; `standalone` adds the colours
    that a page's style sheet sets otherwise.
    """
    checks.integer("max_nodes", max_nodes, 2)
    class_of = {position: index for index, node in enumerate(hasse.nodes) for position in node}
    if labels is not None and len(labels) != len(class_of):
        raise ValueError(f"expected a label for each of {len(class_of)} positions, got {len(labels)}")
    for position in highlight:
        if position not in class_of:
            raise ValueError(f"highlight must hold positions of the diagram, got {position!r}")
    path = [class_of[position] for position in highlight]
    if not hasse.nodes:
        return page("", 260.0, 30.0, ["No positions: the diagram is empty."], standalone, "Empty Hasse diagram")
    for grouping in summary.groupings(hasse, max_nodes, list(dict.fromkeys(path))):
        drawn = _boxes(hasse, grouping, labels, path, highlight, standalone)
        if drawn is not None:
            return drawn
    return _profile(hasse, path, highlight, standalone)


def _boxes(
    hasse: Hasse,
    grouping: Grouping,
    labels: Sequence[str] | None,
    path: list[int],
    highlight: Sequence[int],
    standalone: bool,
) -> str | None:
    """Draws the diagram as boxes, or returns None if it is too large for a page."""
    box_of = grouping.box_of()
    stops = [box_of[index] for index in path]
    hot = {(a, b): layer for layer, (a, b) in reversed(list(enumerate(pairwise(stops), 1))) if a != b}
    edges = list(grouping.links)
    edges += [edge for edge in hot if edge not in grouping.links]  # a layer may pass several covers in one move
    arranged = arrange(hasse, grouping, labels, edges)
    if arranged is None:
        return None
    texts, sizes, placement = arranged
    routes = dict(zip(edges, placement.routes, strict=True))
    parts = [
        _line(routes[edge], hot.get(edge), _edge_note(grouping, edge), grouping.links.get(edge))
        for edge in sorted(edges, key=hot.__contains__)
    ]
    for index, box in enumerate(grouping.boxes):
        several = len(box.classes) > 1
        parts.append(_box(placement.centres[index], sizes[index], texts[index], several, index in stops))
    parts += [_badge(routes[edge], hot[edge]) for edge in edges if edge in hot]
    caption = _caption(hasse, grouping, highlight, sum(a == b for a, b in pairwise(stops)))
    what = f"Hasse diagram of {plural(len(hasse.nodes), 'class', 'classes')}"
    return page("".join(parts), placement.width, placement.height, caption, standalone, what)


def arrange(
    hasse: Hasse, grouping: Grouping, labels: Sequence[str] | None, edges: Sequence[tuple[int, int]]
) -> tuple[list[Words], list[tuple[float, float]], Placement] | None:
    """Returns the texts, sizes and placement of the boxes, or None if they are too large for a page."""
    texts = [_text(hasse, box, labels) for box in grouping.boxes]
    sizes = [(max(44.0, 20 + max(7.4 * columns(a), 6.4 * columns(b))), 42.0 if b else 28.0) for a, b, _ in texts]
    placement = layout.place(sizes, grouping.levels, edges)
    if placement.width > _MAX_WIDTH or placement.height > _MAX_HEIGHT:
        return None
    return texts, sizes, placement


def _text(hasse: Hasse, box: Box, labels: Sequence[str] | None) -> Words:
    """Returns (first line, second line, tooltip) of a box."""
    positions = sorted(position for index in box.classes for position in hasse.nodes[index])
    where, count = runs(positions), len(box.classes)
    tooltip = f"{plural(count, 'class', 'classes')}, {plural(len(positions), 'position')}: {shorten(where, _FULL)}"
    if count == 1:
        words = "" if labels is None else " ".join(visible(labels[position]) or "∅" for position in positions[:64])
        size = "" if len(positions) == 1 else f"{grouped(len(positions))} positions"
        if labels is None:
            return shorten(where, _LABEL), size, tooltip
        return shorten(words, _LABEL), shorten(where, _LABEL), f"{tooltip} · {shorten(words, _FULL)}"
    sizes = {len(hasse.nodes[index]) for index in box.classes}
    of = f" of {min(sizes)}" if len(sizes) == 1 and max(sizes) > 1 else ""
    if box.is_chain and box.parts == 1:
        first, last = (hasse.nodes[box.classes[end]][0] for end in (0, -1))
        return f"chain of {grouped(count)}", f"{first} → … → {last}", f"Chain of {tooltip}"
    if box.is_chain:
        return f"{grouped(box.parts)} chains", shorten(f"{grouped(count)} classes{of}", _LABEL + 4), tooltip
    if box.inner_edges:
        inside = f"{plural(box.inner_edges, 'cover')} inside"
        return f"{grouped(count)} classes{of}", inside, f"{tooltip}; {inside}"
    return f"× {grouped(count)}", f"{min(sizes)} positions each" if of else shorten(where, _LABEL), tooltip


def runs(positions: Sequence[int]) -> str:
    """Ascending positions as text, consecutive ones joined.

    >>> runs([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7, 8'
    """
    steps = {b - a for a, b in pairwise(positions)} if len(positions) > 4 else set[int]()
    if len(steps) == 1 and steps != {1}:
        return f"{positions[0]}, {positions[1]}, …, {positions[-1]}"
    parts: list[str] = []
    for _, run in groupby(enumerate(positions), lambda item: item[1] - item[0]):
        numbers = [position for _, position in run]
        parts += [f"{numbers[0]}–{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
        if len(parts) > 200:
            return ", ".join(parts) + ", …"
    return ", ".join(parts)


def _edge_note(grouping: Grouping, edge: tuple[int, int]) -> str:
    lower, upper = (len(grouping.boxes[end].classes) for end in edge)
    count = grouping.links.get(edge)
    if count is None:
        return "information moves here in one layer, past several covers"
    if lower == upper == 1:
        return ""
    return f"{plural(count, 'cover')}: {number(count / upper)} below each of {plural(upper, 'class', 'classes')}"


def bent(route: Sequence[Point]) -> str:
    """Returns the path along a route, straight through rows and curved between them."""
    path = f"M{pair(route[0])}"
    for index, (x, y) in enumerate(route[1:], 1):
        before_x, before_y = route[index - 1]
        if index % 2 or abs(x - before_x) < 0.01:
            path += "" if (x, y) == (before_x, before_y) else f"L{pair((x, y))}"
        else:
            bend = (before_y - y) * 0.5
            path += f"C{pair((before_x, before_y - bend))} {pair((x, y + bend))} {pair((x, y))}"
    return path


def _line(route: list[Point], layer: int | None, note: str, count: int | None) -> str:
    x, y = route[-1]
    hot = layer is not None
    colour = _HOT if hot else "currentColor"
    kind = "af-edge af-hot" if hot else "af-edge"
    dash = None if count else "5 4"
    width = (2.25 if hot else 1.1) + 0.8 * math.log10(count or 1)
    head = element("path", d=f"M{pair((x - 3.5, y + 7))}L{pair((x, y))}L{pair((x + 3.5, y + 7))}Z", fill=colour)
    stroke = element("path", d=bent(route), fill="none", stroke=colour, stroke_width=width, stroke_dasharray=dash)
    title = element("title", escape(note)) if note else ""
    return element("g", title + stroke + head, class_=kind, opacity=None if hot else "0.5")


def _badge(route: list[Point], layer: int) -> str:
    """Writes the layer in which information moves on the first bend of its line."""
    (x0, y0), (x1, y1) = route[1], route[2]
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    width = 9 + 6.5 * len(str(layer))
    disc = element("rect", x=x - width / 2, y=y - 8, width=width, height=16, rx=8, fill=_HOT)
    text = element("text", str(layer), x=x, y=y + 4, text_anchor="middle", font_size=11, font_weight=600, fill="#fff")
    return element("g", element("title", f"layer {layer}") + disc + text, class_="af-badge")


def _box(centre: Point, size: tuple[float, float], text: Words, several: bool, hot: bool) -> str:
    (x, y), (width, height) = centre, size
    first, second, tooltip = text
    colour = _HOT if hot else "currentColor"
    common = {"width": width, "height": height, "rx": 7, "stroke": colour, "stroke_width": 2.0 if hot else 1.2}
    parts = [element("title", escape(tooltip))]
    left, top = x - width / 2, y - height / 2
    if several:
        parts.append(element("rect", x=left + 4, y=top - 4, fill="none", stroke_opacity=0.45, **common))
    parts.append(element("rect", x=left, y=top, class_="af-face", fill="currentColor", fill_opacity=0.07, **common))
    ink = {"fill": "currentColor"}
    parts.append(element("text", escape(first), x=x, y=y - 3 if second else y + 4.3, font_size=12, **ink))
    if second:
        parts.append(element("text", escape(second), x=x, y=y + 12, font_size=10.4, **ink, fill_opacity=0.72))
    kind = "af-node" + (" af-several" if several else "") + (" af-hot" if hot else "")
    return element("g", "".join(parts), class_=kind, text_anchor="middle", font_family=MONO)


def _caption(hasse: Hasse, grouping: Grouping, highlight: Sequence[int], inside: int) -> list[str]:
    lines: list[str] = []
    if grouping.how:
        shown = plural(len(grouping.boxes), "box", "boxes")
        total = f"{plural(len(hasse.nodes), 'class', 'classes')} and {plural(len(hasse.edges), 'cover')}"
        lines.append(f"Summarised: {total} drawn as {shown}; {grouping.how}.")
        if max(grouping.links.values(), default=1) > 1:
            lines.append("A thick line stands for many covers.")
    if len(highlight) > 1:
        within = "all" if inside == len(highlight) - 1 else str(inside)
        stays = f" ({within} of its moves stay inside a box)" if inside else ""
        lines.append(
            f"Emphasised: the path of the information from {highlight[0]} to {highlight[-1]}, by layer{stays}."
        )
    return lines


def _profile(hasse: Hasse, path: list[int], highlight: Sequence[int], standalone: bool) -> str:
    """Draws one bar for each level or band of levels, as long as its number of classes."""
    bands = summary.bands(hasse)
    widest = max(band.classes for band in bands)
    step, axis, reach = 26.0, 300.0, 300.0
    parts: list[str] = []
    heights: dict[int, float] = {}  # by level
    for index, band in enumerate(bands):
        y = (len(bands) - index - 0.5) * step
        heights |= dict.fromkeys(range(band.first_level, band.last_level + 1), y)
        length = max(3.0, reach * band.classes / widest)
        bar = {"x": axis - length / 2, "y": y - 8, "width": length, "height": 16, "rx": 4}
        ink = {"y": y + 4, "font_size": 12, "fill": "currentColor"}
        ends = [grouped(level) for level in (band.first_level, band.last_level)]
        name = f"level {ends[0]}" if ends[0] == ends[1] else f"levels {ends[0]}–{ends[1]}"
        count = plural(band.classes, "class", "classes")
        note = f"{name}: {count}, {plural(band.positions, 'position')}, {plural(band.covers, 'cover')} from below"
        pieces = [
            element("title", escape(note)),
            element("rect", **bar, fill="currentColor", fill_opacity=0.28),
            element("text", escape(name), x=0, **ink, fill_opacity=0.72),
            element("text", count, x=axis + reach / 2 + 14, **ink),
        ]
        parts.append(element("g", "".join(pieces), class_="af-band"))
    marks = list(dict.fromkeys((axis, heights[hasse.levels[index]]) for index in path))
    if marks:
        dots = [element("circle", cx=x, cy=y, r=4.5, fill=_HOT) for x, y in marks]
        stroke = element("path", d="M" + "L".join(map(pair, marks)), fill="none", stroke=_HOT, stroke_width=2.25)
        parts.append(element("g", stroke + "".join(dots), class_="af-hot"))
    total = f"{plural(len(hasse.nodes), 'class', 'classes')} and {plural(len(hasse.edges), 'cover')}"
    share = percent(sum(len(node) == 1 for node in hasse.nodes) / len(hasse.nodes))
    caption = [
        f"Summarised: {total}, too irregular to draw as boxes. Bars count the classes on each level "
        f"(the longest chain below a class); information flows upwards. {share} of the classes are single positions."
    ]
    if len(highlight) > 1:
        caption.append(f"Emphasised: the levels on the path from {highlight[0]} to {highlight[-1]}.")
    what = f"Profile of a Hasse diagram of {total}"
    return page("".join(parts), axis + reach / 2 + 120, len(bands) * step, caption, standalone, what)


def page(body: str, width: float, height: float, caption: Sequence[str], standalone: bool, what: str) -> str:
    """Returns the whole `<svg>`: the drawing centred, the wrapped caption below it."""
    inner = max(width, 340.0 if caption else 0.0)
    lines = [line for text in caption for line in textwrap.wrap(text, max(24, int(inner / 6.1)))]
    full_width, full_height = inner + 2 * _MARGIN, height + 2 * _MARGIN + (8 + 17 * len(lines) if lines else 0)
    drawing = element("g", body, transform=f"translate({pair(((full_width - width) / 2, _MARGIN))})")
    text = "".join(
        element("text", escape(line), x=_MARGIN, y=height + _MARGIN + 24 + 17 * index)
        for index, line in enumerate(lines)
    )
    if text:
        text = element("g", text, class_="af-caption", font_size=11.5, fill="currentColor", fill_opacity=0.75)
    return element(
        "svg",
        (STYLE if standalone else "") + element("title", escape(what)) + drawing + text,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(full_width)} {number(full_height)}",
        width=full_width,
        height=full_height,
        role="img",
        class_="af-svg af-page" if standalone else "af-svg",
        font_family=SANS,
    )


def pair(point: Point) -> str:
    """Formats a point of a path."""
    return f"{number(point[0])},{number(point[1])}"


def diagram(hasse: Hasse, labels: Sequence[str] | None, max_boxes: int = 60) -> dict[str, object]:
    """Returns the diagram as plain data: `boxes`, `lines` and a `caption`, or `bands` if it is too irregular.

    `box_of` gives the box of each position, up to 4,096 positions; `max_boxes` works as in `hasse_svg`.
    """
    for grouping in summary.groupings(hasse, max_boxes):
        drawn = _plain_boxes(hasse, grouping, labels)
        if drawn is not None:
            return drawn
    total = f"{plural(len(hasse.nodes), 'class', 'classes')} and {plural(len(hasse.edges), 'cover')}"
    bands = [asdict(band) for band in summary.bands(hasse)]
    return {"bands": bands, "caption": f"{total}, too irregular to draw as boxes: classes by level."}


def _plain_boxes(hasse: Hasse, grouping: Grouping, labels: Sequence[str] | None) -> dict[str, object] | None:
    edges = list(grouping.links)
    arranged = arrange(hasse, grouping, labels, edges)
    if arranged is None:
        return None
    texts, sizes, placement = arranged
    boxes = [
        {"x": x, "y": y, "width": width, "height": height, "texts": words, "several": len(box.classes) > 1}
        for (x, y), (width, height), words, box in zip(placement.centres, sizes, texts, grouping.boxes, strict=True)
    ]
    lines = [
        {"lower": edge[0], "upper": edge[1], "path": bent(route), "end": route[-1], "count": grouping.links[edge]}
        for edge, route in zip(edges, placement.routes, strict=True)
    ]
    content: dict[str, object] = {"boxes": boxes, "lines": lines, "width": placement.width, "height": placement.height}
    content["caption"] = _plain_caption(hasse, grouping)
    positions = sum(len(node) for node in hasse.nodes)
    if positions <= MAX_POINTED:
        box_of = np.zeros(positions, dtype=np.int64)
        for index, box in enumerate(grouping.boxes):
            for number in box.classes:
                box_of[list(hasse.nodes[number])] = index
        content["box_of"] = box_of.tolist()
    return content


def _plain_caption(hasse: Hasse, grouping: Grouping) -> str:
    if not grouping.how:
        return ""
    drawn = f"{grouped(len(hasse.nodes))} classes drawn as {plural(len(grouping.boxes), 'box', 'boxes')}"
    return f"Summarised: {drawn}; {grouping.how}."


def runs_of(values: Sequence[int]) -> list[list[int]]:
    """Equal neighbours as [first, last (excluded), value], without those that are negative.

    >>> runs_of([-1, 0, 0, 2])
    [[1, 3, 0], [3, 4, 2]]
    """
    array = np.asarray(values)
    cuts = [0, *(np.flatnonzero(np.diff(array)) + 1).tolist(), len(array)] if len(array) else []
    return [[first, last, int(array[first])] for first, last in pairwise(cuts) if array[first] >= 0]
