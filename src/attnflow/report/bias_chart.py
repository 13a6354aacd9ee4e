"""Charts of a bias: the keys that a query is drawn to (blue) or turned away from (red), and the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import grouped, shorten, token_label
from attnflow.bias.map import BiasMap
from attnflow.report.charts import INK, SIGNED, blank, chart, heat_map, literal, name_axis, table_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]

_KEYS: Final = 180  # columns of a picture; of a longer text those that matter most


@chart
def map_chart(
    bias_map: BiasMap,
    *others: BiasMap,
    picture: Literal["bias", "weights", "compare"] = "bias",
    layer: int | None = None,
    query: int | None = None,
    head: int | None = None,
    names: Sequence[str] = (),
    title: str | None = None,
) -> Figure:
    """Draws the row-centred bias over the context (daa, fig. 1), zero in the middle of the colour scale.

    The paper shows one query in one layer. By default: the last query, which generates, in all captured layers; with
    `layer`, all captured queries of it. "compare" (daa, fig. 6): the weights of one query with the bias, without it,
    and in the base model.
    """
    if picture == "compare":
        return _bars([bias_map, *others], layer, -1 if query is None else query, head, names, title)
    if others:
        raise ValueError('several maps are compared by picture="compare"; "bias" and "weights" show one')
    if picture not in ("bias", "weights"):
        raise ValueError(f'picture must be "bias", "weights" or "compare", got {picture!r}')
    layers = [one.layer for one in bias_map] if layer is None else [layer]
    if layer is not None and query is None:
        rows = list(range(len(bias_map.queries)))
        table, allowed = (np.asarray(t) for t in (bias_map.values(picture, layer, head), bias_map.allowed(layer)))
        sides = [query_name(bias_map, row) for row in rows]
        what, side = f"layer {layer}", "query"
    else:
        row = bias_map.row(-1 if query is None else query)
        table = np.stack([np.asarray(bias_map.values(picture, number, head)[row]) for number in layers])
        allowed = np.stack([np.asarray(bias_map.allowed(number)[row]) for number in layers])
        sides, side = [str(number) for number in layers], "layer"
        what = f"query {query_name(bias_map, row)}" + (f", layer {layer}" if layer is not None else "")
    keys, remark = foremost(np.abs(np.where(allowed, table, 0)).max(axis=0), np.asarray(allowed.any(axis=0)))
    tokens = [token_name(bias_map, key) for key in keys]
    figure = blank(*table_size(tokens, len(sides)))
    axes = figure.add_subplot()
    values = np.ma.masked_array(table[:, keys], ~allowed[:, keys])
    limit = float(np.abs(values).max()) if values.count() else 0.0
    quantity = "bias, row-centred" if picture == "bias" else "attention weight"
    heat_map(axes, values, limit or 1.0, signed=picture == "bias")
    name_axis(axes.xaxis, tokens, keys, turned=True)
    name_axis(axes.yaxis, sides, layers if side == "layer" else list(bias_map.queries))
    axes.set(xlabel=f"key{remark}", ylabel=side)
    axes.set_title(literal(title or f"{quantity}: {what}{_heads(bias_map, head)}"))
    return figure


def _bars(
    maps: Sequence[BiasMap], layer: int | None, query: int, head: int | None, names: Sequence[str], title: str | None
) -> Figure:
    """Draws one panel of weights for each bias, for no bias and for the base model."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    panels = weight_panels(maps, layer, query, head, names)
    first = maps[0]
    row = first.row(query)
    most = np.max([weights for _, weights, _ in panels], axis=0)
    keys, remark = foremost(most, np.asarray(first.allowed(layer)[row]))
    tokens = [token_name(first, key) for key in keys]
    width, height = table_size(tokens, 0)
    figure = blank(width, height + 1.2 * len(panels))
    limit = max((float(np.abs(bias[keys]).max(initial=0.0)) for _, _, bias in panels if bias is not None), default=0.0)
    top = common_top([weights[keys] for _, weights, _ in panels])
    signed = ScalarMappable(Normalize(-(limit or 1.0), limit or 1.0), colormaps[SIGNED])
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, weights, bias) in zip(axes, panels, strict=True):
        colour = "0.6" if bias is None else signed.to_rgba(bias[keys])
        panel.bar(np.arange(len(keys)), np.minimum(weights[keys], top), color=colour, edgecolor=INK, linewidth=0.4)
        for index, weight in enumerate(weights[keys]):
            if weight > top:
                panel.text(index + 0.55, top, f"{weight:.2f}", fontsize=7.5, va="top", ha="left")
        panel.set_ylim(0, top)
        panel.set_title(literal(shorten(name, 48)), fontsize=9, loc="left")
    name_axis(axes[-1].xaxis, tokens, keys, turned=True)
    axes[-1].set_xlim(-0.6, len(keys) - 0.4)
    axes[-1].set_xlabel(f"key{remark}")
    where = "mean over layers" if layer is None else f"layer {layer}"
    what = f"attention weights: query {query_name(first, row)}, {where}{_heads(first, head)}"
    figure.suptitle(literal(title or what))
    if any(bias is not None for _, _, bias in panels):
        figure.colorbar(signed, ax=list(axes), pad=0.02, fraction=0.04, aspect=12 * len(panels), label="bias")
    return figure


def weight_panels(
    maps: Sequence[BiasMap], layer: int | None, query: int, head: int | None, names: Sequence[str] = ()
) -> list[tuple[str, Array, Array | None]]:
    """Returns (name, weights, row-centred bias or None) of one query: base model first, if it was run.

    A single map also gives the weights of the same queries and keys without the bias.
    """
    first = maps[0]
    labels = list(names) or (["with the bias"] if len(maps) == 1 else [f"bias {i}" for i in range(1, len(maps) + 1)])
    if len(labels) != len(maps):
        raise ValueError(f"expected a name for each of {len(maps)} maps, got {len(labels)}")
    for name, one in zip(labels, maps, strict=True):
        if one.tokens != first.tokens:
            raise ValueError(f"maps to compare must be of one text: {name!r} has other tokens than {labels[0]!r}")
    row = first.row(query)
    panels: list[tuple[str, Array, Array | None]] = []
    if all(one.weights_base is not None for one in first):
        panels.append(("base model", np.asarray(first.values("weights_base", layer, head)[row]), None))
    if len(maps) == 1:
        local = np.asarray(first.values("weights_without", layer, head)[row])
        panels.append(("same queries and keys, without it", local, None))
    for name, one in zip(labels, maps, strict=True):
        at = one.row(first.queries[row])
        weights, bias = (np.asarray(one.values(what, layer, head)[at]) for what in ("weights", "bias"))
        panels.append((name, weights, bias))
    return panels


def foremost(size: Array, allowed: npt.NDArray[np.bool_]) -> tuple[list[int], str]:
    """Returns the keys to show, in text order, and a remark if some are left out."""
    keys = np.flatnonzero(allowed)
    if len(keys) <= _KEYS:
        return keys.tolist(), ""
    chosen = np.sort(keys[np.argsort(-size[keys], kind="stable")[:_KEYS]])
    return chosen.tolist(), f" (the {_KEYS} of {grouped(len(keys))} with the largest values)"


def token_name(bias_map: BiasMap, position: int) -> str:
    """Labels a position by its token."""
    return token_label(bias_map.tokens[position])


def query_name(bias_map: BiasMap, row: int) -> str:
    """Labels a query by its token and the token it produced."""
    produced = bias_map.produced[row] if bias_map.produced else ""
    name = token_name(bias_map, bias_map.queries[row])
    return f"{name} → {token_label(produced)}" if produced else name


def common_top(weights: Sequence[Array]) -> float:
    """Returns the upper end of the bars: the largest weight, or less if a few bars dwarf the others."""
    ordered = np.sort(np.concatenate(weights))[::-1]
    rest = ordered[len(weights)] if len(ordered) > len(weights) else ordered[0]
    return float(max(1.15 * rest, 1e-6) if ordered[0] > 2.5 * rest > 0 else max(1.05 * ordered[0], 1e-6))


def _heads(bias_map: BiasMap, head: int | None) -> str:
    if head is not None:
        return f", head {head}"
    return ", mean over heads" if not bias_map.heads else f", mean over {len(bias_map.heads)} heads"
