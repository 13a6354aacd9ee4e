"""The page of one answer: the verdict, the prompt, the picture, the four questions, and the tables that add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from attnflow._core.markup import element, escape, percent, plural, shorten, token_label
from attnflow.explain.explanation import Edge, Explanation, Source, SourceGraph
from attnflow.report import html
from attnflow.report.charts import signed
from attnflow.report.displays import describes, draws
from attnflow.report.explain_picture import (
    BROAD,
    NARROW,
    STRONGEST,
    Place,
    answering,
    coloured,
    edge_words,
    ends,
    entry_words,
    explanation_svg,
    place_name,
    promoted,
    token_words,
    verdict,
    written,
)
from attnflow.report.html import Content, tag
from attnflow.report.page import Context, PagePart, Section
from attnflow.report.svg import root
from attnflow.report.tables import cell

_OPEN, _LISTED = 12, 60  # rows of a table that are shown, and those that a click shows
_SHADES: Final = 4  # of each colour, in the prompt
_WORDS: Final = 60  # tokens of a prompt that are shown


def four_questions(result: Explanation, geometry: Content | None = None) -> Sequence[tuple[Content, Content]]:
    """One line for each question; `geometry` says why the head of the strongest edge looked there."""
    told = answering(result)
    if result.leaks:
        edge = result.leaks[0]
        pairs = plural(len(result.leaks), "pair")
        may = f"{pairs} that the declared order forbids carry something, first: {edge_words(result, edge)}."
    elif result.reach:
        count = sum(steps >= 0 for steps in result.reach)
        most = plural(max(result.reach), "layer")
        may = f"{count} of {plural(len(result.reach), 'token')} may reach “{token_label(result.texts[told])}”"
        may += f", each within {most}; no forbidden pair carries anything."
    else:
        why = "No reach is counted across two halves." if result.encoder_texts else "The model declares no order."
        may = f"{why} The audit, not this answer, says whether something flows against an order."
    strongly = "Nothing moves between tokens."
    looked = strongly
    if result.edges:
        edge = result.edges[0]
        share = percent(result.covered(STRONGEST))
        strongly = f"{edge_words(result, edge)}. The {STRONGEST} strongest edges carry {share} of all that moves."
        sender = f"“{token_label(result.ends(edge)[0])}”"
        looked = f"af.explain.reading(model, text).why(edge) says why {edge.name} looked at {sender}."
    stores = "No single entry wrote anything."
    if result.entries:
        stores = f"The strongest effect of an entry: {entry_words(result, result.entries[0])}."
    return [
        ("Who may send?", may),
        ("How strongly?", strongly),
        ("In which geometry?", geometry or looked),
        ("From which store?", stores),
    ]


@describes(Explanation)
def explanation_part(result: Explanation, _: Context, *, geometry: Content | None = None) -> PagePart:
    sections = [
        Section("flow", "Who told the answer?", flow_body(result, geometry)),
        Section("edges", "What moved between tokens", _edges_table(result)),
        Section("sources", "What adds up to the answer", _sources_table(result)),
    ]
    reading: list[Content] = [f"{result.model} says {verdict(result)}. "]
    if result.edges:
        sender, receiver = (f"“{token_label(text)}”" for text in result.ends(result.edges[0]))
        edge = result.edges[0]
        reading.append(f"Head {edge.name} tells it most: {signed(edge.carried)} from {sender} to {receiver}.")
    if result.leaks:
        reading.insert(0, "A leak: pairs that the declared order forbids carry something. ")
    return PagePart(
        f"Why {result.model} says “{token_label(result.answer)}”", sections, reading, (), [("Model", result.model)],
        failed=not result.ok,
    )  # fmt: skip


def flow_body(result: Explanation, geometry: Content | None = None) -> html.Html:
    """The prompt, the picture for screens and for telephones, and the four questions."""
    caption = (
        "Lines are as wide as what a head carries from one token to another; streams of tokens are as wide as what "
        "stands there. Point at a line or a mark for its numbers. Amounts are exact and add up to the answer; they are "
        "no causal claim. Bars: what the answering token gains in each layer."
    )
    drawings = [
        tag("div", html.Html(explanation_svg(result, width=width, title="")), class_=kind)
        for width, kind in ((BROAD, "broad"), (NARROW, "narrow"))
    ]
    picture = html.figure(html.join(drawings), caption, kind="flow")
    return _prompt(result) + picture + html.facts(four_questions(result, geometry))


def _prompt(result: Explanation) -> html.Html:
    """The text, each token shaded by what it carries and sends; of a long one the end, and the strongest before it."""
    given: dict[Place, float] = {}
    for edge in result.edges:
        given[ends(edge)[0]] = given.get(ends(edge)[0], 0.0) + edge.carried
    limit = max(map(abs, given.values()), default=0.0) or 1.0
    halves = [("encoder", result.encoder_texts), ("", result.texts)]
    paragraphs: list[html.Html] = []
    for half, texts in halves:
        words: list[Content] = [f"{half or 'decoder'}: "] if result.encoder_texts else []
        skipped = 0
        strongest = sorted(range(len(texts)), key=lambda at: -abs(given.get((half, at), 0.0)))[:_WORDS]
        if len(texts) > _WORDS:
            strongest = [at for at in strongest if abs(given.get((half, at), 0.0)) > limit / 50]
        shown = set(strongest) | {answering(result)} | set(range(max(0, len(texts) - 8), len(texts)))
        for at, text in enumerate(texts):
            if at not in shown:
                skipped += 1
                continue
            if skipped:
                words.append(f"⋯ {skipped} ⋯ ")
                skipped = 0
            amount = given.get((half, at), 0.0)
            shade = min(_SHADES, math.ceil(_SHADES * abs(amount) / limit))
            kind = f"token {'for' if amount > 0 else 'against'}-{shade}" if shade else "token"
            kind += " traced" if not half and at == answering(result) else ""
            told = f"{token_words(result, (half, at))}; heads carry {signed(amount)} from it"
            words += [tag("span", token_label(text, 40), class_=kind, title=told), " "]
        if words:
            paragraphs.append(html.paragraph(*words, kind="prompt"))
    return html.join(paragraphs)


def _amounts(items: Sequence[Edge | Source]) -> list[list[str]]:
    """Columns of carried, effect and, if any was measured, removed."""
    fields = ["carried", "effect"] + ["removed"] * any(item.removed is not None for item in items)
    found = [[getattr(item, name) for item in items] for name in fields]
    return [html.numbers([math.nan if v is None else v for v in values], signed=True) for values in found]


def _long(head: Sequence[str], rows: Sequence[Sequence[Content]], count: int) -> html.Html:
    """The first rows of a table, of three columns of text; more of them after a click."""
    body = html.table(head, rows[:_OPEN], text_columns=3)
    more = html.table(head, rows[_OPEN:], text_columns=3) + html.rest(count - len(rows))
    summary = tag("summary", plural(len(rows) - _OPEN, "more row"))
    return body + tag("details", summary, more) if len(rows) > _OPEN else body


def _edges_table(result: Explanation) -> html.Html:
    edges = result.edges[:_LISTED]
    if not edges:
        return html.paragraph("Nothing moves between tokens.")
    bias = any(edge.bias is not None for edge in edges)
    names = ["carried", "effect", "removed"][: len(_amounts(edges))]
    rows: list[list[Content]] = []
    for edge, *amounts in zip(edges, *_amounts(edges), strict=True):
        sends, receives = (place_name(result, place) for place in ends(edge))
        given = [] if not bias else ["–" if edge.bias is None else signed(edge.bias)]
        rows.append([edge.name, sends, receives, *amounts, f"{edge.weight:.2f}", *given])
    head = ["head", "from", "to", *names, "weight", *(["bias"] * bias)]
    lead = (
        "Carried: the exact share of the answer that passes here. Effect: a first-order estimate of what the answer "
        "would lose without it. Removed: what it lost when the model ran without it."
    )
    return html.paragraph(lead, kind="lead") + _long(head, rows, len(result.edges))


def _sources_table(result: Explanation) -> html.Html:
    entries = result.entries[:_LISTED]
    names = ["carried", "effect", "removed"][: len(_amounts(entries))]
    rows: list[list[Content]] = []
    for entry, *amounts in zip(entries, *_amounts(entries), strict=True):
        at = "" if entry.position is None else place_name(result, (entry.half, entry.position))
        words = f"“{shorten(entry.text, 60)}”" if entry.text else promoted(entry)
        rows.append([entry.name, at, words, *amounts])
    body = html.Html("")
    if rows:
        lead = "Entries with the largest effect, and the words that each promotes, as it fired here, or its text."
        body = html.paragraph(lead, kind="lead")
        body += _long(["entry", "at", "promotes, or text", *names], rows, len(result.entries))
    sums: dict[str, tuple[float, float]] = {}
    for source in result.sources:
        name = {"token": "tokens", "entry": "entries that are listed", "constant": "constants of the model"}
        what = name.get(source.kind, source.kind if source.kind == "other entries" else f"{source.kind}s")
        carried, effect = sums.get(what, (0.0, 0.0))
        sums[what] = carried + source.carried, effect + source.effect
    totals = [(what, carried) for what, (carried, _) in sums.items()] + [("the answer", result.value)]
    values = html.numbers([value for _, value in totals], signed=True)
    table = html.table(["all", "carried"], [(what, value) for (what, _), value in zip(totals, values, strict=True)])
    check = f"The sum agrees with the model’s own logits within {result.error:.0e} of their range."
    return body + table + html.paragraph(check, kind="lead")


@draws(SourceGraph)
def graph_svg(result: SourceGraph, *, title: str | None = None) -> str:
    """Draws sources at their token and layer, and links as wide as what one gave to the other."""
    positions = sorted({-1 if node.position is None else node.position for node in result.nodes})
    layers = sorted({-1 if node.layer is None else node.layer for node in result.nodes})
    spot = [
        (
            60.0 + 110 * positions.index(-1 if node.position is None else node.position),
            40.0 + 46 * (len(layers) - 1 - layers.index(-1 if node.layer is None else node.layer)),
        )
        for node in result.nodes
    ]
    seen: dict[tuple[float, float], int] = {}
    for number, place in enumerate(spot):  # several entries of one layer at one token
        seen[place] = seen.get(place, -1) + 1
        spot[number] = (place[0] + 9 * seen[place], place[1] + 7 * seen[place])
    links = [link for link in result.links if max(link.source, link.target) < len(spot)]
    largest = max((abs(link.carried) for link in links), default=0.0) or 1.0
    parts = [
        written(title or f"{plural(len(result.nodes), 'source')}, {plural(len(links), 'link')}", 0, 14, font_weight=600)
    ]
    for link in links:
        (a, b), (c, d) = spot[link.source], spot[link.target]
        names = [result.nodes[number].name for number in (link.source, link.target)]
        told = element("title", escape(f"{names[0]} gave {names[1]} {signed(link.carried)}"))
        width = max(0.8, 7 * abs(link.carried) / largest)
        look = {"fill": "none", "stroke_width": width, "stroke_opacity": 0.6, **coloured(link.carried)}
        parts.append(element("path", told, d=f"M{a:.1f} {b:.1f}Q{(a + c) / 2:.1f} {b:.1f} {c:.1f} {d:.1f}", **look))
    for node, (x, y) in zip(result.nodes, spot, strict=True):
        words = ", ".join(map(token_label, node.promotes)) or node.text
        told = element("title", escape(f"{node.name} carries {signed(node.carried)}; {shorten(words, 60)}"))
        parts.append(element("circle", told, cx=x, cy=y, r=5.0, **coloured(node.carried, "fill")))
        name = token_label(node.text) if node.kind == "token" else node.name
        parts.append(written(name, x + 8, y + 4, stroke="#fff", stroke_width=3, paint_order="stroke", class_="af-halo"))
    width, height = 110 * len(positions) + 80, 46 * len(layers) + 50
    return root("".join(parts), float(width), float(height), "sources and what they gave one another", font_size=11)


@describes(SourceGraph)
def graph_part(result: SourceGraph, _: Context) -> PagePart:
    """The drawing, and its links as a table."""
    rows = [[cell(value, 60) for value in row.values()] for row in result.rows()]
    body = html.figure(graph_svg(result)) + html.table(["from", "to", "carried"], rows, text_columns=2)
    return PagePart("What sources gave one another", [Section("graph", str(result), body)])
