"""Maps of a bias as matplotlib figures (extra `report`): blue draws a query to a key, red turns it away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import shorten, token_label
from attnflow.bias.map import BiasMap
from attnflow.report.axes import literal, name_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]

# The paper calls blue positive; matplotlib's "coolwarm" makes positive red.
_SIGNED: Final = "coolwarm_r"
_PURPOSE: Final = "a bias as a figure"


def map_figure(
    bias_map: BiasMap,
    kind: Literal["bias", "weights"] = "bias",
    *,
    layer: int | None = None,
    query: int | None = None,
    head: int | None = None,
    title: str | None = None,
) -> Figure:
    """The row-centred bias over the context (daa, fig. 1): blue for keys that a query is drawn to, zero in white.

    The paper shows one query in one layer. Without arguments all captured layers are shown for the last query, which
    is the one that generates; with `layer`, all captured queries in that layer; with both, that one row.

    Args:
        bias_map: what `af.bias.capture` returned.
        kind: "bias", or "weights" for the post-softmax weights with it.
        layer: number of a layer.
        query: position of a query, -1 for the last captured one.
        head: one of the captured heads; None for the mean over the maps.
        title: heading; by default what is shown.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: a layer, query or head that was not captured.
    """
    layers = [one.layer for one in bias_map] if layer is None else [layer]
    if layer is not None and query is None:
        rows = list(range(len(bias_map.queries)))
        table, allowed = (np.asarray(t) for t in (bias_map.values(kind, layer, head), bias_map.allowed(layer)))
        names = [query_name(bias_map, row) for row in rows]
        what, side = f"layer {layer}", "query"
    else:
        row = bias_map.row(-1 if query is None else query)
        table = np.stack([np.asarray(bias_map.values(kind, number, head)[row]) for number in layers])
        allowed = np.stack([np.asarray(bias_map.allowed(number)[row]) for number in layers])
        names, side = [str(number) for number in layers], "layer"
        what = f"query {query_name(bias_map, row)}" + (f", layer {layer}" if layer is not None else "")
    keys = np.flatnonzero(allowed.any(axis=0))
    figure = new_figure(len(keys), len(names), purpose=_PURPOSE)
    axes = figure.add_subplot()
    values = np.ma.masked_array(table[:, keys], ~allowed[:, keys])
    limit = float(np.abs(values).max()) if values.count() else 0.0
    colours, least = (_SIGNED, -(limit or 1.0)) if kind == "bias" else ("Blues", 0.0)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, vmin=least, vmax=limit or 1.0)
    name_axis(axes.xaxis, [token_name(bias_map, int(key)) for key in keys], keys.tolist(), turned=True)
    name_axis(axes.yaxis, names, layers if side == "layer" else list(bias_map.queries), turned=False)
    axes.set_xlabel("key")
    axes.set_ylabel(side)
    quantity = "bias, row-centred" if kind == "bias" else "attention weight"
    axes.set_title(literal(title or f"{quantity}: {what}{_heads(bias_map, head)}"), fontsize=10)
    figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=max(4, 2 * len(names)))
    return figure


def compare_figure(
    maps: Mapping[str, BiasMap],
    *,
    layer: int | None = None,
    query: int = -1,
    head: int | None = None,
    base: str | None = "base",
    title: str | None = None,
) -> Figure:
    """Post-softmax weights of one query under several biases, and without any (daa, fig. 6).

    A bar for each key, coloured by its row-centred bias, grey where there is none. The first token often takes most of
    the weight; a bar that would dwarf the others is cut, and carries its value.

    Args:
        maps: name -> map, all of the same text; such as {"ALiBi": ..., "DAA": ...}.
        layer: number of a layer; None for the mean over the captured ones.
        query: position of a query, -1 for the last captured one.
        head: one of the captured heads; None for the mean over the maps.
        base: name of the panel with the weights of the base model, from the first map; None to leave it out.
        title: heading.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: no maps, maps of different texts, or something that was not captured.
    """
    panels = weight_panels(maps, layer, query, head, base)
    first = next(iter(maps.values()))
    row = first.row(query)
    keys = np.flatnonzero(np.asarray(first.allowed(layer)[row]))
    figure = new_figure(len(keys), 0, height=1.0 + 1.35 * len(panels), purpose=_PURPOSE)
    limit = max((float(np.abs(bias).max(initial=0.0)) for _, _, bias in panels if bias is not None), default=0.0) or 1.0
    top = common_top([weights[keys] for _, weights, _ in panels])
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    signed = ScalarMappable(Normalize(-limit, limit), colormaps[_SIGNED])
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, weights, bias) in zip(axes, panels, strict=True):
        colour = "0.6" if bias is None else signed.to_rgba(bias[keys])
        panel.bar(np.arange(len(keys)), np.minimum(weights[keys], top), color=colour, edgecolor="0.35", linewidth=0.5)
        for index, weight in enumerate(weights[keys]):
            if weight > top:
                panel.text(index + 0.55, top, f"{weight:.2f}", fontsize=7.5, va="top", ha="left")
        panel.set_ylim(0, top)
        panel.set_ylabel(literal(shorten(name, 24)), fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    name_axis(axes[-1].xaxis, [token_name(first, int(key)) for key in keys], keys.tolist(), turned=True)
    axes[-1].set_xlim(-0.6, len(keys) - 0.4)
    where = "mean over layers" if layer is None else f"layer {layer}"
    what = f"attention weights: query {query_name(first, row)}, {where}{_heads(first, head)}"
    figure.suptitle(literal(title or what), fontsize=10)
    if any(bias is not None for _, _, bias in panels):
        figure.colorbar(signed, ax=list(axes), pad=0.02, fraction=0.04, aspect=12 * len(panels), label="bias")
    return figure


def weight_panels(
    maps: Mapping[str, BiasMap], layer: int | None, query: int, head: int | None, base: str | None
) -> list[tuple[str, Array, Array | None]]:
    """(name, weights, row-centred bias or None) of one query under each of several biases, the base model first.

    Raises:
        ValueError: no maps, or maps of different texts.
    """
    if not maps:
        raise ValueError("expected at least one map, got none: nothing to compare")
    first = next(iter(maps.values()))
    for name, one in maps.items():
        if one.tokens != first.tokens:
            raise ValueError(
                f"maps to compare must be of one text: {name!r} has other tokens than {next(iter(maps))!r}"
            )
    found: list[tuple[str, Array, Array | None]] = []
    if base is not None:
        found.append((base, np.asarray(first.values("weights_base", layer, head)[first.row(query)]), None))
    position = first.queries[first.row(query)]
    for name, one in maps.items():
        row = one.row(position)
        weights, bias = (np.asarray(one.values(what, layer, head)[row]) for what in ("weights", "bias"))
        found.append((name, weights, bias))
    return found


def token_name(bias_map: BiasMap, position: int) -> str:
    """The token of a position as a label."""
    return token_label(bias_map.tokens[position])


def query_name(bias_map: BiasMap, row: int) -> str:
    """The token of a row, and the one that it produced."""
    produced = bias_map.produced[row] if bias_map.produced else ""
    name = token_name(bias_map, bias_map.queries[row])
    return f"{name} → {token_label(produced)}" if produced else name


def common_top(weights: Sequence[Array]) -> float:
    """Where bars end: the largest weight, or less if few bars are several times as long as all others."""
    ordered = np.sort(np.concatenate(weights))[::-1]
    rest = ordered[len(weights)] if len(ordered) > len(weights) else ordered[0]
    return float(max(1.15 * rest, 1e-6) if ordered[0] > 2.5 * rest > 0 else max(1.05 * ordered[0], 1e-6))


def _heads(bias_map: BiasMap, head: int | None) -> str:
    if head is not None:
        return f", head {head}"
    return ", mean over heads" if not bias_map.heads else f", mean over {len(bias_map.heads)} heads"
