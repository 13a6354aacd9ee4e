"""A mask in a terminal: one sign per pair while they fit, half blocks, then shades of density."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Final

from attnflow._core import checks
from attnflow._core.markup import percent, plural, visible
from attnflow.masks.mask import Mask
from attnflow.report.grid import Grid, grid

_HEIGHT: Final = 32  # lines of the picture, the axis not counted
_NARROWEST: Final = 20
_SHADES: Final = " ░▒▓█"
_ASCII_SHADES: Final = " .-+#"


def mask_text(mask: Mask, width: int | None = None, ascii_only: bool | None = None) -> str:
    """A mask as text, queries downwards, keys to the right.

    Small masks show a sign for each pair; masks of up to 64 queries that fit the width show two queries per line in
    half blocks, still exact; larger ones are shaded by the share of allowed pairs per character, with a blank only
    where nothing and the darkest sign only where everything is allowed. A line under the picture says which it is.
    """
    columns = (
        min(100, shutil.get_terminal_size().columns) if width is None else checks.integer("width", width, _NARROWEST)
    )
    plain = not _can_draw() if ascii_only is None else ascii_only
    queries, keys = mask.shape
    times = "x" if plain else "×"
    size = f"{plural(queries, 'query', 'queries')} {times} {plural(keys, 'key')}, {percent(mask.density)} allowed"
    wrapped = [line.replace("\xa0", " ") for line in textwrap.wrap(size.replace("\u202f", ","), columns)]
    head = [_fit(repr(mask), columns, plain), *wrapped, ""]
    if 0 in mask.shape:
        return "\n".join([*head, _fit("no pairs to show", columns, plain)])
    label = len(str(queries - 1))
    room = columns - label - 2
    if queries <= _HEIGHT and 2 * keys - 1 <= room and keys <= 99:
        body = _spelled(mask, label, plain)
    elif not plain and queries <= 2 * _HEIGHT and keys <= room:
        body = _halves(mask, label)
    else:
        body = _shaded(mask, label, room, columns, plain)
    return "\n".join(line.rstrip() for line in [*head, *body])


def _spelled(mask: Mask, label: int, plain: bool) -> list[str]:
    yes, no = ("#", ".") if plain else ("■", "·")
    tens = "".join(f"{key // 10 if key and key % 10 == 0 else '':<2}" for key in range(mask.num_keys))
    ones = "".join(f"{key % 10:<2}" for key in range(mask.num_keys))
    lines = [" " * (label + 2) + axis for axis in ((tens, ones) if tens.strip() else (ones,))]
    for query, row in enumerate(mask.dense().tolist()):
        lines.append(f"{query:>{label}}  " + " ".join(yes if allowed else no for allowed in row))
    return [*lines, "", f"{yes} allowed   {no} not"]


def _halves(mask: Mask, label: int) -> list[str]:
    table = mask.dense().tolist()
    table += [[False] * mask.num_keys] * (len(table) % 2)
    lines = [_axis(mask.num_keys, 1, label, mask.num_keys)]
    for query in range(0, len(table), 2):
        cells = ("▀▄█"[a + 2 * b - 1] if a or b else " " for a, b in zip(table[query], table[query + 1], strict=True))
        lines.append(f"{query if query % 8 == 0 else '':>{label}}  " + "".join(cells))
    return [*lines, "", "filled: allowed; two queries per line"]


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
    return [line.replace("\0", " ") for text in (unit, key) for line in textwrap.wrap(text, columns)]


def _axis(keys: int, step: int, label: int, columns: int) -> str:
    """The first and the last key over their columns."""
    first, last = "0", str(keys - 1)
    gap = columns - len(first) - len(last)
    return " " * (label + 2) + (f"{first}{'':>{gap}}{last}" if gap > 0 else first)


def _fit(text: str, columns: int, plain: bool) -> str:
    shown = visible(text)
    shown = shown.encode("ascii", "replace").decode() if plain else shown
    return shown if len(shown) <= columns else shown[: columns - 3] + "..."


def _can_draw() -> bool:
    try:
        (_SHADES + "■▀▄×·").encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
