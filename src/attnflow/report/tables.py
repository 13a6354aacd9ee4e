"""Pictures of results whose rows say it all: a table with a bar behind each measure; and several drawings in one."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attnflow._core.markup import columns, element, escape, grouped, plural, shorten
from attnflow._core.results import Result
from attnflow.report.svg import CELL, MONO, Number, root, text

_ROWS: Final = 40  # of a table before the rest is only counted
_CELL, _LAST = 44, 110  # characters of a cell, and of one in the last column
_WIDTH, _LINE = 7.0, 20.0  # pixels of a character and of a line
_GAP: Final = 16.0
_MARGIN: Final = 14.0
_HEADING: Final = 88  # characters of a line above the table
_TOGETHER: Final = 12  # drawings in one picture before the rest is only counted
_PER_ROW: Final = 4
# Whole numbers that name a row rather than measure something have no bar.
_NAMES: Final = frozenset(
    ("layer", "head", "position", "sequence", "query", "key", "task", "request", "group", "id", "source", "target")
)


def table_svg(result: Result, *, title: str | None = None) -> str:
    """Draws the rows of a result, or without rows what it prints; the heading is by default its first line."""
    heading, *lines = str(result).splitlines()
    return card(heading, list(result.rows()), lines, title=title)


def card(
    heading: str,
    rows: Sequence[Mapping[str, object]] = (),
    lines: Sequence[str] = (),
    *,
    title: str | None = None,
) -> str:
    heading = title or heading
    if len(rows) == 1 and len(rows[0]) > 3:  # read downwards
        rows = [{"": name.replace("_", " "), "value": value} for name, value in rows[0].items()]
    top = [line for part in heading.splitlines() for line in textwrap.wrap(part, _HEADING)]
    bold: dict[str, Any] = {"font_size": 13, "font_weight": 600, "fill": "currentColor"}
    parts = [element("text", escape(line), x=0, y=12 + _LINE * at, **bold) for at, line in enumerate(top)]
    width = max((columns(line) * 7.6 for line in top), default=0.0)
    y = _LINE * len(top) + 8
    if rows:
        body, across, down = _table(rows[:_ROWS])
        if len(rows) > _ROWS:
            lines, rest = [], f"… and {plural(len(rows) - _ROWS, 'more row')}"
            body += _text(rest, 0, down + _LINE)
            down += _LINE
    else:
        shown = [line for part in lines for line in textwrap.wrap(part, 2 * _CELL, subsequent_indent="    ")]
        body = "".join(_text(line, 0, 12 + _LINE * at) for at, line in enumerate(shown))
        across, down = max((columns(line) * _WIDTH for line in shown), default=0.0), _LINE * len(shown)
    parts.append(element("g", body, transform=f"translate(0,{y})"))
    drawing = element("g", "".join(parts), transform=f"translate({_MARGIN},{_MARGIN})")
    return root(drawing, max(width, across, 200.0) + 2 * _MARGIN, y + down + 2 * _MARGIN, shorten(heading, 300))


def gallery(drawings: Sequence[str], what: str, title: str | None = None) -> str:
    shown = drawings[:_TOGETHER]
    sizes = [tuple(float(re.search(rf' {side}="([\d.]+)"', svg)[1]) for side in ("width", "height")) for svg in shown]  # type: ignore[index]
    parts: list[str] = []
    width = y = 0.0
    for start in range(0, len(shown), _PER_ROW):
        x = 0.0
        for svg, size in zip(shown[start : start + _PER_ROW], sizes[start : start + _PER_ROW], strict=True):
            parts.append(element("g", svg, transform=f"translate({x:g},{y:g})"))
            x += size[0] + _GAP
        width = max(width, x - _GAP)
        y += max(size[1] for size in sizes[start : start + _PER_ROW]) + _GAP
    if len(drawings) > len(shown):
        parts.append(_text(f"… and {len(drawings) - len(shown)} more", _MARGIN, y + 6))
        y += _LINE
    return root("".join(parts), width, y, what, title=title)


def _table(rows: Sequence[Mapping[str, object]]) -> tuple[str, float, float]:
    x, parts, last = 0.0, list[str](), [*rows[0]][-1]
    for name in rows[0]:
        values = [row[name] for row in rows]
        cells = [cell(value, _LAST if name == last else _CELL) for value in values]
        numeric = all(isinstance(value, int | float | None) and not isinstance(value, bool) for value in values)
        width = _WIDTH * max(map(columns, (name, *cells)))
        parts.append(_text(name.replace("_", " "), x + width * numeric, 12, numeric, 0.65))
        sizes = [abs(value) if isinstance(value, int | float) else 0.0 for value in values]
        largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
        bars = numeric and largest and len(rows) > 1 and name not in _NAMES and not name.endswith(("_id", "_index"))
        for at, (shown, size) in enumerate(zip(cells, sizes, strict=True), 1):
            if bars and size:
                share = min(size / largest, 1.0) if math.isfinite(size) else 1.0
                box = {"x": x - 4, "y": _LINE * at - 2, "width": (width + 8) * share, "height": _LINE - 3}
                parts.append(element("rect", **box, fill=CELL, fill_opacity=0.3, class_="af-cell"))
            parts.append(_text(shown, x + width * numeric, _LINE * at + 12, numeric))
        x += width + _GAP
    return "".join(parts), x - _GAP + 4, _LINE * (len(rows) + 1)


def cell(value: object, limit: int) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return grouped(value)
    return f"{value:.4g}" if isinstance(value, float) else shorten(value, limit)


def _text(words: str, x: Number, y: Number, right: bool = False, opacity: float = 1.0) -> str:
    return text(words, x, y, anchor="end" if right else "", font=MONO, opacity=opacity)
