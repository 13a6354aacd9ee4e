"""What an audit saw of every watched module, as a chart: layers downwards, the modules of a layer to the right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnflow._core.markup import percent, plural, shorten
from attnflow.audit.findings import AuditReport, ModuleResult
from attnflow.report.charts import INK, blank, chart, literal
from attnflow.report.hasse_svg import runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKS: Final = {
    "clean": ("#9fcdb3", "clean"),
    "breaks": ("#b40426", "breaks the order"),
    "carries": ("#e8a9ac", "carries a break on"),
}
_ROWS: Final = 48  # runs of layers that are shown
_OUTSIDE: Final = "outside the layers"


@dataclass(frozen=True)
class Strip:
    """The modules of one stack of layers: a row for each run of layers that are alike, a column for each module."""

    stack: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str | None, ...]], ...]


@chart
def audit_chart(report: AuditReport, *, title: str | None = None) -> Figure:
    """Where a flow against the order starts and how far it is carried; layers that are alike share a row.

    Args:
        report: the result of `af.audit.check`.
        title: heading; by default the verdict.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: no module was watched.
    """
    from matplotlib.patches import Patch

    strips = strips_of(report.modules)
    if not strips:
        raise ValueError("no module was watched: there is nothing to draw")
    widest = max(len(strip.names) for strip in strips)
    names = [max(map(len, strip.names)) for strip in strips]
    heights = [0.24 * min(len(s.rows), _ROWS) + 0.085 * n + 0.35 for s, n in zip(strips, names, strict=True)]
    figure = blank(min(14.0, max(5.0, 1.9 + 0.3 * widest)), sum(heights) + 0.8)
    panels = figure.subplots(len(strips), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, strip in zip(panels, strips, strict=True):
        _strip(axes, strip, widest)
    count = plural(len(report.violations), "violation")
    verdict = count if report.violations else "no flow against the order" if report.ok else report.verdict
    tested = percent(report.coverage).replace("\xa0", " ")
    heading = f"{verdict}: {report.order}; {tested} of the forbidden pairs tested"
    figure.suptitle(literal(title or shorten(heading, 110)))
    handles = [Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, label=name) for colour, name in _LOOKS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _strip(axes: Any, strip: Strip, widest: int) -> None:
    from matplotlib.patches import Rectangle

    rows = strip.rows[:_ROWS]
    for y, (_, cells) in enumerate(rows):
        for x, status in enumerate(cells):
            if status is not None:
                colour = _LOOKS[status][0]
                axes.add_patch(
                    Rectangle((x - 0.42, y - 0.42), 0.84, 0.84, facecolor=colour, edgecolor=INK, linewidth=0.4)
                )
                if status == "breaks":
                    axes.text(x, y, "!", color="white", weight="bold", ha="center", va="center_baseline")
    axes.set(xlim=(-0.6, widest - 0.4), ylim=(len(rows) - 0.4, -0.6))
    axes.set_xticks(range(len(strip.names)), [literal(name) for name in strip.names], rotation=90)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    more = len(strip.rows) - len(rows)
    remark = f" (the first {_ROWS} rows)" if more > 0 else ""
    axes.set_title(literal(strip.stack) + remark, loc="left", fontsize=9)
    axes.set_aspect("equal", anchor="NW")


def strips_of(modules: Sequence[ModuleResult]) -> list[Strip]:
    """The watched modules by stack, layer and name within the layer; those outside of all layers last."""
    cells: dict[str, dict[int, dict[str, str]]] = {}  # path before the layer's number -> layer -> name -> status
    outside: dict[str, str] = {}
    for result in modules:
        match = None if result.layer is None else re.match(rf"(.*?\b){result.layer}(?:\.(.+))?$", result.module)
        if match is None or result.layer is None:
            outside[result.module] = result.status
        else:
            stack = cells.setdefault(match[1].rstrip(".") or "layers", {})
            stack.setdefault(result.layer, {})[match[2] or "(layer)"] = result.status
    strips: list[Strip] = []
    for stack, layers in cells.items():
        names = tuple(dict.fromkeys(name for layer in layers.values() for name in layer))
        rows: list[tuple[list[int], tuple[str | None, ...]]] = []
        for number, layer in sorted(layers.items()):
            row = tuple(layer.get(name) for name in names)
            if rows and rows[-1][1] == row:
                rows[-1][0].append(number)
            else:
                rows.append(([number], row))
        named = [(f"layer{'s' if len(numbers) > 1 else ''} {runs(numbers)}", row) for numbers, row in rows]
        strips.append(Strip(stack, names, tuple(named)))
    if outside:
        strips.append(Strip(_OUTSIDE, tuple(outside), (("", tuple(outside.values())),)))
    return strips
