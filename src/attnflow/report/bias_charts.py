"""Maps of a bias and weights of a query as SVG: blue draws a query to a key, red turns it away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import columns, element, escape, number
from attnflow.report.bias_figures import common_top
from attnflow.report.hasse_svg import MONO, SANS

Array = npt.NDArray[np.floating[Any]]
Truth = npt.NDArray[np.bool_]

_LEVELS: Final = 12
_TITLED: Final = 2500  # cells up to which each says what it is
_TEXT: Final[dict[str, Any]] = {"font_size": 11.5, "fill": "currentColor", "fill_opacity": 0.8}


def map_chart(
    table: Array,
    allowed: Truth,
    rows: Sequence[str],
    keys: Sequence[str],
    limit: float,
    side: str,
    across: str = "key",
    what: str = "Row-centred bias",
) -> str:
    """A table of biases, rows downwards, keys to the right; pairs that do not exist are left out.

    Args:
        table: row-centred biases, [rows, keys].
        allowed: pairs that exist.
        rows: a name for each row.
        keys: a name for each key.
        limit: bias of the full colour.
        side: what a row is.
        across: what a column is.
        what: what the numbers are.
    """
    cell = min(26.0, max(4.0, 900.0 / max(len(keys), 1)))
    tall = min(24.0, max(4.0, 700.0 / max(len(rows), 1)))
    left = 26.0 + 6.9 * max(map(columns, rows), default=0)
    top = 26.0 + 6.9 * max(map(columns, keys), default=0)
    level = np.where(allowed, np.round(table / (limit or 1.0) * _LEVELS), 0).astype(np.int64)
    parts = [_ground(allowed, cell, tall)]
    for value in [v for v in np.unique(level).tolist() if v != 0]:
        places = zip(*(axis.tolist() for axis in np.nonzero(level == value)), strict=True)
        path = "".join(_rectangle(key * cell, row * tall, cell, tall) for row, key in places)
        kind = "af-attract" if value > 0 else "af-repel"
        parts.append(element("path", d=path, class_=kind, fill_opacity=min(1.0, abs(value) / _LEVELS)))
    if table.size <= _TITLED:
        for row, key in np.argwhere(allowed).tolist():
            words = _title(f"{rows[row]} ← {keys[key]}: {table[row, key]:+.3f}")
            place = _rectangle(key * cell, row * tall, cell, tall)
            parts.append(element("path", words, d=place, fill="transparent"))
    parts += _row_names(rows, tall) + _key_names(keys, cell, -7.0)
    axis = element("text", f"{across} →", x=0, y=10 - top, font_weight=600, **_TEXT)
    turned = f"translate({number(12 - left)},{number(tall * len(rows))}) rotate(-90)"
    axis += element("text", f"← {side}", transform=turned, font_weight=600, **_TEXT)
    body = element("g", "".join(parts) + axis, transform=f"translate({number(left)},{number(top)})")
    width, height = left + cell * len(keys) + 12, top + tall * len(rows) + 8
    return _svg(f"{what}, {side} by {across}", body, max(width, left + 60), max(height, top + 8))


def weight_chart(
    panels: Sequence[tuple[str, Array, Array | None]], keys: Sequence[str], limit: float, height: float = 84.0
) -> str:
    """Weights of one query as bars, a panel for each model, coloured by the bias where there is one.

    Args:
        panels: (name, weights, row-centred bias or None), as `attnflow.report.bias_figures.weight_panels` makes them.
        keys: a name for each key.
        limit: bias of the full colour.
        height: of a panel.
    """
    cell = min(26.0, max(4.0, 900.0 / max(len(keys), 1)))
    left, gap, width = 46.0, 30.0, cell * len(keys)
    top = common_top([weights for _, weights, _ in panels])
    parts: list[str] = []
    for index, (name, weights, bias) in enumerate(panels):
        base = (index + 1) * (height + gap)
        parts.append(element("text", escape(name), x=0, y=base - height - 10, font_weight=600, **_TEXT))
        parts.append(element("path", d=f"M0 {number(base)}h{number(width)}", stroke="currentColor", stroke_opacity=0.4))
        for share in (0.5, 1.0):
            rule = f"M0 {number(base - share * height)}h{number(width)}"
            parts.append(element("path", d=rule, stroke="currentColor", stroke_opacity=0.12))
            label = f"{share * top:.2f}" if top >= 0.1 else f"{share * top:.2g}"
            parts.append(element("text", label, x=-6, y=base - share * height + 4, text_anchor="end", **_TEXT))
        for key, weight in enumerate(weights.tolist()):
            pull = None if bias is None else float(bias[key])
            parts.append(_bar(keys[key], weight, pull, limit, key * cell, base, cell, height / top, top))
    bottom = len(panels) * (height + gap)
    longest = 6.9 * max(map(columns, keys), default=0)
    parts += _key_names(keys, cell, bottom + 7, below=True)
    body = element("g", "".join(parts), transform=f"translate({number(left)},6)")
    return _svg("Attention weights of one query, by key", body, left + width + 12, bottom + longest + 22)


def _bar(
    key: str,
    weight: float,
    bias: float | None,
    limit: float,
    x: float,
    base: float,
    cell: float,
    unit: float,
    top: float,
) -> str:
    """The weight of one key; one beyond the top is cut, and carries its value."""
    words = f"{key}: weight {weight:.3f}"
    colour: dict[str, Any] = {"fill": "currentColor", "fill_opacity": 0.35}
    if bias is not None:
        words += f", bias {bias:+.3f}"
        kind = "af-attract" if bias > 0 else "af-repel"
        colour = {"class_": kind, "fill_opacity": 0.12 + 0.88 * min(1.0, abs(bias) / (limit or 1.0))}
    tall = unit * min(weight, top)
    edge = {"stroke": "currentColor", "stroke_opacity": 0.45, "stroke_width": 0.8}
    bar = element("path", _title(words), d=_rectangle(x + 0.1 * cell, base - tall, 0.8 * cell, tall), **edge, **colour)
    if weight <= top:
        return bar
    return bar + element("text", f"{weight:.2f}", x=x + cell, y=base - tall + 10, **_TEXT | {"font_size": 10.5})


def _ground(allowed: Truth, cell: float, tall: float) -> str:
    """What exists, one rectangle per run of keys."""
    path = ""
    for row, line in enumerate(allowed.tolist()):
        edges = np.flatnonzero(np.diff(np.array([False, *line, False]).astype(np.int8))).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            path += _rectangle(start * cell, row * tall, (end - start) * cell, tall)
    return element("path", d=path, fill="currentColor", fill_opacity=0.05, stroke="currentColor", stroke_opacity=0.18)


def _row_names(names: Sequence[str], tall: float) -> list[str]:
    every = max(1, round(13 / tall))
    return [
        element("text", escape(name), x=-7, y=(i + 0.5) * tall + 4, text_anchor="end", font_family=MONO, **_TEXT)
        for i, name in enumerate(names)
        if i % every == 0
    ]


def _key_names(names: Sequence[str], cell: float, y: float, *, below: bool = False) -> list[str]:
    """At the height `y`, above or below a drawing; turned by a quarter unless they are short."""
    parts: list[str] = []
    for index in range(0, len(names), max(1, round(13 / cell))):
        name, x = names[index], (index + 0.5) * cell
        place: dict[str, Any] = {"x": x, "y": y + 9 if below else y, "text_anchor": "middle"}
        if columns(name) > 2:
            turned = f"translate({number(x + 4)},{number(y)}) rotate(-90)"
            place = {"transform": turned, "text_anchor": "end" if below else "start"}
        parts.append(element("text", escape(name), font_family=MONO, **place, **_TEXT))
    return parts


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"


def _title(text: str) -> str:
    return element("title", escape(text))


def _svg(what: str, body: str, width: float, height: float) -> str:
    return element(
        "svg",
        _title(what) + body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        class_="af-svg af-bias",
        font_family=SANS,
    )
