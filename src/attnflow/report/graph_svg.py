"""The reasoning graph as SVG: tokens in layers, information flowing upwards, each arrow with its bias."""

from __future__ import annotations

from collections import Counter
from typing import Final

from attnflow._core import checks
from attnflow._core.markup import columns, element, escape, plural, token_label
from attnflow.bias.graph import BiasGraph, Edge
from attnflow.report import layered_layout as layout
from attnflow.report.charts import POSITIVE
from attnflow.report.hasse_svg import bent, page, pair
from attnflow.report.layered_layout import Point
from attnflow.report.svg import MONO

STRONGEST: Final = 16  # edges that can be told apart at a glance
_LABEL: Final = 16  # characters of a token
_HEIGHT: Final = 40.0


def graph_svg(graph: BiasGraph, *, max_edges: int = STRONGEST, standalone: bool = True) -> str:
    """A graph as one `<svg>`: a box for each token that has an edge, an arrow from each key to its query.

    A token stands above all earlier ones that it has an edge with; an arrow that runs against the order of the text,
    as only bidirectional attention has them, points down. Thick arrows are strong, and each carries its bias. Of a
    larger graph the strongest edges are drawn, and the picture says so.
    """
    checks.integer("max_edges", max_edges, 1)
    drawn = graph.strongest(max_edges)
    what = f"Reasoning graph of {plural(len(drawn.nodes), 'token')}: {drawn.about}"
    if not drawn.edges:
        return page("", 300.0, 0.0, [f"No edges: no bias is positive enough ({drawn.about})."], standalone, what)
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
    return page(body, placement.width, placement.height, [caption], standalone, what)


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
    """The bias of an edge, on a ground of its own."""
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
