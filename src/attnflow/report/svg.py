"""Our own drawings, of masks and diagrams, as SVG; and charts as files."""

from __future__ import annotations

import html
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnflow._core.files import write_atomically
from attnflow._core.markup import element, escape, number
from attnflow.report.encoding import SANS, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Number = int | float
MONO: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
CELL, HOT = "#2f6c94", "#b3263e"  # what is allowed; a leak or a path
_STYLE: Final = re.sub(r"(?s)/\*.*?\*/|\n", "", (files("attnflow.report") / "assets" / "figure.css").read_text("utf-8"))
_MARGIN: Final = 14.0


@dataclass(frozen=True)
class Svg:
    """A drawing that notebooks show and `savefig` writes.

    Attributes:
        markup: one `<svg>` element, with colours for light and dark.
    """

    markup: str

    def savefig(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawing as .svg, .pdf or .png, all of it or nothing; equal drawings make equal files.

        Raises:
            ValueError: another suffix.
            MissingExtra: .pdf and .png are written by matplotlib, which is not installed.
        """
        content = encode(self, Path(path).suffix.lower())
        with write_atomically(path) as file:
            file.write(content)
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.markup

    def _repr_html_(self) -> str:
        """Part of a notebook's page, whose theme an image would not know."""
        return f"<div>{self.markup}</div>"

    def __repr__(self) -> str:
        title = re.search(r"<title>(.*?)</title>", self.markup)
        return f"Svg({html.unescape(title[1]) if title else ''}: {len(self.markup) / 1024:.0f} KiB)"


def standalone(markup: str) -> Svg:
    on_page = re.sub(r'(class="af-svg[^"]*)"', r'\1 af-page"', markup, count=1)
    return Svg(on_page.replace("<title>", f"<style>{_STYLE}</style><title>", 1))


def root(
    content: str,
    width: float,
    height: float,
    what: str,
    kind: str = "af-svg",
    title: str | None = None,
    **attributes: object,
) -> str:
    """Returns the whole `<svg>`; a title stands above the origin, so that it moves nothing that is drawn."""
    lines = textwrap.wrap(title or "", max(16, int(width / 7.8)))
    bold: dict[str, Any] = {"font_size": 13, "font_weight": 600, "fill": "currentColor"}
    content += "".join(
        element("text", escape(line), x=_MARGIN, y=-6.0 - 18 * at, **bold) for at, line in enumerate(reversed(lines))
    )
    above = 18.0 * len(lines) + 10 if lines else 0.0
    frame = {"viewBox": f"0 {number(-above)} {number(width)} {number(height + above)}"}
    look = {"width": width, "height": height + above, "role": "img", "class_": kind, "font_family": SANS}
    body = element("title", escape(what)) + content
    return element("svg", body, xmlns="http://www.w3.org/2000/svg", **frame, **look, **attributes)


def text(
    words: str, x: Number, y: Number, size: Number = 11.5, anchor: str = "", font: str = "", opacity: Number = 0
) -> str:
    look = {"text_anchor": anchor or None, "font_size": size, "font_family": font or None, "fill": "currentColor"}
    return element("text", escape(words), x=x, y=y, **look, fill_opacity=opacity or None)


def framed(body: str, width: float, height: float, caption: Sequence[str], what: str, title: str | None = None) -> str:
    """Returns a whole `<svg>`: the drawing centred, the wrapped caption below it."""
    inner = max(width, 340.0 if caption else 0.0)
    lines = [line for part in caption for line in textwrap.wrap(part, max(24, int(inner / 6.1)))]
    full_width, full_height = inner + 2 * _MARGIN, height + 2 * _MARGIN + (8 + 17 * len(lines) if lines else 0)
    drawing = element("g", body, transform=f"translate({pair(((full_width - width) / 2, _MARGIN))})")
    top, look = height + _MARGIN + 24, {"font_size": 11.5, "fill": "currentColor", "fill_opacity": 0.75}
    below = "".join(element("text", escape(line), x=_MARGIN, y=top + 17 * at) for at, line in enumerate(lines))
    below = element("g", below, class_="af-caption", **look) if below else ""
    return root(drawing + below, full_width, full_height, what, title=title)


def pair(point: tuple[float, float]) -> str:
    return f"{number(point[0])},{number(point[1])}"


def encode(picture: Svg | Figure, suffix: str) -> bytes:
    """Encodes a picture as .svg, .png or .pdf; equal pictures give equal bytes."""
    if suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"expected a file name that ends in .svg, .png or .pdf, got {suffix!r}")
    if not isinstance(picture, Svg):
        return written(picture, suffix[1:], dpi=200)
    if suffix == ".svg":
        return picture.markup.encode()
    from attnflow.report.painting import painted

    return written(painted(picture.markup), suffix[1:], dpi=192)
