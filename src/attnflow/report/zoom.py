"""What one component contributes to a score: its leading heads and source tokens, or entries, as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnflow._core.markup import grouped, shorten, token_label
from attnflow.geometry.attribution import ComponentZoom, Part
from attnflow.report.attribution import draw_bars
from attnflow.report.charts import blank, chart, literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@chart
def zoom_chart(zoom: ComponentZoom, *, raw: bool = False, title: str | None = None) -> Figure:
    """Draws the listed parts of a component, the sum of the others, what its biases write, and the sum of all."""
    sums = [("sum of all", zoom.total)]
    if zoom.rest.raw:
        sums.insert(0, ("biases", zoom.rest))
    if zoom.num_others:
        sums.insert(0, (f"{grouped(zoom.num_others)} other parts", zoom.others))
    names = [*(_name(part) for part in zoom.parts), *(name for name, _ in sums)]
    shares = [*zoom.parts, *(share for _, share in sums)]
    figure = blank(6.4, 1.1 + 0.22 * len(shares))
    axes = figure.subplots()
    draw_bars(axes, names, [share.raw if raw else share.value for share in shares], len(zoom.parts))
    what = "raw" if raw or zoom.side == "key" else "centred over the row"
    said = "head, the token it read, and its weight on it" if zoom.kind == "attention" else "entry and its weight"
    axes.set_title(f"{said}; {what}", fontsize=9, loc="right")
    score = f"layer {zoom.layer}, head {zoom.head}, query {zoom.query}, key {zoom.key}"
    figure.suptitle(literal(title or shorten(f"{zoom.model}, {score}: {zoom.component} at the {zoom.side}", 100)))
    return figure


def _name(part: Part) -> str:
    """Names a part by what it is and by its weight."""
    if part.head is not None:
        what = f"head {part.head} from “{token_label(part.token, 16)}” ({part.source})"
    else:
        what = f"entry {part.entry}" + ("" if part.expert is None else f" of expert {part.expert}")
    return f"{what}, {part.weight:.2f}".replace("-", "−")
