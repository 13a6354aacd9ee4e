"""A mask as SVG: its pairs as cells while they are few, the density of its blocks otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.markup import columns, element, escape, grouped, number, percent, plural, shorten
from attnflow.masks.mask import Mask
from attnflow.report.grid import Grid, grid, square_grid, ticks
from attnflow.report.svg import MONO, SANS, STYLE

_CELLS: Final = 96  # rows and columns of the heat map of a large mask
_EXACT: Final = 64  # positions up to which every pair is a cell
_STEPS: Final = 9
_COLOUR: Final = "#3d7ea6"  # visible on white and on near-black; a page overrides it by the class af-cell
_CODE: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def mask_svg(
    mask: Mask,
    *,
    labels: Sequence[str] | None = None,
    size: int = 440,
    title: str | None = None,
    standalone: bool = True,
) -> str:
    """A mask as one `<svg>`, queries downwards, keys to the right; filled is allowed.

    Up to 64 queries and keys every pair is a cell. Larger masks are drawn as a heat map of at most 96 x 96 blocks,
    shaded by the share of pairs that a block allows; only a block that allows everything has the full colour.

    The labels are written at both axes of a square mask of at most 32 positions. `standalone` brings colours for a file
    of its own; a page's style sheet sets them. Cost: O(intervals + cells), never n x n.
    """
    checks.integer("size", size, 64)
    if labels is not None and mask.shape != (len(labels), len(labels)):
        raise ValueError(f"labels need a square mask of {len(labels)} positions, got shape {mask.shape}")
    cells = grid(mask, 1, 1) if max(mask.shape) <= _EXACT else square_grid(mask, _CELLS)
    rows, cols = cells.counts.shape
    side = min(24.0, max(1.0, round(4 * size / max(rows, cols, 1)) / 4))
    names = [shorten(text, 12) for text in labels] if labels is not None and len(labels) <= 32 else None
    margin = 20 + 6.7 * max(map(columns, names), default=0) if names else _left(mask)
    above = margin - 6 if names else 42.0
    width, height = cols * side, rows * side
    parts = [_frame(width, height), _paths(cells, side)]
    if cells.is_exact and max(rows, cols) <= 32:
        parts.append(_rules(rows, cols, side))
    parts += _named_axes(names, side) if names else _axes(mask, cells, side)
    legend = "" if cells.is_exact else _legend(cells, height + 18)
    full_height = above + height + (58 if legend else 10)
    full_width = max(
        margin + width + max(16.0, 5.0 * len(grouped(mask.num_keys))), margin + 330 if legend else 0.0, margin + 96
    )
    body = element("g", "".join(parts) + legend, transform=f"translate({number(margin)},{number(above)})")
    what = title if title is not None else f"Mask {mask!r}: {percent(mask.density)} of {mask.shape} pairs allowed"
    return element(
        "svg",
        (STYLE if standalone else "") + element("title", escape(shorten(what, 300))) + body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(full_width)} {number(full_height)}",
        width=full_width,
        height=full_height,
        role="img",
        class_=f"af-svg {'af-named' if names else 'af-mask'}{' af-page' if standalone else ''}",
        font_family=SANS,
        data_shape=f"{mask.num_queries} {mask.num_keys}",
        data_step=f"{cells.query_step} {cells.key_step}",
        data_cells=_coded(cells),
        data_box=f"{number(margin)} {number(above)} {number(side)}",
    )


def _paths(cells: Grid, side: float) -> str:
    """One path per shade, a rectangle per run of equal cells in a row."""
    level = cells.levels(_STEPS)
    rows, cols = level.shape
    if level.size == 0:
        return ""
    edge = np.ones((rows, cols + 1), dtype=bool)
    edge[:, 1:-1] = level[:, 1:] != level[:, :-1]
    row, start = np.nonzero(edge[:, :-1])
    end = np.nonzero(edge[:, 1:])[1] + 1
    shade = level[row, start]
    parts: list[str] = []
    for step in range(1, _STEPS + 1):
        chosen = shade == step
        if chosen.any():
            data = _rectangles(row[chosen], start[chosen], end[chosen], side)
            parts.append(element("path", d=data, fill=_COLOUR, fill_opacity=_opacity(step), class_="af-cell"))
    return "".join(parts)


def _rectangles(row: IntArray, start: IntArray, end: IntArray, side: float) -> str:
    return "".join(
        f"M{number(a * side)} {number(r * side)}h{number((b - a) * side)}v{number(side)}h{number((a - b) * side)}z"
        for r, a, b in zip(row.tolist(), start.tolist(), end.tolist(), strict=True)
    )


def _opacity(step: int) -> float:
    return 1.0 if step == _STEPS else 0.12 + 0.68 * step / _STEPS


def _frame(width: float, height: float) -> str:
    return element(
        "rect", width=width, height=height, fill="currentColor", fill_opacity=0.04, stroke="currentColor",
        stroke_opacity=0.4, class_="af-frame",
    )  # fmt: skip


def _rules(rows: int, cols: int, side: float) -> str:
    lines = [f"M0 {number(r * side)}h{number(cols * side)}" for r in range(1, rows)]
    lines += [f"M{number(c * side)} 0v{number(rows * side)}" for c in range(1, cols)]
    return element("path", d="".join(lines), fill="none", stroke="currentColor", stroke_opacity=0.16, class_="af-rule")


def _axes(mask: Mask, cells: Grid, side: float) -> list[str]:
    height = cells.counts.shape[0] * side
    text = {"font_size": 11.5, "fill": "currentColor", "fill_opacity": 0.78}
    name = {"font_size": 12, "fill": "currentColor", "font_weight": 600}
    parts = [element("text", "key →", x=0, y=-25, **name)]
    if height:
        turned = f"translate({number(14 - _left(mask))},{number(height)}) rotate(-90)"
        parts.append(element("text", "← query", transform=turned, **name))
    for key in ticks(mask.num_keys, 7):
        x = (key + 0.5) / cells.key_step * side
        parts.append(element("text", grouped(key), x=x, y=-6, text_anchor="middle", **text))
    for query in ticks(mask.num_queries, 7):
        y = (query + 0.5) / cells.query_step * side + 4
        parts.append(element("text", grouped(query), x=-6, y=y, text_anchor="end", **text))
    return parts


def _left(mask: Mask) -> float:
    """Room for the numbers and the name of the query axis, also in the larger type that a page sets on a phone."""
    return 26.0 + 9.0 * len(grouped(mask.num_queries))


def _named_axes(names: list[str], side: float) -> list[str]:
    text = {"font_size": min(11.0, side - 1), "fill": "currentColor", "font_family": MONO}
    parts: list[str] = []
    for index, name in enumerate(names):
        middle = (index + 0.5) * side
        parts.append(element("text", escape(name), x=-6, y=middle + 4, text_anchor="end", **text))
        parts.append(element("text", escape(name), transform=f"translate({number(middle + 4)},-6) rotate(-90)", **text))
    return parts


def _legend(cells: Grid, top: float) -> str:
    text = {"font_size": 11.5, "fill": "currentColor", "fill_opacity": 0.78}
    squares = [
        element(
            "rect", x=40 + 14 * i, y=top, width=14, height=10, fill=_COLOUR, fill_opacity=_opacity(i), class_="af-cell"
        )
        for i in range(1, _STEPS + 1)
    ]
    frame = element(
        "rect", x=40, y=top, width=14 * (_STEPS + 1), height=10, fill="none", stroke="currentColor", stroke_opacity=0.4
    )
    left, right = element("text", "0 %", x=0, y=top + 9, **text), element("text", "100 %", x=190, y=top + 9, **text)
    unit = f"allowed per block of {grouped(cells.query_step)} queries × {plural(cells.key_step, 'key')}"
    return left + "".join(squares) + frame + right + element("text", unit, x=0, y=top + 30, **text)


def _coded(cells: Grid) -> str:
    """The shares for the read-out of the page's script: a base-64 digit per cell."""
    top = len(_CODE) - 1
    return "".join(np.array(list(_CODE))[cells.levels(top)].reshape(-1).tolist())
