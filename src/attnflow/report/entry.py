"""One entry of a model as a chart and on a page: its tokens, the texts that make it fire, and what is near it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from attnflow._core.markup import grouped, percent, plural, shorten, token_label
from attnflow.knowledge.reading.results import EntryRemoval, EntryReport, Example, Near
from attnflow.report import charts, html
from attnflow.report.charts import NEGATIVE, PICTURES, POSITIVE, SERIES, SOFT, Figure, blank, chart, heat_map, literal
from attnflow.report.displays import describes, draws
from attnflow.report.html import Content, tag
from attnflow.report.page import Context, PagePart, Section

_ROW: Final = 0.22  # inches of a bar
_CELL: Final = 8  # characters of a token in a cell


@describes(EntryReport)
def entry_part(report: EntryReport, _: Context) -> PagePart:
    numbers: list[tuple[str, Content]] = [("Place", report.place), ("Norm of its value", f"{report.norm:.3g}")]
    if report.tokens_read:
        share = percent(report.active / report.tokens_read)
        numbers.append(("Active", tag("span", share, tag("small", f"of {grouped(report.tokens_read)} tokens"))))
    lead = (
        "What one unit of its value adds to the logit of each token, in standard deviations from the mean over the "
        "vocabulary. Where its weight is negative, as it can be in gated layers, the two sides change places."
    )
    if report.without:
        lead = f"Its tokens are unknown: {report.without}."
    tokens = [
        (name, html.join([html.code(token_label(pushed.token, 24)) for pushed in listed], " "))
        for name, listed in (("Raises", report.raised), ("Lowers", report.lowered))
        if listed
    ]
    picture = charts.in_page(lambda: entry_chart(report), f"Entry {report.name}")
    sections = [Section("entry", "Tokens", html.paragraph(lead, kind="lead") + html.facts(tokens) + picture)]
    if report.examples:
        sections.append(Section("texts", "Texts in which it fires", _texts(report.examples)))
    sections.append(Section("near", "Near entries", _near(report)))
    source: list[tuple[str, Content]] = [("Model", html.code(report.model)), ("Module", html.code(report.path))]
    reading = [str(report).partition("\n")[0] + "."]
    title = f"Entry {report.name} of {report.model}"
    return PagePart(title, sections, reading, numbers, source)


def _texts(examples: Sequence[Example]) -> html.Html:
    lead = "For each text the place with the largest absolute weight; that token is marked."
    columns = {
        "Weight": html.numbers([example.weight for example in examples], signed=True),
        "Text, token": [f"{example.text}, {example.position}" for example in examples],
        "Around it": [html.tokens(example.tokens, [example.position], example.first) for example in examples],
    }
    return html.paragraph(lead, kind="lead") + html.columns(columns, text_columns=3)


def _near(report: EntryReport) -> html.Html:
    lead = "By value: the entries that say the same. By key: those that fire for the same. Cosines, over all entries."
    rows = [
        [side, one.name, " ".join(token_label(word) for word in one.raised), f"{one.cosine:.2f}"]
        for side, near in (("value", report.near_by_value), ("key", report.near_by_key))
        for one in near
    ]
    head = ["By", "Entry", "Raises", "Cosine"]
    return html.paragraph(lead, kind="lead") + html.table(head, rows, text_columns=3)


@draws(EntryReport)
@chart
def entry_chart(report: EntryReport, *, title: str | None = None) -> Figure:
    listed = max(len(report.raised) + len(report.lowered), len(report.near_by_value) + len(report.near_by_key) + 2)
    above, below = 1.1 + _ROW * listed, 1.0 + 0.27 * len(report.examples)
    figure = blank(11.5, above + (below if report.examples else 0))
    grid = figure.add_gridspec(2, 2, height_ratios=(above, below)) if report.examples else figure.add_gridspec(1, 2)
    _pushes(figure.add_subplot(grid[0, 0]), report)
    sides = grid[0, 1].subgridspec(2, 1)
    for place, (name, near) in enumerate((("value", report.near_by_value), ("key", report.near_by_key))):
        _cosines(figure.add_subplot(sides[place]), name, near, bottom=place == 1)
    if report.examples:
        _cells(figure.add_subplot(grid[1, :]), report.examples)
    figure.suptitle(literal(title or f"{report.model}: entry {report.name}"))
    return figure


@draws(EntryRemoval)
@chart
def removal_chart(removal: EntryRemoval, *, title: str | None = None) -> Figure:
    names = [_label(one.token, 16) for one in removal.chances]
    figure = blank(6.5, 1.3 + 0.36 * len(names))
    axes = figure.subplots()
    before, after = ([getattr(one, name) for one in removal.chances] for name in ("before", "after"))
    for shift, sizes, colour, label in ((-0.2, before, SOFT, "with the entry"), (0.2, after, SERIES[0], "without it")):
        axes.barh(np.arange(len(names)) + shift, sizes, height=0.36, color=colour, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("probability of the next token")
    axes.legend(loc="lower right")
    end = shorten("".join(removal.tokens[: removal.position + 1]), 40)
    axes.set_title(literal(title or f"after “{end}”, entry {removal.name}"))
    return figure


def _label(token: str, limit: int = 12) -> str:
    return literal(token_label(token, limit).translate(PICTURES))


def _pushes(axes: Any, report: EntryReport) -> None:
    listed = [*report.raised, *reversed(report.lowered)]
    sizes = [one.strength for one in listed]
    axes.barh(range(len(listed)), sizes, color=[POSITIVE if size > 0 else NEGATIVE for size in sizes], height=0.7)
    reach = max(map(abs, sizes), default=1.0)
    for place, one in enumerate(listed):
        side, sign = ("right", -1) if one.strength > 0 else ("left", 1)
        axes.text(sign * 0.02 * reach, place, _label(one.token, 20), ha=side, va="center")
    axes.set_xlim(-1.1 * reach, 1.1 * reach)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_xlabel("push on the logit, standard deviations over the vocabulary")
    axes.set_title("tokens that its value raises and lowers" if listed else "its tokens are unknown")


def _cosines(axes: Any, side: str, near: Sequence[Near], *, bottom: bool) -> None:
    places = range(len(near))
    axes.barh(places, [one.cosine for one in near], color=SERIES[0], height=0.7, alpha=0.55)
    axes.set_yticks(places, [one.name for one in near])
    for place, one in zip(places, near, strict=True):
        words = " ".join(_label(word) for word in one.raised)
        axes.text(0.01, place, words, fontsize=7.5, va="center")
    axes.set_xlim(min(0.0, *(one.cosine for one in near), 0.0), 1)
    axes.invert_yaxis()
    axes.set_ylabel("entry")
    if bottom:
        axes.set_xlabel("cosine; the words are what the value raises")
    axes.set_title(f"nearest by {side}")


def _cells(axes: Any, examples: Sequence[Example]) -> None:
    around = max(max(one.position - one.first, len(one.tokens) - one.position + one.first - 1) for one in examples)
    table = np.full((len(examples), 2 * around + 1), np.nan)
    limit = max(abs(weight) for one in examples for weight in one.weights)
    for row, one in enumerate(examples):
        start = around - one.position + one.first
        table[row, start : start + len(one.tokens)] = one.weights
        for column, (token, weight) in enumerate(zip(one.tokens, one.weights, strict=True), start):
            dark = abs(weight) > 0.6 * limit
            axes.text(
                column, row, _label(token.strip() or token, _CELL), ha="center", va="center", fontsize=6,
                color="white" if dark else "black", weight="bold" if column == around else "normal", clip_on=True,
            )  # fmt: skip
    heat_map(axes, table, limit, label="weight")
    axes.set_xticks([0, around, 2 * around], [f"{-around}", "strongest token", f"+{around}"])
    axes.set_yticks(range(len(examples)), [f"text {one.text}" for one in examples])
    axes.set_title(f"where it fires most: {plural(len(examples), 'text')}")
