"""A mask as SVG and as text: pairs as cells while they are few, shares of blocks otherwise; never n x n."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow._core.markup import (
    columns,
    element,
    escape,
    grouped,
    number,
    percent,
    plural,
    shorten,
    token_label,
    token_place,
    visible,
)
from attnflow.masks.mask import Mask
from attnflow.report.displays import draws
from attnflow.report.svg import CELL, MONO, root, text

_CELLS: Final = 96  # rows and columns of the heat map of a large mask
EXACT: Final = 64  # positions up to which every pair is a cell, and may have a label
_READABLE: Final = 11.0  # pixels of a cell that has a label
_STEPS: Final = 9
_CODE: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_HEIGHT: Final = 32  # lines of the picture, the axis not counted
_NARROWEST: Final = 20
_LABEL: Final = 13  # columns of a token beside a row
_SHADES: Final = " ░▒▓█"
_ASCII_SHADES: Final = " .-+#"


@dataclass(frozen=True, eq=False)
class Grid:
    """Allowed and all pairs in each cell of `query_step` queries by `key_step` keys, int64[rows, columns]."""

    counts: IntArray
    pairs: IntArray
    query_step: int
    key_step: int

    @property
    def is_exact(self) -> bool:
        return self.query_step == self.key_step == 1

    def levels(self, steps: int) -> IntArray:
        """Returns 0 for no allowed pair, `steps` for all, and 1..steps - 1 for shares between."""
        between = 1 + np.minimum((self.counts / self.pairs * (steps - 1)).astype(np.int64), steps - 2)
        return np.where(self.counts == 0, 0, np.where(self.counts == self.pairs, steps, between))


def grid(mask: Mask, query_step: int, key_step: int) -> Grid:
    """Counts the allowed pairs of each cell. Cost: O(intervals + cells); for fragmented rows, O(keys of a row)."""
    rows, columns = (
        np.diff(np.append(np.arange(0, size, step), size))
        for size, step in zip(mask.shape, (query_step, key_step), strict=True)
    )
    pairs = np.outer(rows, columns)
    if 0 in mask.shape:
        return Grid(np.zeros_like(pairs), pairs, query_step, key_step)
    return Grid(mask.block_counts((query_step, key_step)), pairs, query_step, key_step)


def ticks(size: int, most: int = 6) -> list[int]:
    """Round positions to write on an axis, from 0 to the last position.

    >>> ticks(64), ticks(5), ticks(1000)
    ([0, 20, 40, 63], [0, 1, 2, 3, 4], [0, 200, 400, 600, 800, 999])
    """
    if size <= most:
        return list(range(size))
    step = next(s for power in range(20) for s in (10**power, 2 * 10**power, 5 * 10**power) if size / s <= most - 1)
    return [*[t for t in range(0, size, step) if t == 0 or size - 1 - t >= 0.6 * step], size - 1]


@draws(Mask)
def mask_svg(mask: Mask, *, labels: Sequence[str] | None = None, size: int = 440, title: str | None = None) -> str:
    """Above 64 queries or keys it is a heat map of at most 96 x 96 blocks. Cost: O(intervals + cells), never n x n."""
    checks.integer("size", size, 64)
    if labels is not None and mask.shape != (len(labels), len(labels)):
        raise ValueError(f"labels need a square mask of {len(labels)} positions, got shape {mask.shape}")
    if labels is not None and len(labels) > EXACT:
        raise ValueError(
            f"labels are drawn for at most {EXACT} positions, got {len(labels)}: leave labels out, or draw a part, "
            f"such as mask[:{EXACT}, :{EXACT}]"
        )
    step = 1 if max(mask.shape) <= EXACT else -(-max(mask.shape) // _CELLS)
    cells = grid(mask, step, step)
    rows, cols = cells.counts.shape
    side = min(24.0, max(1.0, round(4 * size / max(rows, cols, 1)) / 4))
    names = None if labels is None else [shorten(label, 12) for label in labels]
    side = max(side, _READABLE) if names else side
    margin = 20 + 6.7 * max(map(columns, names), default=0) if names else _left(mask)
    above = margin - 6 if names else 42.0
    width, height = cols * side, rows * side
    ink = {"fill": "currentColor", "fill_opacity": 0.04, "stroke": "currentColor", "stroke_opacity": 0.4}
    parts = [element("rect", width=width, height=height, **ink, class_="af-frame"), _paths(cells, side)]
    if cells.is_exact and max(rows, cols) <= 32:
        parts.append(_rules(rows, cols, side))
    parts += _named_axes(names, side) if names else _axes(mask, cells, side)
    legend = "" if cells.is_exact else _legend(cells, height + 18)
    full_height = above + height + (58 if legend else 10)
    full_width = margin + max(width + max(16.0, 5.0 * len(grouped(mask.num_keys))), 330 if legend else 0.0, 96)
    body = element("g", "".join(parts) + legend, transform=f"translate({number(margin)},{number(above)})")
    what = shorten(f"Mask {mask!r}: {percent(mask.density)} of {mask.shape} pairs allowed", 300)
    data = {
        "data_shape": f"{mask.num_queries} {mask.num_keys}",
        "data_step": f"{cells.query_step} {cells.key_step}",
        # The shares for the script's read-out, one base-64 digit per cell.
        "data_cells": "".join(_CODE[level] for level in cells.levels(len(_CODE) - 1).reshape(-1).tolist()),
        "data_box": f"{number(margin)} {number(above)} {number(side)}",
    }
    return root(body, full_width, full_height, what, f"af-svg {'af-named' if names else 'af-mask'}", title, **data)


def _paths(cells: Grid, side: float) -> str:
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
            parts.append(element("path", d=data, fill=CELL, fill_opacity=_opacity(step), class_="af-cell"))
    return "".join(parts)


def _rectangles(row: IntArray, start: IntArray, end: IntArray, side: float) -> str:
    return "".join(
        f"M{number(a * side)} {number(r * side)}h{number((b - a) * side)}v{number(side)}h{number((a - b) * side)}z"
        for r, a, b in zip(row.tolist(), start.tolist(), end.tolist(), strict=True)
    )


def _opacity(step: int) -> float:
    return 1.0 if step == _STEPS else 0.12 + 0.68 * step / _STEPS


def _rules(rows: int, cols: int, side: float) -> str:
    lines = [f"M0 {number(r * side)}h{number(cols * side)}" for r in range(1, rows)]
    lines += [f"M{number(c * side)} 0v{number(rows * side)}" for c in range(1, cols)]
    return element("path", d="".join(lines), fill="none", stroke="currentColor", stroke_opacity=0.16, class_="af-rule")


def _axes(mask: Mask, cells: Grid, side: float) -> list[str]:
    height = cells.counts.shape[0] * side
    name = {"font_size": 12, "fill": "currentColor", "font_weight": 600}
    parts = [element("text", "key →", x=0, y=-25, **name)]
    if height:
        turned = f"translate({number(14 - _left(mask))},{number(height)}) rotate(-90)"
        parts.append(element("text", "← query", transform=turned, **name))
    for key in ticks(mask.num_keys, 7):
        x = (key + 0.5) / cells.key_step * side
        parts.append(text(grouped(key), x, -6, anchor="middle", opacity=0.78))
    for query in ticks(mask.num_queries, 7):
        y = (query + 0.5) / cells.query_step * side + 4
        parts.append(text(grouped(query), -6, y, anchor="end", opacity=0.78))
    return parts


def _left(mask: Mask) -> float:
    return 26.0 + 9.0 * len(grouped(mask.num_queries))


def _named_axes(names: list[str], side: float) -> list[str]:
    look = {"font_size": min(11.0, side - 1), "fill": "currentColor", "font_family": MONO}
    parts: list[str] = []
    for index, name in enumerate(names):
        middle = (index + 0.5) * side
        parts.append(element("text", escape(name), x=-6, y=middle + 4, text_anchor="end", **look))
        parts.append(element("text", escape(name), transform=f"translate({number(middle + 4)},-6) rotate(-90)", **look))
    return parts


def _legend(cells: Grid, top: float) -> str:
    parts = [text("0 %", 0, top + 9, opacity=0.78)]
    for step in range(1, _STEPS + 1):
        place = {"x": 40 + 14 * step, "y": top, "width": 14, "height": 10}
        parts.append(element("rect", **place, fill=CELL, fill_opacity=_opacity(step), class_="af-cell"))
    place = {"x": 40, "y": top, "width": 14 * (_STEPS + 1), "height": 10}
    parts.append(element("rect", **place, fill="none", stroke="currentColor", stroke_opacity=0.4))
    unit = f"allowed per block of {grouped(cells.query_step)} queries × {plural(cells.key_step, 'key')}"
    parts += [text("100 %", 190, top + 9, opacity=0.78), text(unit, 0, top + 30, opacity=0.78)]
    return "".join(parts)


def mask_text(
    mask: Mask,
    width: int | None = None,
    ascii_only: bool | None = None,
    labels: tuple[Sequence[str], Sequence[str]] | None = None,
) -> str:
    """Small masks show every pair, larger ones two queries a line, the largest shades; the last line names them.

    `labels` of queries and keys stand beside the rows of a small mask.
    """
    most = shutil.get_terminal_size().columns
    columns = min(100, most) if width is None else checks.integer("width", width, _NARROWEST)
    plain = not _can_draw() if ascii_only is None else ascii_only
    queries, keys = mask.shape
    times = "x" if plain else "×"
    size = f"{plural(queries, 'query', 'queries')} {times} {plural(keys, 'key')}, {percent(mask.density)} allowed"
    wrapped = [line.replace("\xa0", " ") for line in textwrap.wrap(size.replace("\u202f", ","), columns)]
    name = visible(repr(mask))
    name = name.encode("ascii", "replace").decode() if plain else name
    fold = textwrap.TextWrapper(columns, subsequent_indent="  ", max_lines=3, placeholder=" ...")
    fold.break_on_hyphens = False
    head = [*fold.wrap(name), *wrapped, ""]
    if 0 in mask.shape:
        return "\n".join([*head, "no pairs to show"])
    label = len(str(queries - 1))
    room = columns - label - 2
    if queries <= _HEIGHT and 2 * keys - 1 <= room and keys <= 99:
        named = None if labels is None or 2 * keys + _LABEL > room else labels
        body = _spelled(mask, label, plain, named)
    elif not plain and queries <= 2 * _HEIGHT and keys <= room:
        body = _halves(mask, label, columns)
    else:
        body = _shaded(mask, label, room, columns, plain)
    return "\n".join(line.rstrip() for line in [*head, *body])


def _spelled(mask: Mask, label: int, plain: bool, labels: tuple[Sequence[str], Sequence[str]] | None) -> list[str]:
    names = [""] * mask.num_queries if labels is None else [token_label(text) for text in labels[0]]
    wide = max((round(columns(name)) + 1 for name in names), default=0) if labels else 0
    before = [name + " " * (wide - round(columns(name))) for name in names]
    keys: list[str] = []
    if labels is not None and [*labels[0]] != [*labels[1]]:  # those of an encoder
        keys = ["keys: " + ", ".join(token_place(text, place) for place, text in enumerate(labels[1]))]
    yes, no = ("#", ".") if plain else ("■", "·")
    tens = "".join(f"{key // 10 if key and key % 10 == 0 else '':<2}" for key in range(mask.num_keys))
    ones = "".join(f"{key % 10:<2}" for key in range(mask.num_keys))
    lines = [" " * (wide + label + 2) + axis for axis in ((tens, ones) if tens.strip() else (ones,))]
    for query, row in enumerate(mask.dense().tolist()):
        lines.append(f"{before[query]}{query:>{label}}  " + " ".join(yes if allowed else no for allowed in row))
    return [*lines, "", f"{yes} allowed   {no} not", *keys]


def _halves(mask: Mask, label: int, columns: int) -> list[str]:
    table = mask.dense().tolist()
    table += [[False] * mask.num_keys] * (len(table) % 2)
    lines = [_axis(mask.num_keys, 1, label, mask.num_keys)]
    for query in range(0, len(table), 2):
        cells = ("▀▄█"[a + 2 * b - 1] if a or b else " " for a, b in zip(table[query], table[query + 1], strict=True))
        lines.append(f"{query if query % 8 == 0 else '':>{label}}  " + "".join(cells))
    return [*lines, "", *textwrap.wrap("filled: allowed; two queries per line", columns)]


def _shaded(mask: Mask, label: int, room: int, columns: int, plain: bool) -> list[str]:
    queries, keys = mask.shape
    step = max(1, -(-keys // room), -(-queries // (2 * _HEIGHT)))  # a character is about twice as high as wide
    cells = grid(mask, 2 * step, step)
    shades = _ASCII_SHADES if plain else _SHADES
    lines = [_axis(keys, step, label, cells.counts.shape[1])]
    every = max(1, len(cells.counts) // 8)
    for index, row in enumerate(cells.levels(len(shades) - 1).tolist()):
        name = str(index * cells.query_step) if index % every == 0 else ""
        lines.append(f"{name:>{label}}  " + "".join(shades[level] for level in row))
    return [*lines, "", *_key(cells, shades, columns)]


def _key(cells: Grid, shades: str, columns: int) -> list[str]:
    between = len(shades) - 2
    names = [f"{shade} < {round(100 * (i + 1) / between)} %" for i, shade in enumerate(shades[1:-1])]
    key = "  ".join(name.replace(" ", "\0") for name in [*names, f"{shades[-1]} all"])  # wrapped between signs only
    unit = f"a sign: {cells.query_step} queries by {plural(cells.key_step, 'key')}".replace("\u202f", ",")
    return [line.replace("\0", " ") for part in (unit, key) for line in textwrap.wrap(part, columns)]


def _axis(keys: int, step: int, label: int, columns: int) -> str:
    first, last = "0", str(keys - 1)
    gap = columns - len(first) - len(last)
    return " " * (label + 2) + (f"{first}{'':>{gap}}{last}" if gap > 0 else first)


def _can_draw() -> bool:
    try:
        (_SHADES + "■▀▄×·").encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
