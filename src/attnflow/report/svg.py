"""Our own drawings, of masks and diagrams: SVG for screens, and the same drawing as PNG or PDF."""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from attnflow._core import checks
from attnflow._core.errors import MissingExtra
from attnflow._core.files import write_atomically
from attnflow._core.markup import element, escape, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MONO: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
SANS: Final = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"
_STYLE: Final = (
    "<style>.af-page{color:#1c2024;background:#fff}"
    "@media (prefers-color-scheme:dark){.af-page{color:#e8eaec;background:#14171a}}</style>"
)
_MARGIN: Final = 14.0
_INK: Final = "#1c2024"
_INHERITED: Final = (
    "fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "font-size", "font-weight", "font-family",
    "text-anchor",
)  # fmt: skip
_STEP: Final = re.compile(r"([MLHVCZhvz])([^MLHVCZhvz]*)")
_POINTS: Final = 0.75  # of a pixel


@dataclass(frozen=True)
class Svg:
    """A drawing, as notebooks show it.

    Attributes:
        markup: one `<svg>` element, with colours for light and dark.
    """

    markup: str

    def savefig(self, path: str | os.PathLike[str], *, dpi: int = 200) -> Path:
        """Write the drawing as .svg, .png or .pdf, all of it or nothing; equal drawings make equal files.

        Raises:
            ValueError: another suffix.
            MissingExtra: PNG or PDF without matplotlib.
        """
        suffix = Path(path).suffix.lower()
        content = encode(self, suffix, dpi)
        with write_atomically(path) as file:
            file.write(content)
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        title = re.search(r"<title>(.*?)</title>", self.markup)
        return f"Svg({title[1] if title else ''}: {len(self.markup) / 1024:.0f} KiB)"


def standalone(markup: str) -> Svg:
    """Returns a drawing with the colours that a page's style sheet sets otherwise."""
    return Svg(
        re.sub(r'(class="af-svg[^"]*)"', r'\1 af-page"', markup, count=1).replace("<title>", f"{_STYLE}<title>", 1)
    )


def root(content: str, width: float, height: float, what: str, kind: str = "af-svg", **attributes: object) -> str:
    """Returns a whole `<svg>` with its accessible title."""
    return element(
        "svg",
        element("title", escape(what)) + content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        class_=kind,
        font_family=SANS,
        **attributes,
    )


def framed(body: str, width: float, height: float, caption: Sequence[str], what: str) -> str:
    """Returns a whole `<svg>`: the drawing centred, the wrapped caption below it."""
    inner = max(width, 340.0 if caption else 0.0)
    lines = [line for text in caption for line in textwrap.wrap(text, max(24, int(inner / 6.1)))]
    full_width, full_height = inner + 2 * _MARGIN, height + 2 * _MARGIN + (8 + 17 * len(lines) if lines else 0)
    drawing = element("g", body, transform=f"translate({pair(((full_width - width) / 2, _MARGIN))})")
    text = "".join(
        element("text", escape(line), x=_MARGIN, y=height + _MARGIN + 24 + 17 * index)
        for index, line in enumerate(lines)
    )
    if text:
        text = element("g", text, class_="af-caption", font_size=11.5, fill="currentColor", fill_opacity=0.75)
    return root(drawing + text, full_width, full_height, what)


def pair(point: tuple[float, float]) -> str:
    """Formats a point of a path."""
    return f"{number(point[0])},{number(point[1])}"


def encode(picture: Svg | Figure, suffix: str, dpi: int = 200) -> bytes:
    """Encodes a picture as an .svg, .png or .pdf file; equal pictures give equal bytes.

    Raises ValueError for another suffix, and MissingExtra for PNG or PDF without matplotlib.
    """
    checks.integer("dpi", dpi, 1)
    if suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"expected a file name that ends in .svg, .png or .pdf, got {suffix!r}")
    if isinstance(picture, Svg) and suffix == ".svg":
        return picture.markup.encode()
    figure = _figure_of(picture.markup) if isinstance(picture, Svg) else picture
    return written(figure, suffix[1:], dpi=dpi)


def written(figure: Figure, kind: str, *, rc: Mapping[str, str] | None = None, **options: Any) -> bytes:
    """Encodes a figure deterministically; characters that its font lacks are left to the reader."""
    from matplotlib import rc_context

    content = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with rc_context(cast(Any, {"svg.hashsalt": "attnflow", **(rc or {})})), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(content, format=kind, metadata=undated, **options)
    return content.getvalue()


def _figure_of(markup: str) -> Figure:
    """Converts our SVG, which has only paths, boxes, circles and text, to a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "a drawing as PNG or PDF") from error
    root = ElementTree.fromstring(markup)
    width, height = float(root.get("width", "1")), float(root.get("height", "1"))
    figure = Figure(figsize=(width / 96, height / 96), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    _draw(axes, root, Affine2D(), {"opacity": 1.0})
    return figure


def _draw(axes: Any, node: ElementTree.Element, place: Any, outer: Mapping[str, Any]) -> None:
    from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Rectangle

    style: dict[str, Any] = {**outer, **{name: node.attrib[name] for name in _INHERITED if name in node.attrib}}
    style["opacity"] = float(outer["opacity"]) * float(node.get("opacity", "1"))
    place = _moved(node.get("transform", ""), place)
    kind = node.tag.rpartition("}")[2]
    x, y, width, height, corner = (float(node.get(name, "0")) for name in ("x", "y", "width", "height", "rx"))
    fill, stroke = _colour(style, "fill", _INK), _colour(style, "stroke", "none")
    look: dict[str, Any] = {"facecolor": fill, "edgecolor": stroke, "zorder": 1}
    look |= {"linewidth": _POINTS * float(style.get("stroke-width", 1)), "transform": place + axes.transData}
    if node.get("stroke-dasharray"):
        look["linestyle"] = (0, [float(length) for length in node.get("stroke-dasharray", "").split()])
    if kind == "path":
        axes.add_patch(PathPatch(_path(node.get("d", "")), **look))
    elif kind == "rect" and corner:
        box = f"round,pad=0,rounding_size={min(corner, width / 2, height / 2)}"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=box, **look))
    elif kind == "rect":
        axes.add_patch(Rectangle((x, y), width, height, **look))
    elif kind == "circle":
        centre = float(node.get("cx", "0")), float(node.get("cy", "0"))
        axes.add_patch(Circle(centre, float(node.get("r", "0")), **look))
    elif kind == "text":
        matrix = place.get_matrix()
        axes.text(
            *place.transform((x, y)),
            "".join(node.itertext()).replace("$", r"\$"),
            color=_colour(style, "fill", _INK),
            fontsize=_POINTS * float(style.get("font-size", 16)),
            fontweight="bold" if int(style.get("font-weight", 400)) >= 600 else "normal",
            family="DejaVu Sans Mono" if "mono" in str(style.get("font-family")) else "DejaVu Sans",
            ha={"middle": "center", "end": "right"}.get(str(style.get("text-anchor")), "left"),
            va="baseline",
            rotation=-math.degrees(math.atan2(matrix[1, 0], matrix[0, 0])),
            rotation_mode="anchor",
            zorder=1,
        )
    elif kind in ("svg", "g"):
        for child in node:
            _draw(axes, child, place, style)


def _colour(style: Mapping[str, Any], what: str, default: str) -> Any:
    from matplotlib.colors import to_rgba

    name = str(style.get(what, default))
    if name in ("none", "transparent"):
        return "none"
    share = float(style["opacity"]) * float(style.get(f"{what}-opacity", 1))
    return to_rgba(_INK if name == "currentColor" else name, share)


def _moved(transform: str, place: Any) -> Any:
    from matplotlib.transforms import Affine2D

    own = Affine2D()
    for name, values in reversed(re.findall(r"(\w+)\(([^)]*)\)", transform)):
        numbers = [float(value) for value in values.replace(",", " ").split()]
        own = own.translate(numbers[0], numbers[1]) if name == "translate" else own.rotate_deg(numbers[0])
    return own + place


def _path(data: str) -> Any:
    from matplotlib.path import Path as Outline

    points: list[tuple[float, float]] = []
    codes: list[int] = []
    x, y = start = (0.0, 0.0)
    for step, values in _STEP.findall(data):
        numbers = [float(value) for value in values.replace(",", " ").split()]
        code = Outline.CURVE4 if step == "C" else Outline.MOVETO if step == "M" else Outline.LINETO
        if step in "Zz":
            code, corners = Outline.CLOSEPOLY, [start]
        elif step in "Hh":
            corners = [(numbers[0] + (x if step == "h" else 0.0), y)]
        elif step in "Vv":
            corners = [(x, numbers[0] + (y if step == "v" else 0.0))]
        else:
            corners = list(zip(numbers[::2], numbers[1::2], strict=True))
        points += corners
        codes += [int(code)] * len(corners)
        x, y = corners[-1]
        start = (x, y) if step == "M" else start
    return Outline(points or [(0.0, 0.0)], codes or [int(Outline.MOVETO)])
