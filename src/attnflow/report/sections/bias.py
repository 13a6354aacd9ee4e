"""How strongly a model attends: what its bias adds in each layer, to which keys, and what becomes of the weights."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from attnflow._core.markup import grouped, percent, plural
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.report import bias_charts, html
from attnflow.report.bias_charts import Array, Truth
from attnflow.report.bias_figures import query_name, token_name, weight_panels
from attnflow.report.graph_svg import graph_svg
from attnflow.report.html import Content, Html, tag
from attnflow.report.subject import Section, Subject

_MAPS: Final = 3  # layers whose whole map is drawn
_KEYS: Final = 180  # columns of a picture; of a longer text those that matter most
_EDGES: Final = 40
_RANKS: Final = (1, 8)


def bias_layers(subject: Subject) -> Section | None:
    """The strength of the bias in each layer, what it moves, and how simple a bias would do the same."""
    if subject.bias is None:
        return None
    found = subject.bias
    energies = [found.energy(rank) for rank in _RANKS]
    lead = (
        "Softmax cannot see what is added to all keys of a query alike, so that every number here is of the "
        "row-centred bias. Strength is its root mean square over the pairs that exist. Moved is the weight that goes "
        "to another key because of it, with the same queries and keys. Rank 1 and rank 8 are the shares of its energy "
        "that a bias per key, and a product of eight numbers, could give: near 100 %, a network per pair buys little."
    )
    head = ["Layer", "Strength", "Strongest pull", "Strongest push", "Moved", *(f"Rank {rank}" for rank in _RANKS)]
    top = max((one.strength for one in found), default=0.0)
    rows = [[str(one.layer), *_numbers(one), *(_share(energy[one.layer]) for energy in energies)] for one in found]
    marked = [i for i, one in enumerate(found) if one.strength == top and top > 0 and len(found.layers) > 1]
    parts = [html.paragraph(lead, kind="lead"), html.table(head, rows, text_columns=1)]
    if marked:
        parts.append(html.paragraph(f"The bias is strongest in layer {found.layers[marked[0]].layer}."))
    if top == 0.0:
        text = "The bias is zero everywhere: the model attends as its base model does."
        parts.append(html.note("neutral", html.paragraph(text)))
    if len(found.queries) <= max(_RANKS):
        text = f"With {plural(len(found.queries), 'query', 'queries')}, a rank as large explains everything."
        parts.append(html.paragraph(text, kind="lead"))
    return Section("bias", "The bias, layer by layer", html.join(parts))


def bias_maps(subject: Subject) -> Section | None:
    """The bias of the last query in all layers, and of all queries in the layers where it moves the most."""
    if subject.bias is None or _strength(subject.bias) == 0.0:
        return None
    found = subject.bias
    last = len(found.queries) - 1
    numbers = [one.layer for one in found]
    table = np.stack([_numpy(found, layer)[last] for layer in numbers])
    allowed = np.stack([np.asarray(found.allowed(layer)[last]) for layer in numbers])
    title = f"Query {query_name(found, last)} in every layer"
    parts: list[Content] = [tag("h3", title), _map(found, table, allowed, list(map(str, numbers)), "layer")]
    if len(found.queries) > 1:
        strongest = sorted(found, key=lambda one: -one.moved)[:_MAPS]
        names = [query_name(found, row) for row in range(len(found.queries))]
        for one in sorted(strongest, key=lambda one: one.layer):
            heading = tag("h3", f"Layer {one.layer}, every query")
            parts += [
                heading,
                _map(found, _numpy(found, one.layer), np.asarray(found.allowed(one.layer)), names, "query"),
            ]
    return Section("maps", "Who is drawn to whom", html.join(parts))


def bias_weights(subject: Subject) -> Section | None:
    """The weights of the last query with and without the bias, in the layer where it moves the most."""
    if subject.bias is None or _strength(subject.bias) == 0.0:
        return None
    found = subject.bias
    row = len(found.queries) - 1
    layer = max(found, key=lambda one: float((one.weights - one.weights_without)[:, row].abs().sum())).layer
    panels = weight_panels({"with the bias": found}, layer, -1, None, None)
    local = np.asarray(found.values("weights_without", layer)[row])
    panels.insert(0, ("same queries and keys, without it", local, None))
    if found.layer(layer).weights_base is not None:
        base = np.asarray(found.values("weights_base", layer)[row])
        panels.insert(0, ("base model", base, None))
    most = np.max([weights for _, weights, _ in panels], axis=0)
    keys, note = _foremost(most, np.asarray(found.allowed(layer)[row]), "largest weights")
    shown = [(name, weights[keys], None if bias is None else bias[keys]) for name, weights, bias in panels]
    limit = max((float(np.abs(bias).max(initial=0.0)) for _, _, bias in shown if bias is not None), default=0.0)
    names = [token_name(found, key) for key in keys]
    chart = Html(bias_charts.weight_chart(shown, names, limit))
    caption = (
        f"Post-softmax weights of query {query_name(found, row)} in layer {layer}, mean over heads: bars are coloured "
        "by the bias. In the base model the queries and keys themselves differ, because no earlier layer has a bias. "
        f"A bar that would dwarf the others is cut, and carries its value.{note}"
    )
    return Section("weights", "What becomes of the weights", html.figure(chart, caption, kind="natural"))


def bias_graph(subject: Subject) -> Section | None:
    """The reasoning graph."""
    if subject.bias is None:
        return None
    graph = subject.bias.graph()
    if not graph.edges:
        return None
    kind = (
        "Attention is causal, so that the graph is acyclic: information flows to later tokens only."
        if subject.bias.causal
        else "Attention is bidirectional: this is a directed graph, which may have cycles."
    )
    lead = (
        "An arrow goes from a key to a query that the bias draws to it, in the mean over layers; thick arrows are "
        f"strong. It shows where the bias adds, not what the model does with it. {kind}"
    )
    picture = Html(graph_svg(graph, max_edges=_EDGES, standalone=False))
    return Section(
        "graph", "Reasoning graph", html.paragraph(lead, kind="lead") + html.figure(picture, kind="natural centre")
    )


def bias_reading(found: BiasMap) -> list[Content]:
    """What the bias does, in one or two sentences."""
    if _strength(found) == 0.0:
        return ["The bias is zero in every layer: the model attends exactly as its base model does."]
    most = max(found, key=lambda one: one.moved)
    row = len(found.queries) - 1
    mean = found.values("bias")[row]
    pulled, pushed = int(mean.argmax()), int(mean.argmin())
    return [
        f"The bias moves {percent(_moved(found))} of the attention weight on average, most in layer {most.layer} "
        f"({percent(most.moved)}). Over all layers, query ",
        html.code(query_name(found, row)),
        " is drawn most to ",
        html.code(token_name(found, pulled)),
        f" (position {pulled}) and least to ",
        html.code(token_name(found, pushed)),
        f" (position {pushed}).",
    ]


def bias_numbers(found: BiasMap) -> list[tuple[str, Content]]:
    """The numbers that head the page."""
    shown = plural(len(found.queries), "query", "queries")
    return [
        ("Tokens", tag("span", str(len(found.tokens)), tag("small", f"{shown} captured"))),
        ("Layers with a bias", str(len(found.layers))),
        ("Strength", f"{_strength(found):.3g}"),
        ("Weight moved", percent(_moved(found))),
    ]


def _strength(found: BiasMap) -> float:
    return math.sqrt(sum(one.strength**2 for one in found) / max(len(found.layers), 1))


def _moved(found: BiasMap) -> float:
    return sum(one.moved for one in found) / max(len(found.layers), 1)


def _numpy(found: BiasMap, layer: int) -> Array:
    return np.asarray(found.values("bias", layer), dtype=np.float64)


def _map(found: BiasMap, table: Array, allowed: Truth, rows: list[str], side: str) -> Html:
    keys, note = _foremost(np.abs(table).max(axis=0), np.asarray(allowed.any(axis=0)), "largest bias")
    names = [token_name(found, key) for key in keys]
    limit = float(np.abs(table).max(initial=0.0))
    chart = Html(bias_charts.map_chart(table[:, keys], allowed[:, keys], rows, names, limit, side))
    return html.figure(chart, _scale(limit) + tag("span", note), kind="natural")


def _foremost(size: Array, allowed: Truth, what: str) -> tuple[list[int], str]:
    """(keys to show, in the order of the text; a remark if some are left out)."""
    keys = np.flatnonzero(allowed)
    if len(keys) <= _KEYS:
        return keys.tolist(), ""
    chosen = np.sort(keys[np.argsort(-size[keys], kind="stable")[:_KEYS]])
    return chosen.tolist(), f" Shown are the {_KEYS} of {grouped(len(keys))} keys with the {what}."


def _scale(limit: float) -> Html:
    pull = tag("span", tag("span", class_="swatch-attract"), f"drawn to the key, up to +{limit:.3g}", class_="scale")
    push = tag("span", tag("span", class_="swatch-repel"), f"turned away, down to −{limit:.3g}", class_="scale")
    return pull + push


def _numbers(one: LayerMap) -> list[str]:
    pull, push = float(one.bias.max()), float(one.bias.min())
    return [f"{one.strength:#.3g}", f"{pull:+#.3g}", f"{push:+#.3g}".replace("-", "−"), percent(one.moved)]


def _share(value: float) -> str:
    return "–" if math.isnan(value) else percent(value)
