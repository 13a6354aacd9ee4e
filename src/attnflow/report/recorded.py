"""Charts of what was recorded while a model ran: scores during training, active entries, the bias of one query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import shorten, token_label
from attnflow.bias.map import LayerMap, LayerQuery, QueryBias
from attnflow.geometry.monitor import Monitor
from attnflow.knowledge.reading.results import ActivityReport
from attnflow.report.charts import (
    NEGATIVE,
    POSITIVE,
    SERIES,
    SOFT,
    blank,
    chart,
    heat_map,
    literal,
    name_axis,
    table_size,
)  # fmt: skip
from attnflow.report.displays import draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]


@draws(Monitor)
@chart
def monitor_chart(monitor: Monitor, *, title: str | None = None) -> Figure:
    steps = list(monitor.history)
    if not steps:
        raise ValueError("the monitor has no record yet: use it in a with block, or call start() or record() first")
    figure = blank(7.2, 4.6)
    panels = figure.subplots(2, 1, sharex=True)
    latest = monitor.history[steps[-1]]
    for axes, score in zip(panels, ("symmetry", "directionality"), strict=True):
        stems = [name for name in latest if name.endswith(f"/{score}")]
        for stem, colour in zip(stems, SERIES * len(stems), strict=False):
            layers = [name for name in latest if name.startswith(f"{stem}/layer_")]
            values = np.array([[record[name] for name in layers] for record in monitor.history.values()])
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
            name = stem.removeprefix("geometry/").removesuffix(score).strip("/") or "median of layers"
            axes.fill_between(steps, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(steps, middle, color=colour, marker="o" if len(steps) <= 40 else "", markersize=4, label=name)
        axes.axhline(0, color=SOFT, linewidth=0.8)
        axes.set_ylabel(score)
        axes.grid(axis="y", alpha=0.25)
    panels[0].legend(loc="best", title="band: quartiles", title_fontsize=8)
    panels[1].set_xlabel("step")
    panels[1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(literal(title or f"attention geometry of {type(monitor.model).__name__} while it trains"))
    return figure


@draws(ActivityReport)
@chart
def activity_chart(report: ActivityReport, *, title: str | None = None) -> Figure:
    """Draws the shares of entries that are active for a token and that never are, layer by layer from the top."""
    layers = report.layers
    if not layers:
        raise ValueError("no layer was counted: there is nothing to draw")
    figure = blank(7.4, 1.8 + 0.19 * min(len(layers), 64))
    active, never = figure.subplots(1, 2, sharey=True)
    places = range(len(layers))
    sizes = [max(one.entries, 1) for one in layers]
    means, most, dead = (
        [100 * getattr(one, name) / size for one, size in zip(layers, sizes, strict=True)]
        for name in ("mean", "maximum", "dead")
    )
    active.barh(places, means, color=POSITIVE, height=0.7, label="mean of tokens")
    active.plot(most, places, linestyle="", marker="|", color=SOFT, label="the most active token")
    never.barh(places, dead, color=NEGATIVE, height=0.7, hatch="///", edgecolor="white")
    some = "" if all(one.read_all for one in layers) else ", of those that were read"
    active.set(xlabel=f"% of entries active for a token{some}", ylabel="layer", xlim=(0, None))
    never.set(xlabel="% of entries never active", xlim=(0, max(1.0, *dead)))
    name_axis(active.yaxis, [str(one.layer) for one in layers], [one.layer for one in layers])
    active.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=2)
    summary = f"never active in any layer: {len(report.dead):,} of {report.entries:,} entries"
    figure.suptitle(literal(title or summary))
    return figure


@draws(QueryBias)
def query_chart(bias: QueryBias, *, title: str | None = None) -> Figure:
    head = "" if bias.head is None else f", head {bias.head}"
    what = f"bias, row-centred: query {token_label(bias.tokens[bias.query])} at position {bias.query}{head}"
    table = np.array([[np.nan if value is None else value for value in one.bias] for one in bias.layers])
    tokens = [token_label(token) for token in bias.tokens]
    return _bias_chart(table, tokens, [str(one.layer) for one in bias.layers], "layer", title or what)


@draws(LayerQuery)
def layer_query_chart(layer: LayerQuery, *, title: str | None = None) -> Figure:
    table = np.array([[np.nan if value is None else value for value in layer.bias]])
    keys = list(map(str, range(len(layer.bias))))
    return _bias_chart(table, keys, [str(layer.layer)], "layer", title or f"bias, row-centred, of {layer.name}")


@draws(LayerMap)
def layer_chart(layer: LayerMap, *, title: str | None = None) -> Figure:
    allowed = layer.allowed.any(dim=0).numpy()
    table = np.where(allowed, layer.bias.float().mean(dim=0).numpy(), np.nan)
    rows, keys = table.shape
    what = title or f"bias, row-centred, of {layer.name}"
    return _bias_chart(table, list(map(str, range(keys))), list(map(str, range(rows))), "captured query", what)


@chart
def _bias_chart(table: Array, tokens: Sequence[str], sides: Sequence[str], side: str, title: str) -> Figure:
    figure = blank(*table_size(tokens, len(sides)))
    axes = figure.add_subplot()
    values = np.ma.masked_invalid(table)
    heat_map(axes, values, float(np.abs(values).max()) or 1.0 if values.count() else 1.0)
    name_axis(axes.xaxis, tokens, range(len(tokens)), turned=True)
    name_axis(axes.yaxis, sides, range(len(sides)))
    axes.set(xlabel="key", ylabel=side)
    axes.set_title(literal(shorten(title, 110)), loc="left")
    return figure
