"""How receptive fields grow with the layers, as a chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from attnflow.order.flow import Flow
from attnflow.report.charts import POSITIVE, blank, chart
from attnflow.report.mask_facts import growth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS: Final = 160


@chart
def growth_chart(flow: Flow, *, title: str | None = None) -> Figure:
    """Least, mean and largest share of the final receptive field after each number of layers.

    Args:
        flow: the order; its receptive fields are followed up to its depth.
        title: heading.
    """
    shares = growth(flow).shares
    last = len(shares) - 1
    layers = np.unique(np.linspace(0, last, min(_POINTS, last + 1)).round().astype(np.int64))
    figure = blank(6.4, 2.7)
    axes = figure.add_subplot()
    low, mean, high = (100 * reduce(shares[layers], axis=1) for reduce in (np.min, np.mean, np.max))
    axes.fill_between(layers, low, high, color=POSITIVE, alpha=0.16, linewidth=0, label="least to largest position")
    axes.plot(layers, mean, color=POSITIVE, marker="o" if last <= 40 else "", markersize=4, label="mean")
    axes.set(xlabel="layers", ylabel="% of what ever arrives", ylim=(0, 104), title=title or "")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="lower right")
    return figure
