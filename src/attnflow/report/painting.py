"""Our own drawings as matplotlib figures, from which .pdf and .png are written: just the elements that we draw."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any, Final

from attnflow.report.charts import INK, Figure, blank, chart, literal

_INHERITED: Final = (
    *("fill", "stroke", "fill-opacity", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linecap"),
    *("font-size", "font-weight", "font-family", "text-anchor"),
)
_TRANSFORM: Final = re.compile(r"(translate|rotate)\(([^)]*)\)")
_PATH: Final = re.compile(r"([A-Za-z])|(-?\d*\.?\d+(?:e-?\d+)?)")
_TAKES: Final = {"M": 2, "L": 2, "H": 1, "V": 1, "Q": 4, "C": 6, "Z": 0}
_NARROW: Final = 0.9  # DejaVu Sans is that much wider than the fonts that drawings are laid out for
_POINTS: Final = 0.75  # of a pixel


@chart
def painted(markup: str) -> Figure:
    """Draws an `<svg>` of ours, in its colours for light pages, on axes whose units are its pixels."""
    root = ElementTree.fromstring(markup)
    x, y, width, height = map(float, root.get("viewBox", "").split())
    figure = blank(width / 96, height / 96)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(x, x + width), ylim=(y + height, y))
    axes.set_axis_off()
    _paint(axes, root, {}, None)
    return figure


def _paint(axes: Any, node: ElementTree.Element, above: Mapping[str, str], place: Any) -> None:
    from matplotlib.transforms import Affine2D

    kind = node.tag.rpartition("}")[2]
    look = {**above, **{name: value for name in _INHERITED if (value := node.get(name)) is not None}}
    look["opacity"] = str(float(above.get("opacity", 1)) * float(node.get("opacity", 1)))
    own = Affine2D()
    for name, values in reversed(_TRANSFORM.findall(node.get("transform", ""))):
        numbers = [float(value) for value in re.split(r"[ ,]+", values.strip())]
        own = own.rotate_deg(numbers[0]) if name == "rotate" else own.translate(numbers[0], (*numbers, 0.0)[1])
    place = own if place is None else own + place
    at = {name: float(node.get(name, 0)) for name in ("x", "y", "width", "height", "rx", "cx", "cy", "r")}
    if kind in ("svg", "g", "a"):
        for child in node:
            _paint(axes, child, look, place)
    elif kind == "text":
        _write(axes, node, look, place, (at["x"], at["y"]))
    elif kind not in ("title", "style"):
        _shape(axes, kind, node, at, _drawn(look), place + axes.transData)


def _shape(
    axes: Any, kind: str, node: ElementTree.Element, at: Mapping[str, float], look: dict[str, Any], place: Any
) -> None:
    from matplotlib import patches
    from matplotlib.path import Path

    if kind == "rect":
        corner, sides = (at["x"], at["y"]), (at["width"], at["height"])
        style = f"round,pad=0,rounding_size={at['rx']}" if at["rx"] else "square,pad=0"
        shape: Any = patches.FancyBboxPatch(corner, *sides, boxstyle=style, transform=place, **look)
    elif kind == "circle":
        shape = patches.Circle((at["cx"], at["cy"]), at["r"], transform=place, **look)
    elif kind == "line":
        ends = [(float(node.get(f"x{end}", 0)), float(node.get(f"y{end}", 0))) for end in "12"]
        shape = patches.PathPatch(Path(ends), transform=place, **look)
    else:
        assert kind == "path", kind
        shape = patches.PathPatch(_path(node.get("d", "")), transform=place, **look)
    axes.add_artist(shape)


def _drawn(look: Mapping[str, str]) -> dict[str, Any]:
    from matplotlib.colors import to_rgba

    opacity = float(look["opacity"])
    sides = {}
    for side, usual in (("fill", "#000"), ("stroke", "none")):
        colour = look.get(side, usual).replace("currentColor", INK)
        sides[side] = "none" if colour == "none" else to_rgba(colour, opacity * float(look.get(f"{side}-opacity", 1)))
    width = float(look.get("stroke-width", 1)) * _POINTS
    dashes = [float(value) * _POINTS for value in look.get("stroke-dasharray", "").split()]
    style = (0, [dash / width for dash in dashes]) if dashes else "solid"  # matplotlib multiplies by the width
    ends = {"capstyle": look.get("stroke-linecap", "butt"), "joinstyle": "miter"}
    return {"facecolor": sides["fill"], "edgecolor": sides["stroke"], "linewidth": width, "linestyle": style, **ends}


def _path(data: str) -> Any:
    from matplotlib.path import Path

    codes, points = list[Any](), list[tuple[float, float]]()
    letters = {
        "M": Path.MOVETO,
        "L": Path.LINETO,
        "H": Path.LINETO,
        "V": Path.LINETO,
        "Q": Path.CURVE3,
        "C": Path.CURVE4,
    }
    here = start = (0.0, 0.0)
    command, values = "", list[float]()
    for letter, value in _PATH.findall(data):
        command = letter or command
        values += [] if letter else [float(value)]
        kind = command.upper()
        if len(values) < _TAKES[kind]:
            continue
        base = here if command.islower() else (0.0, 0.0)
        if kind == "Z":
            codes.append(Path.CLOSEPOLY)
            points.append(start)
            here = start
            continue
        if kind in "HV":
            ends = [(base[0] + values[0], here[1]) if kind == "H" else (here[0], base[1] + values[0])]
        else:
            ends = [(base[0] + x, base[1] + y) for x, y in zip(values[::2], values[1::2], strict=True)]
        codes += [letters[kind]] * len(ends)
        points += ends
        here, values = ends[-1], []
        if kind == "M":
            start, command = here, "l" if command == "m" else "L"
    return Path(points or [(math.nan, math.nan)], codes or None)


def _write(axes: Any, node: ElementTree.Element, look: Mapping[str, str], place: Any, at: tuple[float, float]) -> None:
    from matplotlib.patheffects import withStroke

    mono = "monospace" in look.get("font-family", "")
    drawn = _drawn(look)
    x, y = place.transform(at)
    (x0, y0), (x1, y1) = place.transform([(0, 0), (1, 0)])
    text = axes.text(
        x, y, literal(node.text or ""), color=drawn["facecolor"], va="baseline", rotation_mode="anchor",
        rotation=-math.degrees(math.atan2(y1 - y0, x1 - x0)),
        ha={"middle": "center", "end": "right"}.get(look.get("text-anchor", ""), "left"),
        family="DejaVu Sans Mono" if mono else "DejaVu Sans",
        weight="bold" if int(look.get("font-weight", 400)) > 500 else "normal",
        size=float(look.get("font-size", 16)) * _POINTS * (1.0 if mono else _NARROW),
    )  # fmt: skip
    if node.get("paint-order") == "stroke":
        text.set_path_effects([withStroke(linewidth=drawn["linewidth"], foreground=drawn["edgecolor"])])
