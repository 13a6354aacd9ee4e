"""The course of a training as a chart: losses, and how strong the bias of each layer becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnflow.bias.trained import Trained
from attnflow.report.charts import SERIES, SOFT, blank, chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@chart
def training_chart(trained: Trained, *, title: str | None = None) -> Figure:
    """Losses and |B| of each layer against steps.

    Args:
        trained: what `af.bias.train` returned.
        title: heading; by default what is shown.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    curve = trained.curve
    figure = blank(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    for name, label, colour, mark in (("loss", "training", SOFT, ""), ("eval_loss", "held out", SERIES[1], "o")):
        points = [(entry["step"], entry[name]) for entry in curve if name in entry]
        left.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=4, linewidth=1.3, label=label)
    left.set(xlabel="step", ylabel="loss (nats per token)")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)  # above: no line is covered
    layers = trained.layers
    numbers = [int(name.rpartition("_")[2]) for name in layers]
    colours, scale = colormaps["viridis"], Normalize(min(numbers, default=0), max([1, *numbers]))
    for name, number in zip(layers, numbers, strict=True):
        points = [(entry["step"], entry[name]) for entry in curve if name in entry]
        right.plot(*zip(*points, strict=True), color=colours(scale(number)), linewidth=1.2)
        right.annotate(str(number), points[-1], xytext=(3, 0), textcoords="offset points", fontsize=7, va="center")
    right.set(xlabel="step", ylabel="|B|, row-centred")
    if layers:
        bar = figure.colorbar(ScalarMappable(scale, colours), ax=right, pad=0.06, fraction=0.05, label="layer")
        bar.ax.invert_yaxis()  # layer 0 at the top, as everywhere
        bar.locator.set_params(integer=True)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title or "")
    return figure
