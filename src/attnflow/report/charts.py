"""Charts as SVG: growth by layer, the make-up of a whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import element, escape, grouped, number, percent
from attnflow.report.grid import ticks
from attnflow.report.hasse_svg import SANS

_MOST_POINTS = 160


def growth_chart(shares: npt.NDArray[np.float64], width: float, height: float = 250.0) -> str:
    """Least, mean and largest share of the final receptive field after each number of layers, as `<svg>`.

    Args:
        shares: [layers + 1, positions], in [0, 1]; row l is after l layers.
        width: of the drawing in pixels; text stays the same size, so that a phone gets a drawing of its own.
    """
    last = len(shares) - 1
    chosen = np.unique(np.linspace(0, last, min(_MOST_POINTS, last + 1)).round().astype(np.int64))
    left, top, right, bottom = 46.0, 14.0, 16.0, 40.0
    plot_width, plot_height = width - left - right, height - top - bottom
    x = left + plot_width * (chosen / max(last, 1))
    lines = [shares[chosen].min(axis=1), shares[chosen].mean(axis=1), shares[chosen].max(axis=1)]
    y = [top + plot_height * (1 - line) for line in lines]
    grid = [
        _horizontal(share, left, top + plot_height * (1 - share), plot_width) for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    marks = [_layer_mark(layer, left + plot_width * layer / max(last, 1), height - 22) for layer in ticks(last + 1, 6)]
    text = {"font_size": 11.5, "fill": "currentColor"}
    axis = element("text", "layers", x=left + plot_width / 2, y=height - 5, text_anchor="middle", **text)
    outline = "M" + "L".join(_points(x, y[2])) + "L" + "L".join(reversed(_points(x, y[0]))) + "Z"
    band = element("path", d=outline, fill="currentColor", fill_opacity=0.12, class_="af-range")
    mean = element(
        "path",
        d="M" + "L".join(_points(x, y[1])),
        fill="none",
        stroke="currentColor",
        stroke_width=2.25,
        class_="af-mean",
    )
    dots = [
        _dot(int(layer), float(a), float(b), lines, i)
        for i, (layer, a, b) in enumerate(zip(chosen, x, y[1], strict=True))
    ]
    body = "".join([*grid, *marks, axis, band, mean, *(dots if last <= 40 else ())])
    what = "Share of the final receptive field after each number of layers: least, mean and largest over positions"
    return element(
        "svg",
        element("title", escape(what)) + body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        class_="af-svg af-growth",
        font_family=SANS,
    )


def share_bar(parts: Sequence[tuple[str, int, str]], width: float = 220.0) -> str:
    """A bar cut in proportion to (name, amount, CSS class), as `<svg>`; the table beside it has the numbers."""
    total = sum(amount for _, amount, _ in parts)
    x = 0.0
    pieces: list[str] = []
    for name, amount, kind in parts:
        length = width * amount / total if total else 0.0
        title = element("title", escape(f"{name}: {grouped(amount)} of {grouped(total)}"))
        pieces.append(element("rect", title, x=x, y=0, width=length, height=12, class_=kind, fill="currentColor"))
        x += length
    frame = element(
        "rect", x=0.5, y=0.5, width=width - 1, height=11, fill="none", stroke="currentColor", stroke_opacity=0.35
    )
    return element(
        "svg",
        "".join(pieces) + frame,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} 12",
        width=width,
        height=12,
        class_="af-svg af-share",
        role="img",
        aria_label=", ".join(f"{name} {grouped(amount)}" for name, amount, _ in parts),
    )


def _horizontal(share: float, left: float, y: float, width: float) -> str:
    line = element("path", d=f"M{number(left)} {number(y)}h{number(width)}", stroke="currentColor", stroke_opacity=0.14)
    text = element(
        "text",
        percent(share),
        x=left - 7,
        y=y + 4,
        text_anchor="end",
        font_size=11,
        fill="currentColor",
        fill_opacity=0.78,
    )
    return line + text


def _layer_mark(layer: int, x: float, y: float) -> str:
    return element(
        "text", grouped(layer), x=x, y=y, text_anchor="middle", font_size=11, fill="currentColor", fill_opacity=0.78
    )


def _dot(layer: int, x: float, y: float, lines: list[npt.NDArray[np.float64]], index: int) -> str:
    least, mean, largest = (percent(float(line[index])) for line in lines)
    title = element("title", escape(f"after {grouped(layer)} layers: mean {mean}, least {least}, largest {largest}"))
    return element("circle", title, cx=x, cy=y, r=3.2, fill="currentColor", class_="af-dot")


def _points(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> list[str]:
    return [f"{number(float(a))} {number(float(b))}" for a, b in zip(x, y, strict=True)]
