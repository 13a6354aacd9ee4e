"""Parts of a score as bars, and with them what one component contributes: its leading heads and tokens, or entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attnflow._core.markup import plural, shorten, token_label
from attnflow.geometry.attribution import ComponentZoom, Part, Share
from attnflow.report.charts import INK, NEGATIVE, POSITIVE, SOFT, blank, chart, literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BARS: Final = 60  # parts that are drawn; the others are summed


@chart
def zoom_chart(zoom: ComponentZoom, *, raw: bool = False, title: str | None = None) -> Figure:
    listed, cut = zoom.parts[:BARS], zoom.parts[BARS:]
    sums = [("sum of all", zoom.total)]
    if zoom.rest.raw:
        sums.insert(0, ("biases", zoom.rest))
    if zoom.num_others or cut:
        value = zoom.others.value + sum(part.value for part in cut)
        others = Share(value, zoom.others.raw + sum(part.raw for part in cut))
        sums.insert(0, (plural(zoom.num_others + len(cut), "other part"), others))
    names = [*(_name(part) for part in listed), *(name for name, _ in sums)]
    shares = [*listed, *(share for _, share in sums)]
    figure = blank(6.4, 1.1 + 0.22 * len(shares))
    axes = figure.subplots()
    draw_bars(axes, names, [share.raw if raw else share.value for share in shares], len(listed))
    what = "raw" if raw or zoom.side == "key" else "centred over the row"
    said = "head, the token it read, and its weight on it" if zoom.kind == "attention" else "entry and its weight"
    axes.set_title(f"{said}; {what}", fontsize=9, loc="right")
    score = f"layer {zoom.layer}, head {zoom.head}, query {zoom.query}, key {zoom.key}"
    figure.suptitle(literal(title or shorten(f"{zoom.model}, {score}: {zoom.component} at the {zoom.side}", 100)))
    return figure


def _name(part: Part) -> str:
    if part.head is not None:
        what = f"head {part.head} from “{token_label(part.token, 16)}” ({part.source})"
    else:
        what = f"entry {part.entry}" + ("" if part.expert is None else f" of expert {part.expert}")
    return f"{what}, {part.weight:.2f}".replace("-", "−")


def draw_bars(axes: Any, names: Sequence[str], values: Sequence[float], count: int) -> None:
    """Draws parts of a score as bars, the first `count` and after a gap their sums, with their numbers at the right."""
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


def colours(values: Iterable[float]) -> list[str]:
    """Returns the colour of each number: of one that raises attention, or of one that lowers it."""
    return [POSITIVE if value >= 0 else NEGATIVE for value in values]


def signed(value: float) -> str:
    return f"{value:+z.3g}".replace("-", "−")
