"""Charts of scores as SVG: models in the plane of symmetry and directionality, curves over layers, maps of heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import element, escape, number
from attnflow.geometry.summary import Quartiles
from attnflow.report.grid import ticks
from attnflow.report.hasse_svg import SANS

COLOURS: Final = 7  # of a series, `af-series-0` and so on in the style sheet; then they repeat
_LEVELS: Final = 16
_TEXT: Final = {"font_size": 11, "fill": "currentColor", "fill_opacity": 0.78}
_LEFT, _TOP, _RIGHT, _BOTTOM = 52.0, 12.0, 14.0, 42.0


@dataclass(frozen=True)
class Series:
    """One attention of one model.

    Attributes:
        label: what it is called.
        symmetry: median and quartiles over the layers.
        directionality: likewise.
        layers: index of each layer.
        by_layer: symmetry and directionality of each layer.
    """

    label: str
    symmetry: Quartiles
    directionality: Quartiles
    layers: tuple[int, ...]
    by_layer: tuple[tuple[float, ...], tuple[float, ...]]


def plane_chart(
    series: Sequence[Series], background: Sequence[tuple[float, float]], width: float, height: float
) -> str:
    """Medians of symmetry (to the right) and directionality (upwards) with quartile whiskers, as `<svg>`.

    Args:
        series: marks; those without a symmetry are left out.
        background: other medians, as dots behind.
        width: of the drawing in pixels.
        height: likewise.
    """
    known = [(index, s) for index, s in enumerate(series) if not math.isnan(s.symmetry.median)]
    xs = [0.0, *(x for x, _ in background), *(q for _, s in known for q in (s.symmetry.q25, s.symmetry.q75))]
    ys = [
        0.0,
        *(y for _, y in background),
        *(q for _, s in known for q in (s.directionality.q25, s.directionality.q75)),
    ]
    frame = _Frame(_range(xs), _range(ys), width, height)
    dots = [element("circle", cx=frame.x(x), cy=frame.y(y), r=2.2, class_="af-published") for x, y in background]
    marks = [_mark(frame, index, s) for index, s in known]
    axes = frame.axes("symmetry", "directionality")
    what = "Median symmetry and directionality, with quartiles over layers"
    return _svg(what, "".join([axes, *dots, *marks]), width, height)


def layer_chart(series: Sequence[Series], which: int, width: float, height: float) -> str:
    """Symmetry (`which` = 0) or directionality (1) by layer, a line for each series, as `<svg>`."""
    name = ("symmetry", "directionality")[which]
    values = [value for s in series for value in s.by_layer[which] if not math.isnan(value)]
    last = max((layer for s in series for layer in s.layers), default=0)
    frame = _Frame((0.0, float(max(last, 1))), _range([0.0, *values]), width, height)
    lines: list[str] = []
    for index, s in enumerate(series):
        points = [
            (frame.x(float(layer)), frame.y(value), layer, value)
            for layer, value in zip(s.layers, s.by_layer[which], strict=True)
            if not math.isnan(value)
        ]
        if not points:
            continue
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y, _, _ in points)
        line = element("path", d=path, fill="none", stroke="currentColor", stroke_width=1.75)
        if last <= 48:
            line += "".join(
                element(
                    "circle", _title(f"{s.label}, layer {layer}: {value:z.3f}"), cx=x, cy=y, r=2.8, fill="currentColor"
                )
                for x, y, layer, value in points
            )
        lines.append(element("g", line, class_=_colour(index)))
    return _svg(f"{name} by layer", frame.axes("layer", name, layers=last + 1) + "".join(lines), width, height)


def head_map(grid: npt.NDArray[np.float64], limit: float, name: str, width: float) -> str:
    """One score of heads (downwards) by layers (to the right), the colour by its size up to `limit`, as `<svg>`.

    Args:
        grid: [heads, layers]; NaN where there is none.
        limit: the size that has the full colour.
        name: of the score.
        width: of the drawing in pixels.
    """
    heads, layers = grid.shape
    left, top, bottom = 36.0, 4.0, 36.0
    cell = (width - left - 4) / layers
    side = min(max(cell * 0.7, 3.0), 16.0)
    levels = np.clip(np.nan_to_num(grid / limit) * _LEVELS, -_LEVELS, _LEVELS).round().astype(np.int64)
    parts: list[str] = []
    for level in np.unique(levels):  # a path for each shade keeps hundreds of heads by layers small
        cells = "".join(
            f"M{number(left + layer * cell)} {number(top + head * side)}h{number(cell)}v{number(side)}h{number(-cell)}z"
            for head, layer in np.argwhere(levels == level)
            if not math.isnan(grid[head, layer])
        )
        kind = "af-positive" if level > 0 else "af-negative"
        parts.append(element("path", d=cells, class_=kind, fill_opacity=abs(int(level)) / _LEVELS))
    box = element(
        "rect",
        x=left,
        y=top,
        width=cell * layers,
        height=side * heads,
        fill="none",
        stroke="currentColor",
        stroke_opacity=0.35,
    )
    columns = [
        element("text", str(at), x=left + (at + 0.5) * cell, y=top + heads * side + 14, text_anchor="middle", **_TEXT)
        for at in ticks(layers, 6)
    ]
    rows = [
        element("text", str(at), x=left - 6, y=top + (at + 0.5) * side + 4, text_anchor="end", **_TEXT)
        for at in ticks(heads, max(2, min(6, int(heads * side / 16))))
    ]
    words = element(
        "text", "layer", x=left + layers * cell / 2, y=top + heads * side + 31, text_anchor="middle", **_TEXT
    )
    body = "".join([*parts, box, *columns, *rows, words])
    return _svg(f"{name} of each head (downwards) in each layer", body, width, top + heads * side + bottom)


class _Frame:
    """The place of values in a chart."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], width: float, height: float) -> None:
        self._x, self._y, self._width, self._height = x, y, width, height

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (self._width - _LEFT - _RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self._y
        return self._height - _BOTTOM - (self._height - _TOP - _BOTTOM) * (value - low) / (high - low)

    def axes(self, across: str, upwards: str, layers: int | None = None) -> str:
        """Rules with their values, and the names of both axes; zero is drawn stronger."""
        right, bottom = self._width - _RIGHT, self._height - _BOTTOM
        parts: list[str] = []
        for value in _steps(*self._y, 7):
            rule = f"M{number(_LEFT)} {number(self.y(value))}H{number(right)}"
            parts.append(element("path", d=rule, stroke="currentColor", stroke_opacity=0.45 if value == 0 else 0.14))
            parts.append(element("text", _short(value), x=_LEFT - 7, y=self.y(value) + 4, text_anchor="end", **_TEXT))
        whole = [float(at) for at in ticks(layers, 6)] if layers is not None else _steps(*self._x, 7)
        for value in whole:
            if layers is None:
                rule = f"M{number(self.x(value))} {number(_TOP)}V{number(bottom)}"
                parts.append(
                    element("path", d=rule, stroke="currentColor", stroke_opacity=0.45 if value == 0 else 0.14)
                )
            text = f"{value:g}" if layers is not None else _short(value)
            parts.append(element("text", text, x=self.x(value), y=bottom + 16, text_anchor="middle", **_TEXT))
        middle = (_LEFT + right) / 2
        parts.append(
            element("text", across, x=middle, y=self._height - 8, text_anchor="middle", **_TEXT | {"font_size": 12})
        )
        turned = f"rotate(-90 12 {number((_TOP + bottom) / 2)})"
        parts.append(
            element(
                "text",
                upwards,
                x=12.0,
                y=(_TOP + bottom) / 2,
                text_anchor="middle",
                transform=turned,
                **_TEXT | {"font_size": 12},
            )
        )
        return "".join(parts)


def _mark(frame: _Frame, index: int, series: Series) -> str:
    s, d = series.symmetry, series.directionality
    x, y = frame.x(s.median), frame.y(d.median)
    across = f"M{number(frame.x(s.q25))} {number(y)}H{number(frame.x(s.q75))}"
    upwards = f"M{number(x)} {number(frame.y(d.q25))}V{number(frame.y(d.q75))}"
    whiskers = element("path", d=across + upwards, stroke="currentColor", stroke_width=1.5, fill="none")
    words = _title(f"{series.label}: symmetry {s}, directionality {d}")
    return element(
        "g", whiskers + element("circle", words, cx=x, cy=y, r=5.0, fill="currentColor"), class_=_colour(index)
    )


def _colour(index: int) -> str:
    return f"af-series-{index % COLOURS}"


def _title(text: str) -> str:
    return element("title", escape(text))


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A range that holds all values with some air, never empty."""
    low, high = min(values), max(values)
    air = 0.06 * (high - low) or 0.1
    return low - air, high + air


def _steps(low: float, high: float, most: int) -> list[float]:
    """Round values within [low, high], zero among them if it lies there."""
    power = 10.0 ** math.floor(math.log10(high - low)) / 10
    step = next(s * power for s in (1, 2, 5, 10, 20, 50, 100) if (high - low) / (s * power) <= most)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".").replace("-", "−") if value else "0"


def _svg(what: str, body: str, width: float, height: float) -> str:
    return element(
        "svg",
        _title(what) + body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        class_="af-svg af-scores",
        font_family=SANS,
    )
