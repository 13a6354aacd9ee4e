"""Charts of what was recorded while a model ran: scores during training, active entries, the bias of one query."""

from __future__ import annotations

import numpy as np

from attnflow._core.markup import shorten, token_label, token_place
from attnflow.bias.map import LayerMap, LayerQuery, QueryBias
from attnflow.geometry.monitor import Monitor
from attnflow.knowledge.reading.results import ActivityReport, layer_labels
from attnflow.report import charts
from attnflow.report.charts import Figure, chart, literal, name_axis
from attnflow.report.displays import draws


@draws(Monitor)
@chart
def monitor_chart(monitor: Monitor, *, title: str | None = None) -> Figure:
    steps = list(monitor.history)
    if not steps:
        raise ValueError("the monitor has no record yet: use it in a with block, or call start() or record() first")
    figure = charts.blank(7.2, 4.6)
    panels = figure.subplots(2, 1, sharex=True)
    latest = monitor.history[steps[-1]]
    for axes, score in zip(panels, ("symmetry", "directionality"), strict=True):
        stems = [name for name in latest if name.endswith(f"/{score}")]
        for stem, colour in zip(stems, charts.SERIES * len(stems), strict=False):
            layers = [name for name in latest if name.startswith(f"{stem}/layer_")]
            values = np.array([[record[name] for name in layers] for record in monitor.history.values()])
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
            name = stem.removeprefix("geometry/").removesuffix(score).strip("/") or "median of layers"
            axes.fill_between(steps, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(steps, middle, color=colour, marker="o" if len(steps) <= 40 else "", markersize=4, label=name)
        axes.axhline(0, color=charts.SOFT, linewidth=0.8)
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
    """Draws the shares of entries that are active for a token and that never are, layer by layer from below."""
    layers = report.layers
    if not layers:
        raise ValueError("no layer was counted: there is nothing to draw")
    figure = charts.blank(7.4, 1.8 + 0.19 * min(len(layers), 64))
    active, never = figure.subplots(1, 2, sharey=True)
    places = range(len(layers))
    means, most, dead = (
        [100 * getattr(layer, name) / max(layer.entries, 1) for layer in layers] for name in ("mean", "maximum", "dead")
    )
    active.barh(places, means, color=charts.POSITIVE, height=0.7, label="mean of tokens")
    active.plot(most, places, linestyle="", marker="|", color=charts.SOFT, label="the most active token")
    never.barh(places, dead, color=charts.NEGATIVE, height=0.7, hatch="///", edgecolor="white")
    some = "" if all(one.read_all for one in layers) else ", of those that were read"
    active.set(xlabel=f"% of entries active for a token{some}", ylabel="layer", xlim=(0, None))
    never.set(xlabel="% of entries never active", xlim=(0, max(1.0, *dead)))
    name_axis(active.yaxis, layer_labels(layers), [one.layer for one in layers])
    figure.legend(loc="outside lower center", ncols=2)
    summary = f"never active in any layer: {len(report.dead):,} of {report.entries:,} entries"
    figure.suptitle(literal(title or summary))
    return figure


@draws(QueryBias, LayerQuery)
def query_chart(bias: QueryBias | LayerQuery, *, title: str | None = None) -> Figure:
    if isinstance(bias, LayerQuery):
        layers, keys = (bias,), list(map(str, range(len(bias.bias))))
        what = f"bias, row-centred, of {bias.name}"
    else:
        layers, keys = bias.layers, [token_label(token) for token in bias.tokens]
        head = "" if bias.head is None else f", head {bias.head}"
        what = f"bias, row-centred: query {token_place(bias.tokens[bias.query], bias.query)}{head}"
    table = np.array([layer.bias for layer in layers], dtype=np.float64)  # None becomes NaN
    return charts.table_chart(table, keys, [str(layer.layer) for layer in layers], "layer", _titled(title or what))


@draws(LayerMap)
def layer_chart(layer: LayerMap, *, title: str | None = None) -> Figure:
    allowed = layer.allowed.any(dim=0).numpy()
    table = np.where(allowed, layer.bias.float().mean(dim=0).numpy(), np.nan)
    rows, keys = table.shape
    what = title or f"bias, row-centred, of {layer.name}"
    tokens, sides = (list(map(str, range(size))) for size in (keys, rows))
    return charts.table_chart(table, tokens, sides, "captured query", _titled(what))


def _titled(title: str) -> dict[str, str]:
    return {"label": literal(shorten(title, 110)), "loc": "left"}
