"""Shared chart code: one style, one signed colour scale, and SVG for pages."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, cast

import numpy as np
import numpy.typing as npt

from attnflow._core.errors import MissingExtra
from attnflow._core.markup import columns as display_width
from attnflow.report import html
from attnflow.report.encoding import SANS, written
from attnflow.report.html import Html

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # where matplotlib is not installed

Array = npt.NDArray[np.floating[Any]]
P = ParamSpec("P")

INK, SOFT = "#1b1f23", "#59626b"
SIZES: Final = "Blues"  # what has no sign
SERIES: Final = ("#0072b2", "#c85200", "#00845f", "#a8457f", "#a06f00", "#2a8fc4", "#3a3f44")
POSITIVE, NEGATIVE = SERIES[:2]  # blue and orange, which differ for every kind of colour vision
# A page gives these colours their counterparts in the dark.
_NAMES: Final = {INK: "ink", SOFT: "soft"} | {colour: f"s{index}" for index, colour in enumerate(SERIES)}
_STYLE: Final = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": SOFT,
    "axes.titlesize": 10, "axes.titlecolor": INK, "axes.linewidth": 0.8, "axes.spines.top": False,
    "axes.spines.right": False, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.frameon": False,
    "legend.fontsize": 8, "figure.titlesize": 10, "savefig.dpi": 200, "hatch.linewidth": 0.5,
}  # fmt: skip
PICTURES: Final = dict.fromkeys(range(0x2400, 0x2427), "·")  # of control characters; few fonts have them
_CELL: Final = 0.26  # inches of a row or column whose name is written
_NAMED: Final = 64  # rows or columns up to which each has its name
_WIDEST: Final = 12.0
_SVG: Final = "{http://www.w3.org/2000/svg}"
_LINK: Final = "{http://www.w3.org/1999/xlink}href"


def colours(values: Iterable[float]) -> list[str]:
    return [POSITIVE if value >= 0 else NEGATIVE for value in values]


def signed_map() -> Any:
    """White where a value is zero, blue where it is positive, as in the paper, and orange where it is negative."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("attnflow", (NEGATIVE, "#f7f7f7", POSITIVE))


def signed(value: float) -> str:
    return f"{value:+z.3g}".replace("-", "−")


def draw_bars(axes: Any, names: Sequence[str], values: Sequence[float], count: int) -> None:
    """Bars with their numbers at the right: the first `count`, and after a gap their sums."""
    places = np.arange(len(values)) + np.where(np.arange(len(values)) >= count, 0.4, 0.0)
    axes.barh(places, values, color=[*colours(values[:-1]), INK], height=0.7)
    axes.set_yticks(places, [literal(name) for name in names])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    beside = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    for place, value in zip(places, values, strict=True):
        axes.annotate(signed(value), (1, place), fontsize=7.5, **beside)
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("logits")


def chart(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorates a chart function with the package style; without matplotlib the call names the missing extra."""

    @wraps(draw)
    def styled(*arguments: P.args, **options: P.kwargs) -> Figure:
        try:
            from matplotlib import rc_context

            with rc_context(cast(Any, _STYLE)):
                return draw(*arguments, **options)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise MissingExtra("matplotlib", "report", "a chart") from error

    return styled


def blank(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def table_size(names: Sequence[str], rows: int) -> tuple[float, float]:
    columns = len(names)
    cell = _CELL if columns <= _NAMED else _WIDEST / columns
    label = 0.07 * max(map(display_width, names), default=0.0) if columns <= _NAMED else 0.2
    return min(_WIDEST, max(4.6, 1.9 + cell * columns)), 0.9 + label + (_CELL * rows if rows <= _NAMED else 8.0)


def name_axis(axis: Any, names: Sequence[str], positions: Sequence[int], *, turned: bool = False) -> None:
    """Labels rows or columns by name, or a few of them by position if there are many."""
    if len(names) > _NAMED:
        step = -(-len(names) // 16)
        axis.set_ticks(range(0, len(names), step), [str(p) for p in positions[::step]])
        return
    axis.set_ticks(range(len(names)), [literal(name) for name in names])
    for name, text in zip(names, axis.get_ticklabels(), strict=True):
        text.set_rotation(90 if turned and display_width(name) > 2 else 0)


def heat_map(axes: Any, table: Any, limit: float, *, signed: bool = True, up: bool = False, **bar: Any) -> None:
    """Draws a table as colours, signed around zero or from zero upwards: the first row is on top, but layers go up."""
    colours, least = (signed_map(), -limit) if signed else (SIZES, 0.0)
    # Not interpolated, so that SVG holds one pixel per cell.
    look = {"aspect": "auto", "interpolation": "none", "origin": "lower" if up else "upper"}
    image = axes.imshow(table, cmap=colours, vmin=least, vmax=limit, **look)
    axes.spines[["top", "right"]].set_visible(True)
    beside = {"pad": 0.02, "fraction": 0.05, "aspect": max(4, 2 * len(table))} | bar
    axes.figure.colorbar(image, ax=axes, **beside).outline.set_visible(False)


@chart
def table_chart(
    table: Array,
    names: Sequence[str],
    sides: Sequence[str],
    side: str,
    title: dict[str, str],
    places: Sequence[Sequence[int]] = (),
    label: str = "key",
    signed: bool = True,
) -> Figure:
    """Draws values by key and `side`, without those that are NaN; `places` are the positions of both."""
    columns, rows = places or (range(len(names)), range(len(sides)))
    figure = blank(*table_size(names, len(sides)))
    axes = figure.add_subplot()
    values = np.ma.masked_invalid(table)
    heat_map(
        axes, values, float(np.abs(values).max()) or 1.0 if values.count() else 1.0, signed=signed, up=side == "layer"
    )
    name_axis(axes.xaxis, names, columns, turned=True)
    name_axis(axes.yaxis, sides, rows)
    axes.set(xlabel=label, ylabel=side)
    axes.set_title(**title)
    return figure


def literal(text: str) -> str:
    """Escapes text so that matplotlib reads no formula: tokens may be dollar signs."""
    return text.replace("$", r"\$")


def svg_of(figure: Figure, title: str) -> str:
    """Palette colours become classes, which a page sets for light and dark; its policy forbids inline style."""
    content = written(figure, "svg", transparent=True, rc={"svg.fonttype": "none"})
    ElementTree.register_namespace("", _SVG[1:-1])
    root = ElementTree.fromstring(content)
    prefix = "af" + hashlib.sha256(content).hexdigest()[:8]
    used = set(re.findall(r"url\(#([^)]+)\)", content.decode()))
    used |= {node.get(_LINK, "")[1:] for node in root.iter() if node.get(_LINK, "").startswith("#")}
    for parent in list(root.iter()):
        for node in list(parent):
            if node.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(node)
            else:
                _clean(node, used, prefix)
    width, height = (float(root.get(name, "0").removesuffix("pt")) for name in ("width", "height"))
    root.attrib |= {"width": f"{width * 4 / 3:.0f}", "height": f"{height * 4 / 3:.0f}", "role": "img"}
    root.attrib |= {"class": "af-svg af-chart", "font-family": SANS, "stroke-linejoin": "round"}
    root.attrib.pop("version", None)
    words = ElementTree.Element(f"{_SVG}title")
    words.text = title
    root.insert(0, words)
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))


def in_page(draw: Callable[[], Figure], title: str, caption: html.Content | None = None) -> Html:
    """Returns a chart with its caption and accessible title, or a remark that names matplotlib's extra if missing."""
    try:
        picture = svg_of(draw(), title)
    except MissingExtra as error:
        return html.note("neutral", html.paragraph(f"{title}: {error}"))
    return html.figure(picture, caption, kind="chart")


def _clean(node: ElementTree.Element, used: set[str], prefix: str) -> None:
    style = dict(part.split(":", 1) for part in node.attrib.pop("style", "").split(";") if ":" in part)
    classes: list[str] = []
    for name, value in ((name.strip(), value.strip()) for name, value in style.items()):
        if name != "font-family":
            node.set(name, value.replace("url(#", f"url(#{prefix}-"))
        if name in ("fill", "stroke") and value in _NAMES:
            classes.append(f"af-{name}-{_NAMES[value]}")
    if classes:
        node.set("class", " ".join(classes))
    identity = node.attrib.pop("id", None)
    if identity in used:
        node.set("id", f"{prefix}-{identity}")
    for name in ("clip-path", _LINK):
        target = node.attrib.pop(name, None)
        if target is not None:
            plain = name if name == "clip-path" else "href"
            node.set(plain, target.replace("#", f"#{prefix}-") if "#" in target[:5] else "".join(target.split()))
    if node.tag == f"{_SVG}path":
        path = re.sub(r"-?\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", node.get("d", ""))
        node.set("d", " ".join(path.split()))
