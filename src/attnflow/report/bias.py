"""Page sections for a bias: its strength by layer, the keys it favours, the weights, and the reasoning graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from attnflow._core import checks
from attnflow._core.markup import columns, element, escape, percent, plural, token_label
from attnflow.bias.graph import BiasGraph, Edge
from attnflow.bias.map import BiasMap
from attnflow.report import charts, html
from attnflow.report import layered_layout as layout
from attnflow.report.bias_chart import map_chart, query_name, token_name
from attnflow.report.charts import POSITIVE
from attnflow.report.hasse_svg import bent
from attnflow.report.html import Content, Html, tag
from attnflow.report.layered_layout import Point
from attnflow.report.page import Context, Part, Section
from attnflow.report.svg import MONO, framed, pair

_MAPS: Final = 3  # layers whose whole map is drawn
_RANKS: Final = (1, 8)
_LISTED: Final = 60  # edges of a graph in its table
STRONGEST: Final = 16  # edges that can be told apart at a glance
_LABEL: Final = 16  # characters of a token
_HEIGHT: Final = 40.0


def bias_part(bias_map: BiasMap, context: Context) -> Part:
    """Describes a bias map on a page."""
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
    source = [("Model", html.code(bias_map.model))]
    return Part(f"Attention bias of {bias_map.model}", sections, _reading(bias_map), numbers, source)


def graph_part(graph: BiasGraph, _: Context) -> Part:
    """Describes a reasoning graph alone."""
    title = f"Reasoning graph: {graph.about}" if graph.about else "Reasoning graph"
    return Part(title, [_graph(graph, "here")])


def _layers(bias_map: BiasMap) -> Section:
    """Shows each layer's bias strength, its effect, and how simple an equivalent bias would be."""
    lead = (
        "Softmax cannot see what is added to all keys of a query alike, so that every number here is of the "
        "row-centred bias. Strength is its root mean square over the pairs that exist. Moved is the weight that goes "
        "to another key because of it, with the same queries and keys. Rank 1 and rank 8 are the shares of its energy "
        "that a bias per key, and a product of eight numbers, could give: near 100 %, a network per pair buys little."
    )
    layers = list(bias_map)
    columns = {
        "Layer": [str(one.layer) for one in layers],
        "Strength": html.numbers([one.strength for one in layers]),
        "Strongest pull": html.numbers([float(one.bias.max()) for one in layers], signed=True),
        "Strongest push": html.numbers([float(one.bias.min()) for one in layers], signed=True),
        "Moved": [_share(one.moved) for one in layers],
    }
    for rank in _RANKS:
        energy = bias_map.energy(rank)
        columns[f"Rank {rank}"] = [_share(energy[one.layer]) for one in layers]
    table = html.columns_table(columns)
    parts = [html.paragraph(lead, kind="lead"), table]
    strongest = max(layers, key=lambda one: one.strength, default=None)
    if strongest is not None and strongest.strength > 0 and len(layers) > 1:
        parts.append(html.paragraph(f"The bias is strongest in layer {strongest.layer}."))
    if not _strength(bias_map):
        text = "The bias is zero everywhere: the model attends as its base model does."
        parts.append(html.note("neutral", html.paragraph(text)))
    if len(bias_map.queries) <= max(_RANKS):
        text = f"With {plural(len(bias_map.queries), 'query', 'queries')}, a rank as large explains everything."
        parts.append(html.paragraph(text, kind="lead"))
    return Section("bias", "The bias, layer by layer", html.join(parts))


def _maps(bias_map: BiasMap) -> Section:
    """Draws the bias of the last query in all layers, and of all queries where it moves most."""
    last = len(bias_map.queries) - 1
    title = f"Query {query_name(bias_map, last)} in every layer"
    caption = "Blue keys draw the query, red ones turn it away; zero is in the middle."
    parts: list[Content] = [charts.in_page(lambda: map_chart(bias_map), title, caption)]
    if len(bias_map.queries) > 1:
        for one in sorted(sorted(bias_map, key=lambda one: -one.moved)[:_MAPS], key=lambda one: one.layer):
            title = f"Layer {one.layer}, every query"
            parts.append(charts.in_page(lambda layer=one.layer: map_chart(bias_map, layer=layer), title))
    parts.append(tag("details", tag("summary", "Numbers"), _extremes(bias_map)))
    return Section("maps", "Who is drawn to whom", html.join(parts))


def _extremes(bias_map: BiasMap, count: int = 3) -> Html:
    """Lists for each layer the keys that the last query is drawn to most and least."""
    row = len(bias_map.queries) - 1
    rows: list[list[Content]] = []
    for one in bias_map:
        values = bias_map.values("bias", one.layer)[row]
        keys = [key for key in values.argsort(descending=True).tolist() if bias_map.allowed(one.layer)[row, key]]
        named = [f"{token_name(bias_map, key)} {float(values[key]):+.3f}".replace("-", "−") for key in keys]
        rows.append([str(one.layer), ", ".join(named[:count]), ", ".join(named[::-1][:count])])
    return html.table(["Layer", "drawn to", "turned away from"], rows, text_columns=3)


def _weights(bias_map: BiasMap) -> Section:
    """Compares the last query's weights with and without the bias, in the layer it moves most."""
    row = len(bias_map.queries) - 1
    layer = max(bias_map, key=lambda one: float((one.weights - one.weights_without)[:, row].abs().sum())).layer
    caption = (
        f"Post-softmax weights of query {query_name(bias_map, row)} in layer {layer}, mean over heads: bars are "
        "coloured by the bias. In the base model the queries and keys themselves differ, because no earlier layer has "
        "a bias. A bar that would dwarf the others is cut, and carries its value."
    )
    chart = charts.in_page(lambda: map_chart(bias_map, picture="compare", layer=layer), "Attention weights", caption)
    return Section("weights", "What becomes of the weights", chart)


def _graph(graph: BiasGraph, where: str) -> Section:
    kind = (
        "Here the graph is acyclic: information flows to later tokens only."
        if graph.is_acyclic
        else "Attention is bidirectional: this is a directed graph, which may have cycles."
    )
    lead = (
        f"An arrow goes from a key to a query that the bias draws to it, {where}, and carries its bias; thick arrows "
        f"are strong. It shows where the bias adds, not what the model does with it. {kind}"
    )
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
    row = len(bias_map.queries) - 1
    mean = bias_map.values("bias")[row]
    pulled, pushed = int(mean.argmax()), int(mean.argmin())
    return [
        f"The bias moves {percent(_moved(bias_map))} of the attention weight on average, most in layer {most.layer} "
        f"({percent(most.moved)}). Over all layers, query ",
        html.code(query_name(bias_map, row)),
        " is drawn most to ",
        html.code(token_name(bias_map, pulled)),
        f" (position {pulled}) and least to ",
        html.code(token_name(bias_map, pushed)),
        f" (position {pushed}).",
    ]


def _strength(bias_map: BiasMap) -> float:
    return math.sqrt(sum(one.strength**2 for one in bias_map) / max(len(bias_map.layers), 1))


def _moved(bias_map: BiasMap) -> float:
    return sum(one.moved for one in bias_map) / max(len(bias_map.layers), 1)


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"


def graph_svg(graph: BiasGraph, *, max_edges: int = STRONGEST) -> str:
    """Draws a graph as one `<svg>`: a box for each token with an edge, an arrow from key to query.

    Tokens stand above the earlier tokens they share an edge with; only bidirectional attention has downward arrows.
    Beyond `max_edges` the strongest edges are drawn, and the picture says so.
    """
    checks.integer("max_edges", max_edges, 1)
    drawn = graph.strongest(max_edges)
    what = f"Reasoning graph of {plural(len(drawn.nodes), 'token')}: {drawn.about}"
    if not drawn.edges:
        return framed("", 300.0, 0.0, [f"No edges: no bias is positive enough ({drawn.about})."], what)
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
        _box(placement.centres[i], sizes[i], texts[i], f"{drawn.tokens[node]!r}, position {node}", node)
        for node, i in index.items()
    ]
    cycles = "" if graph.is_acyclic else " Attention is bidirectional, and so information may return: there are cycles."
    caption = f"Arrows: from a key to a query that is drawn to it ({drawn.about}).{cycles}"
    body = "".join([*arrows, *boxes, *labels])
    return framed(body, placement.width, placement.height, [caption], what)


def _arrow(graph: BiasGraph, edge: Edge, route: list[Point], share: float) -> str:
    up = edge.key < edge.query
    x, y = route[-1] if up else route[0]
    tail, half = (8.0, 3.2 + share) if up else (-8.0, 3.2 + share)
    head = f"M{pair((x - half, y + tail))}L{pair((x, y))}L{pair((x + half, y + tail))}Z"
    look = {"fill": "none", "stroke": POSITIVE, "stroke_width": 0.8 + 3.2 * share, "class_": "af-stroke-attract"}
    title = element("title", escape(f"{graph.tokens[edge.key]} → {graph.tokens[edge.query]}: +{edge.bias:.3f}"))
    body = title + element("path", d=bent(route), **look)
    body += element("path", d=head, fill=POSITIVE, class_="af-fill-attract")
    return element("g", body, class_="af-edge", opacity=0.35 + 0.6 * share)


def _label(edge: Edge, x: float, y: float) -> str:
    frame = {"x": x - 14.0, "y": y - 10.0, "width": 28.0, "height": 13.0, "rx": 3}
    ground = element("rect", **frame, fill="#fff", fill_opacity=0.8, class_="af-face")
    text = element("text", f"{edge.bias:.2f}", x=x, y=y, text_anchor="middle", font_size=10, fill="currentColor")
    return element("g", ground + text, class_="af-label")


def _box(centre: Point, size: tuple[float, float], text: str, tooltip: str, position: int) -> str:
    (x, y), (width, height) = centre, size
    frame = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height, "rx": 7}
    look = {"fill": "currentColor", "fill_opacity": 0.07, "stroke": "currentColor", "stroke_width": 1.2}
    parts = [
        element("title", escape(tooltip)),
        element("rect", **frame, **look, class_="af-face"),
        element("text", escape(text), x=x, y=y - 2, font_size=12.5, fill="currentColor"),
        element("text", str(position), x=x, y=y + 12.5, font_size=10, fill="currentColor", fill_opacity=0.7),
    ]
    return element("g", "".join(parts), class_="af-node", text_anchor="middle", font_family=MONO)
