"""The flow of one answer: tokens across, layers up, lines as wide as what they carry, entries as marks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from attnflow._core import checks
from attnflow._core.markup import columns, element, escape, percent, plural, shorten, token_label
from attnflow.explain.explanation import Edge, Explanation, Source
from attnflow.report.charts import SERIES, signed
from attnflow.report.displays import draws
from attnflow.report.svg import HOT, root

_LINES, _MARKS, STRONGEST = 60, 12, 5  # lines; entries by what they carry, and by effect
_NAMED: Final = 7  # lines and marks whose names are written into the picture
BROAD, NARROW = 980, 358  # pixels: a page on a screen, and on a telephone
_WIDEST: Final = 9.0  # pixels of the strongest line
_MARGIN: Final = 14.0
_TALL: Final = 520.0  # pixels of all layers
Place = tuple[str, int]  # a half, "" or "encoder", and a position in it


@dataclass(frozen=True)
class _Picture:
    """Where things are drawn: `x` of each token that is shown, and the height of each layer."""

    result: Explanation
    edges: Sequence[Edge]
    marks: Sequence[Source]
    x: dict[Place, float]
    gaps: Sequence[float]  # where tokens are folded
    left: float
    right: float
    top: float
    column: float

    @cached_property
    def depth(self) -> int:
        return max([len(self.result.arrived) - 1, *(edge.layer + 1 for edge in self.edges)])

    @property
    def pitch(self) -> float:
        return min(90.0, max(4.0, _TALL / max(self.depth, 1)))

    @property
    def bottom(self) -> float:
        return self.top + self.pitch * self.depth

    def y(self, layer: int | float) -> float:
        return self.bottom - layer * self.pitch

    @cached_property
    def largest(self) -> float:
        return max((abs(item.carried) for item in (*self.edges, *self.marks)), default=0.0) or 1.0


def ends(edge: Edge) -> tuple[Place, Place]:
    """The sending and the receiving token of an edge."""
    sends, receives = {"encoder": ("encoder", "encoder"), "cross": ("encoder", "")}.get(edge.half, ("", ""))
    return (sends, edge.key), (receives, edge.query)


def answering(result: Explanation) -> int:
    """The token where the answer is read; of a whole sequence, the one where most arrives."""
    return int(result.arrived[-1].abs().argmax()) if result.position is None else result.position


def _picture(result: Explanation, width: int, lines: int) -> _Picture:
    narrow = width < 600
    left, right = 30.0, width - (74.0 if narrow else 150.0)
    least = 17.0 if narrow else 30.0
    room = int((right - left) / least)
    places: list[Place] = [("encoder", at) for at in range(len(result.encoder_texts))]
    places += [("", at) for at in range(len(result.texts))]
    entries = sorted(result.entries, key=lambda entry: -abs(entry.carried))[:_MARKS]
    entries += [entry for entry in result.entries[:STRONGEST] if entry not in entries]
    kept = dict.fromkeys([("", answering(result))])
    if len(places) + bool(result.encoder_texts) > room:
        wanted = (place for edge in (*result.leaks, *result.edges) for place in ends(edge))
        for place in (*wanted, *((entry.half, entry.position or 0) for entry in entries)):
            if len(kept) < max(2, int(room / 1.5)):
                kept.setdefault(place)
        places = [place for place in places if place in kept]
    edges = [edge for edge in result.edges if all(place in places for place in ends(edge))][:lines]
    marks = [entry for entry in entries if (entry.half, entry.position) in places]
    before: Place = (places[0][0], -1)
    slots, folds = 0.0, list[float]()
    at: dict[Place, float] = {}
    for place in places:
        if place != (before[0], before[1] + 1):
            folds.append(slots)
            slots += 0.5
        at[place], before = slots + 0.5, place
        slots += 1
    column = min(64.0, (right - left) / slots)
    x = {place: left + column * slot for place, slot in at.items()}
    folded = [left + column * (slot + 0.25) for slot in folds]
    return _Picture(result, edges, marks, x, folded, left, left + column * slots, 44.0, column)


@draws(Explanation)
def explanation_svg(result: Explanation, *, width: int = BROAD, lines: int = _LINES, title: str | None = None) -> str:
    """Draws the flow of an answer; tokens that the strongest lines do not touch are folded where room is short."""
    checks.integer("width", width, 240)
    picture = _picture(result, width, checks.integer("lines", lines, 1))
    heading = verdict(result) if title is None else title
    words, height = _tokens(picture)
    parts = [
        *([written(shorten(heading, width // 7), 0, 14, font_size=13, font_weight=600)] if heading.strip() else []),
        *_frame(picture), *_stream(picture), *_lines(picture), *_marks(picture), *_bars(picture, width), *words,
    ]  # fmt: skip
    legend, height = _legend(picture, width, height)
    what = f"The flow of the answer {result.answer!r} of {result.model}"
    margin = _MARGIN if heading.strip() else 0.0  # a page has its own
    drawing = element("g", "".join([*parts, *legend]), transform=f"translate({margin:g} {margin / 2:g})")
    return root(drawing, width + 2 * margin, height + margin, what, font_size=11)


def coloured(amount: float, kind: str = "stroke") -> dict[str, Any]:
    series = 0 if amount >= 0 else 1
    return {kind: SERIES[series], "class_": f"af-{kind}-s{series}"}


def written(text: str, x: int | float, y: int | float, **look: object) -> str:
    return element("text", escape(text), x=float(x), y=float(y), **{"fill": "currentColor", **look})


def _frame(picture: _Picture) -> Iterable[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 1000) if step * picture.pitch >= 16)
    for layer in range(0, picture.depth, step):
        y = picture.y(layer + 0.5)
        yield written(str(layer), picture.left - 4, y + 4, text_anchor="end", fill_opacity=0.65)
        line = {"x1": picture.left, "x2": picture.right, "y1": y, "y2": y}
        yield element("line", **line, stroke="currentColor", stroke_opacity=0.12, stroke_dasharray="1 3")
    yield written("layer", 0, picture.top - 10, fill_opacity=0.65)
    starts = {half: min(x for (h, _), x in picture.x.items() if h == half) for half, _ in picture.x}
    for half, x in starts.items() if picture.result.encoder_texts else ():
        yield written(half or "decoder", x, picture.top - 10, text_anchor="middle", fill_opacity=0.65)
    for x in picture.gaps:
        yield written("⋯", x, picture.bottom + 16, text_anchor="middle", fill_opacity=0.65)


def _stream(picture: _Picture) -> Iterable[str]:
    """The stream of each token; it is as wide as the amount that stands there, where that shows."""
    arrived = picture.result.arrived.tolist()
    for (half, position), x in picture.x.items():
        thin = {"x1": x, "x2": x, "y1": picture.top, "y2": picture.bottom}
        yield element("line", **thin, stroke="currentColor", stroke_opacity=0.16)
        amounts = [] if half else [row[position] for row in arrived]
        name = f"{place_name(picture.result, (half, position))} holds"
        start = 0
        for layer, amount in enumerate(amounts):
            following = amounts[layer + 1] if layer + 1 < len(amounts) else math.nan
            if _wide(picture, amount) != _wide(picture, following) or amount * following < 0:
                width = _wide(picture, amount)
                if width:
                    levels = f"layer {start}" if start == layer else f"layers {start} to {layer}"
                    told = element("title", escape(f"{name} {signed(amount)} entering {levels}"))
                    ends_at = {"x1": x, "x2": x, "y1": picture.y(start), "y2": picture.y(min(layer + 1, picture.depth))}
                    look = {"stroke_width": width, "stroke_opacity": 0.22, **coloured(amount)}
                    yield element("line", told, **ends_at, **look)
                start = layer + 1


def _wide(picture: _Picture, amount: float) -> float:
    """Whole pixels of an amount that stays, 0 where it does not show."""
    return 0.0 if math.isnan(amount) else float(min(14, round(_WIDEST * abs(amount) / picture.largest)))


def _lines(picture: _Picture) -> Iterable[str]:
    leaks = [edge for edge in picture.result.leaks if all(place in picture.x for place in ends(edge))][:_LINES]
    heads = 1 + max((edge.head for edge in (*picture.edges, *leaks)), default=0)
    heads = max(heads, picture.result.heads.shape[-1])
    for edge in (*reversed(picture.edges), *leaks):
        sends, receives = ends(edge)
        a, b = picture.x[sends], picture.x[receives]
        y = picture.y(edge.layer + 0.15 + 0.7 * (edge.head + 0.5) / heads)
        share = abs(edge.carried) / picture.largest
        up = min(18.0, 6 + 0.04 * abs(b - a))
        look = coloured(edge.carried)
        if edge in leaks:
            look = {"stroke": HOT, "class_": "af-hot", "stroke_dasharray": "4 3"}
        yield element(
            "path", element("title", escape(edge_words(picture.result, edge))),
            d=f"M{a:.1f} {y:.1f}Q{(a + b) / 2:.1f} {y - up:.1f} {b:.1f} {y:.1f}", fill="none", stroke_linecap="round",
            stroke_width=max(0.8, _WIDEST * share), stroke_opacity=0.35 + 0.6 * math.sqrt(min(1.0, share)), **look,
        )  # fmt: skip


def _marks(picture: _Picture) -> Iterable[str]:
    taken: list[tuple[float, float, float]] = []

    def label(text: str, x: float, y: float) -> str:
        wide = 6.2 * columns(text)
        x = min(x, picture.right - wide)
        if any(abs(y - other) < 12 and start - wide < x < end for start, end, other in taken):
            return ""
        taken.append((x, x + wide, y))
        halo = {"stroke_width": 3, "paint_order": "stroke", "stroke_linejoin": "round"}
        return written(text, x, y, **halo, stroke="#fff", class_="af-halo")

    for entry in reversed(picture.marks):
        place, radius = (entry.half, entry.position or 0), 2 + 6 * math.sqrt(abs(entry.carried) / picture.largest)
        told = element("title", escape(entry_words(picture.result, entry)))
        x, y = picture.x[place], picture.y((entry.layer or 0) + 1)
        edge = {"stroke": "#fff", "stroke_width": 1}
        colour = coloured(entry.carried, "fill")
        yield element("circle", told, cx=x, cy=y, r=radius, **edge, **colour)
    heads = max(1, picture.result.heads.shape[-1])
    for edge in picture.edges[:_NAMED]:
        start = min(picture.x[place] for place in ends(edge))
        y = picture.y(edge.layer + 0.15 + 0.7 * (edge.head + 0.5) / heads)
        yield label(f"{edge.name} {signed(edge.carried)}", start + 8, y - 8)
    for entry in picture.marks[: _NAMED - 2]:
        x = picture.x[entry.half, entry.position or 0]
        before = x - 10 - 6.2 * columns(entry.name)
        yield label(entry.name, before if before > picture.left else x + 10, picture.y((entry.layer or 0) + 1) + 4)


def _bars(picture: _Picture, width: int) -> Iterable[str]:
    """What the answering token gains in each layer, by tokens that it reads and entries that fire there."""
    amounts = picture.result.arrived[:, answering(picture.result)].tolist()
    gains = [after - before for before, after in pairwise(amounts)]
    largest = max(map(abs, gains), default=0.0) or 1.0
    middle = (picture.right + width) / 2
    half = min(60.0, (width - picture.right) / 2 - 4)
    axis = {"x1": middle, "x2": middle, "y1": picture.top, "y2": picture.bottom}
    yield element("line", **axis, stroke="currentColor", stroke_opacity=0.3)
    yield written("gain by layer", middle, picture.top - 10, text_anchor="middle", fill_opacity=0.65)
    thick = max(2.0, min(12.0, picture.pitch * 0.6))
    strongest = [layer for _, layer in sorted((-abs(gain), layer) for layer, gain in enumerate(gains))[:3]]
    for layer, gain in enumerate(gains):
        told = element("title", escape(f"layer {layer}: the answering token gains {signed(gain)}"))
        length = half * abs(gain) / largest
        box = {"x": middle - length * (gain < 0), "y": picture.y(layer + 0.5) - thick / 2, "width": length}
        yield element("rect", told, **box, height=thick, **coloured(gain, "fill"))
    drawn: list[int] = []
    for layer in strongest:
        if all(abs(layer - other) * picture.pitch >= 12 for other in drawn):
            drawn.append(layer)
            side = {"text_anchor": "end" if gains[layer] > 0 else "start"}
            shift = -4 if gains[layer] > 0 else 4
            yield written(signed(gains[layer]), middle + shift, picture.y(layer + 0.5) + 4, **side)


def _tokens(picture: _Picture) -> tuple[list[str], float]:
    result, told = picture.result, ("", answering(picture.result))
    names = {place: token_label(result.token(place[1], place[0]), 14) for place in picture.x}
    turned = any(6.8 * columns(name) > picture.column - 3 for name in names.values())
    parts: list[str] = []
    y = picture.bottom + 12
    for place, x in picture.x.items():
        may = place[0] or not result.reach or result.reach[place[1]] >= 0
        look: dict[str, Any] = {"fill_opacity": 1.0 if may else 0.35, "font_weight": 700 if place == told else None}
        spot = {"transform": f"translate({x - 4:.1f} {y:.1f}) rotate(90)"} if turned else {"text_anchor": "middle"}
        content = escape(names[place]) + element("title", escape(token_words(result, place)))
        at = {"x": 0.0, "y": 0.0} if turned else {"x": x, "y": y + 6}
        parts.append(element("text", content, **at, **spot, fill="currentColor", **look))
    tall = max((6.8 * columns(name) for name in names.values()), default=0.0) if turned else 12.0
    return parts, y + tall + 14


def _legend(picture: _Picture, width: int, y: float) -> tuple[list[str], float]:
    result = picture.result
    against = " and ".join(f"“{token_label(text)}”" for text in result.against)
    items = [
        ("line", 1.0, f"for “{token_label(result.answer)}”"),
        ("line", -1.0, f"for {against}" if result.against else "against it"),
        ("mark", 1.0, "entry"),
        ("wide", 1.0, f"{signed(picture.largest)} logits"),
    ]
    hidden = len(result.texts) + len(result.encoder_texts) - len(picture.x)
    parts: list[str] = []
    x = 0.0
    for kind, sign, words in items:
        size = 30 + 6.4 * columns(words) + 14
        if x + size > width and x:
            x, y = 0.0, y + 18
        stroke = {"line": 3.0, "wide": _WIDEST}.get(kind)
        if stroke is None:
            parts.append(element("circle", cx=x + 12, cy=y, r=5.0, **coloured(sign, "fill")))
        else:
            parts.append(element("line", x1=x, x2=x + 24, y1=y, y2=y, stroke_width=stroke, **coloured(sign)))
        parts.append(written(words, x + 30, y + 4, fill_opacity=0.75))
        x += size
    counts = [f"{plural(len(picture.edges), 'line')}: {percent(result.covered(len(picture.edges)))} of what moves"]
    if hidden:
        counts.append(f"{plural(hidden, 'token')} that no strong line touches: folded")
    for line in counts:
        y += 18
        parts.append(written(line, 0, y + 6, fill_opacity=0.75))
    return parts, y + 16


# -------- words


def place_name(result: Explanation, place: Place) -> str:
    half = f"{place[0]} " if place[0] else ""
    return f"{half}“{token_label(result.token(place[1], place[0]))}” ({place[1]})"


def edge_words(result: Explanation, edge: Edge) -> str:
    """One edge in a line: "L23H3 carries +3.06 from “John” (9) to “to” (13) at weight 0.74; effect +2.78"."""
    sends, receives = ends(edge)
    words = (
        f"{edge.name} carries {signed(edge.carried)} from {place_name(result, sends)} to {place_name(result, receives)}"
    )
    words += f" at weight {edge.weight:.2f}; effect {signed(edge.effect)}"
    return (
        words + _also(edge) + ("" if edge.bias is None else f"; an attached bias adds {signed(edge.bias)} to the score")
    )


def entry_words(result: Explanation, entry: Source) -> str:
    """One entry in a line, with what it promotes or its text."""
    at = "" if entry.position is None else f" at {place_name(result, (entry.half, entry.position))}"
    words = f"{entry.name}{at} carries {signed(entry.carried)}; effect {signed(entry.effect)}{_also(entry)}"
    promotes = f"; promotes {promoted(entry)}" if entry.promotes else ""
    return words + (f"; “{shorten(entry.text, 60)}”" if entry.text else promotes)


def _also(item: Edge | Source) -> str:
    return "" if item.removed is None else f"; removed {signed(item.removed)}"


def promoted(entry: Source) -> str:
    return ", ".join(f"“{token_label(text)}”" for text in entry.promotes)


def token_words(result: Explanation, place: Place) -> str:
    carried = sum((s.carried for s in result.tokens if (s.half, s.position) == place), 0.0)
    words = f"{place_name(result, place)} carries {signed(carried)} of its own"
    if result.reach and not place[0]:
        steps = result.reach[place[1]]
        return words + (
            "; it may not reach the answer" if steps < 0 else f"; may reach the answer in {plural(steps, 'layer')}"
        )
    return words


def verdict(result: Explanation) -> str:
    """What is explained, in a line."""
    above = result.above(lambda text: f"“{token_label(text)}”")
    how = f"{signed(result.value)} logits{above}" if above else f"a score of {signed(result.value)}"
    chance = "" if math.isnan(result.probability) else f" ({percent(result.probability)})"
    return f"“{token_label(result.answer)}”{chance}, {how}"
