"""A bias on a page and as charts: its strength, the keys it favours (blue) or not (orange), the weights, its graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from attnflow._core import checks
from attnflow._core.markup import columns, element, escape, grouped, part_name, percent, plural, shorten, token_label
from attnflow.bias.graph import BiasEdge, BiasGraph
from attnflow.bias.map import BiasMap, Quantity
from attnflow.report import charts, html
from attnflow.report import layered_layout as layout
from attnflow.report.charts import INK, POSITIVE, Array, Figure, chart, literal
from attnflow.report.displays import describes, draws
from attnflow.report.hasse_svg import arrow_head, bent, box
from attnflow.report.html import Content, Html, tag
from attnflow.report.layered_layout import Point
from attnflow.report.page import Context, PagePart, Section
from attnflow.report.svg import framed, text

_KEYS: Final = 180  # columns of a picture; of a longer text those that matter most
_MAPS: Final = 3  # layers whose whole map is drawn
_RANKS: Final = (1, 8)
_LISTED: Final = 60  # edges of a graph in its table
STRONGEST: Final = 16  # edges that can be told apart at a glance
_LABEL: Final = 16  # characters of a token
_HEIGHT: Final = 40.0


@describes(BiasMap)
def bias_part(bias_map: BiasMap, context: Context) -> PagePart:
    sections = [_layers(bias_map)]
    if _strength(bias_map):
        sections += [_maps(bias_map), _weights(bias_map)]
        graph = bias_map.graph()
        if graph.edges:
            sections.append(_graph(graph, "in the mean over layers"))
    shown = plural(len(bias_map.queries), "query", "queries")
    numbers: list[tuple[str, Content]] = [
        ("Tokens", tag("span", str(len(bias_map.tokens)), tag("small", f"{shown} captured"))),
        ("Layers with a bias", str(len(bias_map.layers))),
        ("Strength", f"{_strength(bias_map):.3g}"),
        ("Weight moved", percent(_moved(bias_map))),
    ]
    name = bias_map.model
    return PagePart(f"Attention bias of {name}", sections, _reading(bias_map), numbers, [("Model", html.code(name))])


@describes(BiasGraph)
def graph_part(graph: BiasGraph, _: Context) -> PagePart:
    return PagePart(f"Reasoning graph: {graph.about}" if graph.about else "Reasoning graph", [_graph(graph, "here")])


def _layers(bias_map: BiasMap) -> Section:
    lead = (
        "Softmax cannot see what is added to all keys of a query alike, so that every number here is of the "
        "row-centred bias. Strength is its root mean square over the pairs that exist. Moved is the weight that goes "
        "to another key because of it, with the same queries and keys. Rank 1 and rank 8 are the shares of its energy "
        "that a product of one number, or of eight, for each query and key could give; a bias per key gives at most "
        "the first. Near 100 %, a network per pair buys little."
    )
    layers = list(bias_map)
    columns = {
        "Layer": [str(layer.layer) for layer in layers],
        "Strength": html.numbers([layer.strength for layer in layers]),
        "Strongest pull": html.numbers([float(layer.bias.max()) for layer in layers], signed=True),
        "Strongest push": html.numbers([float(layer.bias.min()) for layer in layers], signed=True),
        "Moved": [_share(layer.moved) for layer in layers],
    }
    for rank in _RANKS:
        energy = bias_map.energy(rank)
        columns[f"Rank {rank}"] = [_share(energy[layer.layer]) for layer in layers]
    parts = [html.paragraph(lead, kind="lead"), html.columns(columns)]
    if _strength(bias_map) and len(layers) > 1:
        strongest = max(layers, key=lambda layer: layer.strength)
        parts.append(html.paragraph(f"The bias is strongest in layer {strongest.layer}."))
    if len(bias_map.queries) <= max(_RANKS):
        text = f"With {plural(len(bias_map.queries), 'query', 'queries')}, a rank as large explains everything."
        parts.append(html.paragraph(text, kind="lead"))
    return Section("bias", "The bias, layer by layer", html.join(parts))


def _maps(bias_map: BiasMap) -> Section:
    title = f"Query {_query(bias_map, -1)} in every layer"
    caption = "Blue keys draw the query, orange ones turn it away; zero is in the middle."
    parts: list[Content] = [charts.in_page(lambda: map_chart(bias_map), title, caption)]
    if len(bias_map.queries) > 1:
        for one in sorted(sorted(bias_map, key=lambda one: -one.moved)[:_MAPS], key=lambda one: one.layer):
            title = f"Layer {one.layer}, every query"
            parts.append(charts.in_page(lambda layer=one.layer: map_chart(bias_map, layer=layer), title))
    parts.append(tag("details", tag("summary", "Numbers"), _extremes(bias_map)))
    return Section("maps", "Which queries attend to which keys", html.join(parts))


def _extremes(bias_map: BiasMap) -> Html:
    rows: list[list[Content]] = []
    for one in bias_map:
        values = bias_map.values("bias", one.layer)[-1]
        keys = [key for key in values.argsort(descending=True).tolist() if bias_map.allowed(one.layer)[-1, key]]
        named = [f"{_token(bias_map, key)} {float(values[key]):+.3f}".replace("-", "−") for key in keys]
        rows.append([str(one.layer), ", ".join(named[:3]), ", ".join(named[::-1][:3])])
    return html.table(["Layer", "attends more to", "attends less to"], rows, text_columns=3)


def _weights(bias_map: BiasMap) -> Section:
    """Compares the last query's weights with and without the bias, in the layer it moves most."""
    layer = max(bias_map, key=lambda one: float((one.weights - one.weights_without)[:, -1].abs().sum())).layer
    caption = (
        f"Post-softmax weights of query {_query(bias_map, -1)} in layer {layer}, mean over heads: bars are "
        "coloured by the bias. In the base model the queries and keys themselves differ, because no earlier layer has "
        "a bias. A bar that would dwarf the others is cut, and carries its value."
    )
    chart = charts.in_page(lambda: map_chart(bias_map, picture="compare", layer=layer), "Attention weights", caption)
    return Section("weights", "What becomes of the weights", chart)


def _graph(graph: BiasGraph, where: str) -> Section:
    lead = (
        f"An arrow goes from a key to a query that the bias draws to it, {where}, and carries its bias; thick arrows "
        "are strong. It shows where the bias adds, not what the model does with it. "
    )
    if graph.is_acyclic:
        lead += "Here the graph is acyclic: information flows to later tokens only."
    else:
        lead += "Attention is bidirectional: this is a directed graph, which may have cycles."
    edges = sorted(graph.edges, key=lambda edge: (-edge.bias, edge.query, edge.key))
    values = html.numbers([edge.bias for edge in edges[:_LISTED]], signed=True)
    names = [f"{token_label(token, 40)} ({position})" for position, token in enumerate(graph.tokens)]
    rows = [[names[e.key], names[e.query], value] for e, value in zip(edges, values, strict=False)]
    summary = tag("summary", f"The strongest of {plural(len(edges), 'edge')}")
    table = tag("details", summary, html.table(["from key", "to query", "bias"], rows, text_columns=2))
    picture = Html(graph_svg(graph, max_edges=STRONGEST))
    body = html.paragraph(lead, kind="lead") + html.figure(picture, kind="natural centre") + table
    return Section("graph", "Reasoning graph", body)


def _reading(bias_map: BiasMap) -> Sequence[Content]:
    if not _strength(bias_map):
        return ["The bias is zero in every layer: the model attends exactly as its base model does."]
    most = max(bias_map, key=lambda one: one.moved)
    mean = bias_map.values("bias")[-1]
    pulled, pushed = int(mean.argmax()), int(mean.argmin())
    return [
        f"The bias moves {percent(_moved(bias_map))} of the attention weight on average, most in layer {most.layer} "
        f"({percent(most.moved)}). Over all layers, query ",
        html.code(_query(bias_map, -1)),
        " is drawn most to ",
        html.code(_token(bias_map, pulled)),
        f" (position {pulled}) and least to ",
        html.code(_token(bias_map, pushed)),
        f" (position {pushed}).",
    ]


def _strength(bias_map: BiasMap) -> float:
    return math.sqrt(sum(one.strength**2 for one in bias_map) / max(len(bias_map.layers), 1))


def _moved(bias_map: BiasMap) -> float:
    return sum(one.moved for one in bias_map) / max(len(bias_map.layers), 1)


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"


@draws(BiasGraph)
def graph_svg(graph: BiasGraph, *, max_edges: int = STRONGEST, title: str | None = None) -> str:
    """Tokens stand above the earlier ones they share an edge with; only bidirectional attention has downward arrows."""
    checks.integer("max_edges", max_edges, 1)
    drawn = graph.strongest(max_edges)
    what = f"Reasoning graph of {plural(len(drawn.nodes), 'token')}: {drawn.about}"
    if not drawn.edges:
        return framed("", 300.0, 0.0, [f"No edges: no bias is positive enough ({drawn.about})."], what, title)
    index = {node: i for i, node in enumerate(drawn.nodes)}
    pairs = sorted({(min(e.key, e.query), max(e.key, e.query)) for e in drawn.edges}, key=lambda p: p[::-1])
    levels = [0] * len(index)
    for lower, upper in pairs:  # sorted by the later token, so that the earlier one's level is final
        levels[index[upper]] = max(levels[index[upper]], levels[index[lower]] + 1)
    texts = [token_label(drawn.tokens[node], _LABEL) for node in drawn.nodes]
    sizes = [(max(52.0, 22 + 7.4 * columns(text)), _HEIGHT) for text in texts]
    placement = layout.place(sizes, levels, [(index[a], index[b]) for a, b in pairs])
    top = max(edge.bias for edge in drawn.edges)
    routes = dict(zip(pairs, placement.routes, strict=True))
    both = {(edge.key, edge.query) for edge in drawn.edges}
    leaving, arriving = Counter(edge.key for edge in drawn.edges), Counter(edge.query for edge in drawn.edges)
    arrows: list[str] = []
    labels: list[str] = []
    for edge in sorted(drawn.edges, key=lambda edge: edge.bias):
        route = routes[min(edge.key, edge.query), max(edge.key, edge.query)]
        shift = (4.0 if edge.key < edge.query else -4.0) if (edge.query, edge.key) in both else 0.0
        arrows.append(_arrow(drawn, edge, [(x + shift, y) for x, y in route], edge.bias / top))
        # At the end that fewer arrows share: at the other they lie on each other.
        at_query = leaving[edge.key] >= arriving[edge.query]
        x, y = route[-1] if at_query == (edge.key < edge.query) else route[0]
        labels.append(_label(edge, x + shift, y + 19 if (x, y) == route[-1] else y - 9))
    boxes = [
        box((*placement.centres[i], *sizes[i]), (texts[i], str(node), f"{drawn.tokens[node]!r}, position {node}"))
        for node, i in index.items()
    ]
    cycles = "" if graph.is_acyclic else " Attention is bidirectional, and so information may return: there are cycles."
    caption = f"Arrows: from a key to a query that attends more to it ({drawn.about}).{cycles}"
    body = "".join([*arrows, *boxes, *labels])
    return framed(body, placement.width, placement.height, [caption], what, title)


def _arrow(graph: BiasGraph, edge: BiasEdge, route: list[Point], share: float) -> str:
    up = edge.key < edge.query
    x, y = route[-1] if up else route[0]
    head = arrow_head(x, y, 3.2 + share, 8.0 if up else -8.0)
    look = {"fill": "none", "stroke": POSITIVE, "stroke_width": 0.8 + 3.2 * share, "class_": "af-stroke-s0"}
    title = element("title", escape(f"{graph.tokens[edge.key]} → {graph.tokens[edge.query]}: +{edge.bias:.3f}"))
    body = title + element("path", d=bent(route), **look)
    body += element("path", d=head, fill=POSITIVE, class_="af-fill-s0")
    return element("g", body, class_="af-edge", opacity=0.35 + 0.6 * share)


def _label(edge: BiasEdge, x: float, y: float) -> str:
    frame = {"x": x - 14.0, "y": y - 10.0, "width": 28.0, "height": 13.0, "rx": 3}
    ground = element("rect", **frame, fill="#fff", fill_opacity=0.8, class_="af-face")
    return element("g", ground + text(f"{edge.bias:.2f}", x, y, 10, "middle"), class_="af-label")


@draws(BiasMap)
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
    """Draws the last query in all layers, or all queries of `layer` (daa, fig. 1); "compare" is fig. 6."""
    if picture == "compare":
        return _bars([bias_map, *others], layer, -1 if query is None else query, head, names, title)
    if names:
        raise ValueError('names are those of the maps in picture="compare"; "bias" and "weights" show one map')
    if others:
        raise ValueError('several maps are compared by picture="compare"; "bias" and "weights" show one')
    if picture not in ("bias", "weights"):
        raise ValueError(f'picture must be "bias", "weights" or "compare", got {picture!r}')
    layers = [one.layer for one in bias_map] if layer is None else [layer]
    table, allowed = table_of(bias_map, layer, query, head, picture)
    if layer is not None and query is None:
        sides = [_query(bias_map, row) for row in range(len(bias_map.queries))]
        what, side = "", "query"
    else:
        row = bias_map.row(-1 if query is None else query)
        sides, side = [str(number) for number in layers], "layer"
        what = f"query {_query(bias_map, row)}, "
    keys, remark = _foremost(np.abs(np.where(allowed, table, 0)).max(axis=0), np.asarray(allowed.any(axis=0)))
    tokens = [_token(bias_map, key) for key in keys]
    quantity = "bias, row-centred" if picture == "bias" else "attention weight"
    heading = {"label": literal(title or f"{quantity}: {what}{_where(bias_map, layer, head, layer is None)}")}
    places = (keys, layers if side == "layer" else bias_map.queries)
    values, is_bias = np.where(allowed, table, math.nan)[:, keys], picture == "bias"
    return charts.table_chart(values, tokens, sides, side, heading, places, f"key{remark}", is_bias)


def table_of(
    bias_map: BiasMap, layer: int | None, query: int | None = None, head: int | None = None, quantity: Quantity = "bias"
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Returns the values and which pairs exist: all queries of a layer, or one (by default the last) in all layers."""
    if layer is not None and query is None:
        return np.asarray(bias_map.values(quantity, layer, head)), np.asarray(bias_map.allowed(layer))
    row = bias_map.row(-1 if query is None else query)
    layers = [one.layer for one in bias_map] if layer is None else [layer]
    values = np.stack([np.asarray(bias_map.values(quantity, number, head)[row]) for number in layers])
    return values, np.stack([np.asarray(bias_map.allowed(number)[row]) for number in layers])


def _bars(
    maps: Sequence[BiasMap], layer: int | None, query: int, head: int | None, names: Sequence[str], title: str | None
) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    panels = _weight_panels(maps, layer, query, head, names)
    first = maps[0]
    row = first.row(query)
    most = np.max([weights for _, weights, _ in panels], axis=0)
    keys, remark = _foremost(most, np.asarray(first.allowed(layer)[row]))
    tokens = [_token(first, key) for key in keys]
    width, height = charts.table_size(tokens, 0)
    figure = charts.blank(width, height + 1.2 * len(panels))
    limit = max((float(np.abs(bias[keys]).max(initial=0.0)) for _, _, bias in panels if bias is not None), default=0.0)
    top = _common_top([weights[keys] for _, weights, _ in panels])
    signed = ScalarMappable(Normalize(-(limit or 1.0), limit or 1.0), charts.signed_map())
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, weights, bias) in zip(axes, panels, strict=True):
        colour = "0.6" if bias is None else signed.to_rgba(bias[keys])
        panel.bar(np.arange(len(keys)), np.minimum(weights[keys], top), color=colour, edgecolor=INK, linewidth=0.4)
        for index, weight in enumerate(weights[keys]):
            if weight > top:
                panel.text(index + 0.55, top, f"{weight:.2f}", fontsize=7.5, va="top", ha="left")
        panel.set_ylim(0, top)
        panel.set_title(literal(shorten(name, 48)), fontsize=9, loc="left")
    charts.name_axis(axes[-1].xaxis, tokens, keys, turned=True)
    axes[-1].set_xlim(-0.6, len(keys) - 0.4)
    axes[-1].set_xlabel(f"key{remark}")
    what = f"attention weights: query {_query(first, row)}, {_where(first, layer, head)}"
    figure.suptitle(literal(title or what))
    if any(bias is not None for _, _, bias in panels):
        figure.colorbar(signed, ax=list(axes), pad=0.02, fraction=0.04, aspect=12 * len(panels), label="bias")
    return figure


def _weight_panels(
    maps: Sequence[BiasMap], layer: int | None, query: int, head: int | None, names: Sequence[str] = ()
) -> list[tuple[str, Array, Array | None]]:
    """Returns (name, weights, row-centred bias or None) of one query: first those without the bias, if any."""
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


def _foremost(size: Array, allowed: npt.NDArray[np.bool_]) -> tuple[list[int], str]:
    """Returns the keys to show, in text order, and a remark if some are left out."""
    keys = np.flatnonzero(allowed)
    if len(keys) <= _KEYS:
        return keys.tolist(), ""
    chosen = np.sort(keys[np.argsort(-size[keys], kind="stable")[:_KEYS]])
    return chosen.tolist(), f" (the {_KEYS} of {grouped(len(keys))} with the largest values)"


def _token(bias_map: BiasMap, position: int) -> str:
    return token_label(bias_map.tokens[position])


def _query(bias_map: BiasMap, row: int) -> str:
    produced = bias_map.produced[row] if bias_map.produced else ""
    name = _token(bias_map, bias_map.queries[row])
    return f"{name} → {token_label(produced)}" if produced else name


def _common_top(weights: Sequence[Array]) -> float:
    """Returns the upper end of the bars: the largest weight, or less if a few bars dwarf the others."""
    ordered = np.sort(np.concatenate(weights))[::-1]
    rest = ordered[len(weights)] if len(ordered) > len(weights) else ordered[0]
    return float(max(1.15 * rest, 1e-6) if ordered[0] > 2.5 * rest > 0 else max(1.05 * ordered[0], 1e-6))


def _where(bias_map: BiasMap, layer: int | None, head: int | None, every: bool = False) -> str:
    """ "layer 3 head 2", or of what the mean is taken; `every` layer has a row of its own."""
    if layer is not None and head is not None:
        return part_name(layer, "head", head)
    count = f"{len(bias_map.heads)} " if bias_map.heads else ""
    heads = f"mean over {count}heads" if head is None else f"head {head}"
    return heads if every else f"{'mean over layers' if layer is None else f'layer {layer}'}, {heads}"
