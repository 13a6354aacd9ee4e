"""The Hasse diagram as SVG and as plain data: in layers, with information flowing upwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from attnflow._core import checks
from attnflow._core.markup import columns, element, escape, grouped, number, plural, runs, shorten, visible
from attnflow.order.hasse import Hasse
from attnflow.report import hasse_summary as summary
from attnflow.report import layered_layout as layout
from attnflow.report import svg
from attnflow.report.displays import draws
from attnflow.report.hasse_summary import Box, Grouping
from attnflow.report.layered_layout import Point
from attnflow.report.svg import HOT, MONO, framed, pair

Words = tuple[str, str, str]  # first line, second line, tooltip
Frame = tuple[float, float, float, float]  # centre, width and height

_MAX_WIDTH, _MAX_HEIGHT = 996.0, 1100.0  # the width is a page's on a screen of 1,280 pixels
_TALL: Final = 700.0  # above which no strip of boxes is drawn, four times as high as wide
_BESIDE: Final = 540.0  # width beside the studio's matrix, for parts that can stand below one another
_COMFORTABLE: Final = 560.0  # height up to which boxes in a row keep their distance
_LABEL, _FULL = 20, 400  # characters shown in a box, and in its tooltip
MOST: Final = 60  # boxes that are drawn unless a number is asked for
MAX_POINTED: Final = 4096  # positions up to which each one's box is named


@draws(Hasse)
def hasse_svg(
    hasse: Hasse,
    *,
    labels: Sequence[str] | None = None,
    highlight: Sequence[int] = (),
    max_nodes: int | None = None,
    title: str | None = None,
) -> str:
    """Beyond `max_nodes` boxes it is summarised, as `groupings` says; `highlight` is a path, one layer a move."""
    if max_nodes is not None:
        checks.integer("max_nodes", max_nodes, 2)
    class_of = {position: index for index, node in enumerate(hasse.nodes) for position in node}
    if labels is not None and len(labels) != len(class_of):
        raise ValueError(f"expected a label for each of {len(class_of)} positions, got {len(labels)}")
    for position in highlight:
        if position not in class_of:
            raise ValueError(f"highlight must hold positions of the diagram, got {position!r}")
    if not hasse.nodes:
        return framed("", 260.0, 30.0, ["No positions: the diagram is empty."], "Empty Hasse diagram", title)
    drawn = _arranged(hasse, labels, max_nodes, [class_of[position] for position in highlight], _MAX_WIDTH)
    grouping, stops = drawn.grouping, drawn.stops
    hot = {(a, b): layer for layer, (a, b) in reversed(list(enumerate(pairwise(stops), 1))) if a != b}
    parts = [
        _line(drawn.routes[edge], hot.get(edge), _edge_note(grouping, edge), grouping.links.get(edge))
        for edge in sorted(drawn.routes, key=hot.__contains__)
    ]
    for index, (group, text, frame) in enumerate(zip(grouping.boxes, drawn.texts, drawn.frames, strict=True)):
        parts.append(box(frame, text, len(group.classes) > 1, index in stops))
    parts += [_badge(route, hot[edge]) for edge, route in drawn.routes.items() if edge in hot]
    caption = _summary(hasse, grouping)
    if max(grouping.links.values(), default=1) > 1:
        caption.append("A thick line stands for many covers.")
    if len(highlight) > 1:
        inside = sum(a == b for a, b in pairwise(stops))
        within = "all" if inside == len(highlight) - 1 else str(inside)
        stays = f" ({within} of its moves stay inside a box)" if inside else ""
        way = f"from {highlight[0]} to {highlight[-1]}"
        caption.append(f"Emphasised: the path of the information {way}, by layer{stays}.")
    what = f"Hasse diagram of {plural(len(hasse.nodes), 'class', 'classes')}"
    return framed("".join(parts), drawn.width, drawn.height, caption, what, title)


def diagram(hasse: Hasse, labels: Sequence[str] | None) -> dict[str, object]:
    """Returns plain data; `box_of` gives the box of each position, up to 4,096 positions."""
    drawn = _arranged(hasse, labels, None, [], _BESIDE)
    boxes = [
        {"x": x, "y": y, "width": width, "height": height, "texts": words, "several": len(box.classes) > 1}
        for (x, y, width, height), words, box in zip(drawn.frames, drawn.texts, drawn.grouping.boxes, strict=True)
    ]
    lines = [
        {"lower": edge[0], "upper": edge[1], "path": bent(route), "end": route[-1], "count": drawn.grouping.links[edge]}
        for edge, route in drawn.routes.items()
    ]
    content: dict[str, object] = {"boxes": boxes, "lines": lines, "width": drawn.width, "height": drawn.height}
    content["caption"] = " ".join(_summary(hasse, drawn.grouping))
    box_of = {place: box for index, box in drawn.grouping.box_of().items() for place in hasse.nodes[index]}
    if len(box_of) <= MAX_POINTED:
        content["box_of"] = [box_of[position] for position in range(len(box_of))]
    return content


@dataclass(frozen=True)
class _Arranged:
    grouping: Grouping
    texts: list[Words]
    frames: list[Frame]
    routes: dict[tuple[int, int], list[Point]]
    stops: list[int]
    width: float
    height: float


def _arranged(
    hasse: Hasse, labels: Sequence[str] | None, max_nodes: int | None, path: list[int], width: float
) -> _Arranged:
    """Arranges all classes if `max_nodes` says so, or else the finest grouping that fits on a page.

    A layer may pass several covers, so moves are lines, too.
    """
    arranged: _Arranged | None = None
    whole = max_nodes is not None and len(hasse.nodes) <= max_nodes
    pinned = list(dict.fromkeys(path))
    for grouping in [summary.classes(hasse)] if whole else summary.groupings(hasse, max_nodes or MOST, pinned):
        box_of = grouping.box_of()
        stops = [box_of[index] for index in path]
        edges = list(dict.fromkeys([*grouping.links, *((a, b) for a, b in pairwise(stops) if a != b)]))
        texts = [_text(hasse, box, labels) for box in grouping.boxes]
        sizes = [(max(44.0, 20 + max(7.4 * columns(a), 6.4 * columns(b))), 42.0 if b else 28.0) for a, b, _ in texts]
        steps, height = max(grouping.levels), max(height for _, height in sizes)
        gap = min(40.0, max(16.0, (_COMFORTABLE - height * (steps + 1)) / max(1, steps)))
        placed = layout.shelved(sizes, grouping.levels, edges, width, gap)
        frames = [(*centre, *size) for centre, size in zip(placed.centres, sizes, strict=True)]
        routes = dict(zip(edges, placed.routes, strict=True))
        arranged = _Arranged(grouping, texts, frames, routes, stops, placed.width, placed.height)
        is_strip = placed.height > max(_TALL, 4 * placed.width)
        if placed.width <= _MAX_WIDTH and placed.height <= _MAX_HEIGHT and not is_strip:
            break
    assert arranged is not None
    return arranged


def _text(hasse: Hasse, box: Box, labels: Sequence[str] | None) -> Words:
    positions = sorted(position for index in box.classes for position in hasse.nodes[index])
    where, count = runs(positions), len(box.classes)
    tooltip = f"{plural(count, 'class', 'classes')}, {plural(len(positions), 'position')}: {shorten(where, _FULL)}"
    names = None if labels is None else [visible(labels[position]) or "∅" for position in positions[:_FULL]]
    words = " ".join(names or ())
    tooltip += f" · {shorten(words, _FULL)}" if names else ""
    if count == 1:
        size = "" if len(positions) == 1 else f"{grouped(len(positions))} positions"
        if labels is None:
            return shorten(where, _LABEL), size, tooltip
        return shorten(words, _LABEL), shorten(where, _LABEL), tooltip
    sizes = {len(hasse.nodes[index]) for index in box.classes}
    of = f" of {min(sizes)}" if len(sizes) == 1 and max(sizes) > 1 else ""
    if box.is_chain and box.parts == 1:
        first = [hasse.nodes[index][0] for index in box.classes]
        links = [str(place) if labels is None else shorten(visible(labels[place]) or "∅", 10) for place in first]
        shown = links if count <= 3 else [links[0], "…", links[-1]]
        return f"chain of {grouped(count)}", " → ".join(shown), f"Chain of {tooltip}"
    if box.is_chain:
        return f"{grouped(box.parts)} chains", shorten(words or f"{grouped(count)} classes{of}", _LABEL + 4), tooltip
    if box.inner_edges:
        inside = f"{plural(box.inner_edges, 'cover')} inside"
        return f"{grouped(count)} classes{of}", shorten(words or inside, _LABEL + 4), f"{tooltip}; {inside}"
    return (
        f"× {grouped(count)}",
        f"{min(sizes)} positions each" if of and not words else shorten(words or where, _LABEL),
        tooltip,
    )


def _edge_note(grouping: Grouping, edge: tuple[int, int]) -> str:
    lower, upper = (len(grouping.boxes[end].classes) for end in edge)
    count = grouping.links.get(edge)
    if count is None:
        return "information moves here in one layer, past several covers"
    if lower == upper == 1:
        return ""
    return f"{plural(count, 'cover')}: {number(count / upper)} below each of {plural(upper, 'class', 'classes')}"


def bent(route: Sequence[Point]) -> str:
    path = f"M{pair(route[0])}"
    for index, (x, y) in enumerate(route[1:], 1):
        before_x, before_y = route[index - 1]
        if index % 2 or abs(x - before_x) < 0.01:
            path += "" if (x, y) == (before_x, before_y) else f"L{pair((x, y))}"
        else:
            bend = (before_y - y) * 0.5
            path += f"C{pair((before_x, before_y - bend))} {pair((x, y + bend))} {pair((x, y))}"
    return path


def arrow_head(x: float, y: float, half: float, tail: float) -> str:
    return f"M{pair((x - half, y + tail))}L{pair((x, y))}L{pair((x + half, y + tail))}Z"


def _line(route: list[Point], layer: int | None, note: str, count: int | None) -> str:
    x, y = route[-1]
    hot = layer is not None
    colour, kind = (HOT, "af-edge af-hot") if hot else ("currentColor", "af-edge")
    dash = None if count else "5 4"
    width = (2.25 if hot else 1.1) + 0.8 * math.log10(count or 1)
    head = element("path", d=arrow_head(x, y, 3.5, 7.0), fill=colour)
    stroke = element("path", d=bent(route), fill="none", stroke=colour, stroke_width=width, stroke_dasharray=dash)
    title = element("title", escape(note)) if note else ""
    return element("g", title + stroke + head, class_=kind, opacity=None if hot else "0.5")


def _badge(route: list[Point], layer: int) -> str:
    (x0, y0), (x1, y1) = route[1], route[2]
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    width = 9 + 6.5 * len(str(layer))
    disc = element("rect", x=x - width / 2, y=y - 8, width=width, height=16, rx=8, fill=HOT)
    text = element("text", str(layer), x=x, y=y + 4, text_anchor="middle", font_size=11, font_weight=600, fill="#fff")
    return element("g", element("title", f"layer {layer}") + disc + text, class_="af-badge")


def box(frame: Frame, text: Words, several: bool = False, hot: bool = False) -> str:
    """Draws a box with one or two lines; `several` puts another one behind it."""
    x, y, width, height = frame
    first, second, tooltip = text
    colour = HOT if hot else "currentColor"
    common = {"width": width, "height": height, "rx": 7, "stroke": colour, "stroke_width": 2.0 if hot else 1.2}
    parts = [element("title", escape(tooltip))]
    left, top = x - width / 2, y - height / 2
    if several:
        parts.append(element("rect", x=left + 4, y=top - 4, fill="none", stroke_opacity=0.45, **common))
    parts.append(element("rect", x=left, y=top, class_="af-face", fill="currentColor", fill_opacity=0.07, **common))
    parts.append(svg.text(first, x, y - 3 if second else y + 4.3, 12))
    if second:
        parts.append(svg.text(second, x, y + 12, 10.4, opacity=0.72))
    kind = "af-node" + (" af-several" if several else "") + (" af-hot" if hot else "")
    return element("g", "".join(parts), class_=kind, text_anchor="middle", font_family=MONO)


def _summary(hasse: Hasse, grouping: Grouping) -> list[str]:
    if not grouping.how:
        return []
    shown = plural(len(grouping.boxes), "box", "boxes")
    total = f"{plural(len(hasse.nodes), 'class', 'classes')} and {plural(len(hasse.edges), 'cover')}"
    return [f"Summarised: {total} drawn as {shown}; {grouping.how}."]


def runs_of(values: Sequence[int]) -> list[list[int]]:
    """Equal neighbours as [first, last (excluded), value], without those that are negative.

    >>> runs_of([-1, 0, 0, 2])
    [[1, 3, 0], [3, 4, 2]]
    """
    array = np.asarray(values)
    cuts = [0, *(np.flatnonzero(np.diff(array)) + 1).tolist(), len(array)] if len(array) else []
    return [[first, last, int(array[first])] for first, last in pairwise(cuts) if array[first] >= 0]
