"""Entries that fired as SVG: bars of what each adds to a logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from attnflow._core.markup import columns, element, escape, number
from attnflow.report.hasse_svg import MONO, SANS

_ROW: Final = 22.0
_HALF: Final = 150.0  # length of the longest bar
_TEXT: Final[dict[str, Any]] = {"font_size": 11.5, "fill": "currentColor", "fill_opacity": 0.85}


def entry_bars(entries: Sequence[tuple[str, str, float]], what: str, *, signed: bool) -> str:
    """A bar for each entry: (name, what it says, size), as `<svg>`.

    Args:
        entries: the longest bar first; a negative one goes to the left.
        what: what the sizes are.
        signed: whether there can be negative ones.
    """
    reach = max((abs(size) for _, _, size in entries), default=0.0) or 1.0
    left = 20.0 + 6.9 * max((columns(name) for name, _, _ in entries), default=0)
    zero = left + (_HALF + 62.0 if signed else 8.0)
    height = 8.0 + _ROW * len(entries)
    rule = f"M{number(zero)} 4V{number(height)}"
    parts = [element("path", d=rule, stroke="currentColor", stroke_opacity=0.4)]
    beside = zero + _HALF + 62.0
    for index, (name, words, size) in enumerate(entries):
        y, length = 6.0 + _ROW * index, _HALF * abs(size) / reach
        x = zero - length if size < 0 else zero
        kind = "af-repel" if size < 0 else "af-attract"
        title = element("title", escape(f"{name}: {size:+.3g} {words}"))
        parts.append(element("rect", title, x=x, y=y, width=max(length, 0.8), height=_ROW - 7, class_=kind))
        at = x - 5 if size < 0 else x + length + 5
        anchor = "end" if size < 0 else "start"
        value = f"{size:+.3g}".replace("-", "−") if signed else f"{size:.3g}"
        parts.append(element("text", value, x=at, y=y + 11.5, text_anchor=anchor, **_TEXT))
        parts.append(element("text", escape(name), x=8, y=y + 11.5, font_family=MONO, **_TEXT))
        parts.append(element("text", escape(words), x=beside, y=y + 11.5, font_family=MONO, **_TEXT))
    width = beside + 12 + 6.9 * max((columns(words) for _, words, _ in entries), default=0)
    return element(
        "svg",
        element("title", escape(what)) + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        class_="af-svg af-entries",
        font_family=SANS,
    )
