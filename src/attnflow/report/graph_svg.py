"""The reasoning graph as SVG: tokens in layers, information flowing upwards, strong edges thick."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnflow._core import checks
from attnflow._core.markup import columns, element, escape, plural, token_label
from attnflow.report import layered_layout as layout
from attnflow.report.hasse_svg import MONO, _page, _pair
from attnflow.report.layered_layout import Point

if TYPE_CHECKING:
    from attnflow.bias.graph import BiasGraph, Edge

_COLOUR: Final = "#3d7ea6"  # blue draws, as in the figures; a page overrides it by the class af-attract
_MARGIN: Final = 14.0
_LABEL: Final = 16  # characters of a token
_HEIGHT: Final = 40.0


def graph_svg(graph: BiasGraph, *, max_edges: int = 60, standalone: bool = True) -> str:
    """A graph as one `<svg>`: a box for each token that has an edge, an arrow from each key to its query.

    A token stands above all earlier ones that it has an edge with; an arrow that runs against the order of the text,
    as only bidirectional attention has them, points down.

    Args:
        graph: the graph.
        max_edges: of a larger graph the strongest edges are drawn, and the picture says so.
        standalone: bring colours for a file of its own; False where a page's style sheet sets them.
    """
    checks.integer("max_edges", max_edges, 1)
    drawn = graph.strongest(max_edges)
    what = f"Reasoning graph of {plural(len(drawn.nodes), 'token')}: {drawn.about}"
    if not drawn.edges:
        return _page("", 300.0, 0.0, [f"No edges: no bias is positive enough ({drawn.about})."], standalone, what)
    index = {node: i for i, node in enumerate(drawn.nodes)}
    pairs = sorted(
        {(min(edge.key, edge.query), max(edge.key, edge.query)) for edge in drawn.edges}, key=lambda p: p[::-1]
    )
    levels = [0] * len(index)
    for lower, upper in pairs:  # sorted by the later token, so that the earlier one's level is final
        levels[index[upper]] = max(levels[index[upper]], levels[index[lower]] + 1)
    texts = [token_label(drawn.tokens[node], _LABEL) for node in drawn.nodes]
    sizes = [(max(40.0, 18 + 7.4 * columns(text)), _HEIGHT) for text in texts]
    placement = layout.place(sizes, levels, [(index[a], index[b]) for a, b in pairs])
    top = max(edge.bias for edge in drawn.edges)
    routes = dict(zip(pairs, placement.routes, strict=True))
    both = {(edge.key, edge.query) for edge in drawn.edges}
    parts = [
        _arrow(
            drawn,
            edge,
            routes[min(edge.key, edge.query), max(edge.key, edge.query)],
            top,
            (edge.query, edge.key) in both,
        )
        for edge in sorted(drawn.edges, key=lambda edge: edge.bias)
    ]
    parts += [
        _box(placement.centres[i], sizes[i], texts[i], f"{drawn.tokens[node]!r}, position {node}", node)
        for node, i in index.items()
    ]
    acyclic = (
        "" if graph.is_acyclic else " Attention is bidirectional, and so information may return: there are cycles."
    )
    caption = f"Arrows: from a key to a query that is drawn to it ({drawn.about}).{acyclic}"
    return _page("".join(parts), placement.width, placement.height, [caption], standalone, what)


def _arrow(graph: BiasGraph, edge: Edge, route: list[Point], top: float, two_ways: bool) -> str:
    """One edge; of two between the same tokens, each is a little to one side."""
    up = edge.key < edge.query
    shift = 0.0 if not two_ways else (4.0 if up else -4.0)
    points = [(x + shift, y) for x, y in route]
    share = edge.bias / top
    path = f"M{_pair(points[0])}"
    for i, (x, y) in enumerate(points[1:], 1):
        before_x, before_y = points[i - 1]
        if i % 2 or abs(x - before_x) < 0.01:
            path += "" if (x, y) == (before_x, before_y) else f"L{_pair((x, y))}"
        else:
            bend = (before_y - y) * 0.5
            path += f"C{_pair((before_x, before_y - bend))} {_pair((x, y + bend))} {_pair((x, y))}"
    x, y = points[-1] if up else points[0]
    tail, half = (8.0, 3.2 + share) if up else (-8.0, 3.2 + share)
    head = f"M{_pair((x - half, y + tail))}L{_pair((x, y))}L{_pair((x + half, y + tail))}Z"
    stroke = element(
        "path", d=path, fill="none", stroke=_COLOUR, stroke_width=0.8 + 2.4 * share, class_="af-attract-line"
    )
    title = element("title", escape(f"{graph.tokens[edge.key]} → {graph.tokens[edge.query]}: +{edge.bias:.3f}"))
    body = title + stroke + element("path", d=head, fill=_COLOUR, class_="af-attract")
    return element("g", body, class_="af-edge", opacity=0.35 + 0.6 * share)


def _box(centre: Point, size: tuple[float, float], text: str, tooltip: str, position: int) -> str:
    (x, y), (width, height) = centre, size
    frame = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height, "rx": 7}
    parts = [
        element("title", escape(tooltip)),
        element(
            "rect",
            **frame,
            fill="currentColor",
            fill_opacity=0.07,
            stroke="currentColor",
            stroke_width=1.2,
            class_="af-face",
        ),
        element("text", escape(text), x=x, y=y - 2, font_size=12.5, fill="currentColor"),
        element("text", str(position), x=x, y=y + 12.5, font_size=10, fill="currentColor", fill_opacity=0.7),
    ]
    return element("g", "".join(parts), class_="af-node", text_anchor="middle", font_family=MONO)


def graph_html(graph: BiasGraph, *, max_edges: int = 60) -> str:
    """One self-contained page: the drawing, and a table of all edges, the strongest first."""
    rows = sorted(graph.edges, key=lambda edge: (-edge.bias, edge.query, edge.key))

    def named(position: int) -> str:
        return f"{token_label(graph.tokens[position], 40)} ({position})"

    cells = "".join(
        element("tr", "".join(element("td", escape(c)) for c in (named(e.key), named(e.query), f"+{e.bias:.3f}")))
        for e in rows
    )
    head = element("tr", "".join(element("th", name) for name in ("from key", "to query", "bias")))
    title = f"Reasoning graph: {graph.about}" if graph.about else "Reasoning graph"
    body = (
        element("h1", escape(title))
        + element("div", graph_svg(graph, max_edges=max_edges, standalone=False), class_="picture")
        + element("table", element("thead", head) + element("tbody", cells))
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


_STYLE: Final = (
    "body{margin:24px auto;max-width:1080px;padding:0 16px;font:16px/1.5 system-ui,sans-serif;"
    "color:#1b1f23;background:#fdfdfc}h1{font-size:20px}.picture{overflow-x:auto}svg{max-width:100%;height:auto}"
    "table{border-collapse:collapse;margin:20px 0;font-size:14px}td,th{padding:4px 18px 4px 0;text-align:left;"
    "border-bottom:1px solid #8884}td:last-child{font-variant-numeric:tabular-nums}"
    "@media (prefers-color-scheme:dark){body{color:#e8eaec;background:#14171a}}"
)
