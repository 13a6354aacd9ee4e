"""Why a query looked at a key: a map of pairs of components, the leading terms as bars, and the tokens of the row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from attnflow._core import checks
from attnflow._core.markup import grouped, percent, plural, shorten, token_label
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.report import charts, html
from attnflow.report.attribution_rows import (
    HeadRow,
    Leading,
    head_name,
    key_name,
    leading,
    query_name,
    remark,
    row_of,
    short,
)
from attnflow.report.charts import SOFT, Array, Figure, chart, colours, literal, name_axis, signed
from attnflow.report.displays import describes, draws
from attnflow.report.html import Content, tag
from attnflow.report.page import Context, PagePart, Section

AttributionPicture = Literal["all", "map", "terms", "tokens"]
Drawn = Callable[[AttributionPicture, str, str], html.Html]  # draws a picture of a page, with its name and caption

BARS: Final = 60  # terms that are drawn; the others are summed
_NAMED: Final = 24  # components up to which a map has a row for each; of more components, a row for each layer
_KEYS: Final = 48  # tokens in the picture of a row
_PARTS: Final = 5  # components in the picture of a row, each with a line of its own
_LISTED: Final = 40  # terms in the table of a page
_SHADES: Final = 4  # of each colour, in the text of a page
CHOICE: Final = "has the most weight on a token besides the first and the query"


@describes(ScoreAttribution)
def attribution_part(result: ScoreAttribution, _: Context, *, key: int | None = None, raw: bool = False) -> PagePart:
    row = row_of(result, None, key, raw)
    best = leading(result, row, 10)
    where = head_name(result, row.head)
    above = f"{signed(best.total)} above {row.level}" if row.centred else "before the softmax"
    numbers: list[tuple[str, Content]] = [
        (
            "Attention weight",
            tag("span", f"{row.weights[row.index]:.3f}", tag("small", f"on {key_name(result, row.index)}")),
        ),
        ("Score", tag("span", f"{row.scores[row.index]:.3g}", tag("small", above))),
        ("Terms", grouped(row.terms[row.index].size)),
    ]

    def drawn(picture: AttributionPicture, name: str, caption: str) -> html.Html:
        at = result.keys[row.index]
        draw = partial(attribution_chart, result, picture=picture, head=row.head, key=at, raw=raw, title=" ")
        return charts.in_page(draw, name, caption)

    caption = "Rows: what was written at the query; columns: at the key. Bars sum rows and columns, and are not cut."
    pairs = Section("pairs", "All pairs of components", drawn("map", "Pairs of components", caption))
    sections = [_terms(result, row, drawn), pairs, _tokens(result, row, drawn)]
    return PagePart(
        f"Why {where} looked there", sections, _reading(result, row, best), numbers, [("Model", result.model)]
    )


def _reading(result: ScoreAttribution, row: HeadRow, best: Leading) -> list[Content]:
    if len(result.keys) == 1 and row.centred:
        return [f"In {head_name(result, row.head)} the query {query_name(result)} has one key. ", remark(result, row)]
    return [
        f"In {head_name(result, row.head)} the query {query_name(result)} gives ",
        "its largest weight" if row.weights[row.index] == result.weights.max() else percent(row.weights[row.index]),
        f" to {key_name(result, row.index)}. {_leads(row, best)}",
    ]


def _leads(row: HeadRow, best: Leading) -> str:
    """Name the largest term for looking there; where none is for it, the largest one."""
    above = f" above {row.level}" if row.centred else ""
    favours = [term for term in best.terms if term[2] > 0]
    query_side, key_side, value = (favours or best.terms)[0]
    return (
        f"The largest term {'for' if favours else 'against'} looking there, {signed(value)} logits{above}, pairs "
        f"{query_side} at the query with {key_side} at the key."
    )


def why(result: ScoreAttribution) -> str:
    """Why a head looked at a key, in a sentence or two."""
    row = row_of(result)
    gives = f"It gives {key_name(result, row.index)} {percent(row.weights[row.index])}."
    return f"{gives} {_leads(row, leading(result, row, 10))}"


def _terms(result: ScoreAttribution, row: HeadRow, drawn: Drawn) -> Section:
    lead = (
        f"In {head_name(result, row.head)}, {query_name(result)} looks at {key_name(result, row.index)} with weight "
        f"{row.weights[row.index]:.3f}. The score before the softmax is a sum over pairs: what an earlier attention or "
        "feed-forward layer wrote at the query, times what one wrote at the key. Norms keep the scale that they had in "
        "this pass. "
    )
    if result.against is not None and row.centred:
        lead += f"Each term is shown less that of {row.level}: all of them sum to the difference of the two scores. "
    elif row.centred:
        lead += (
            "Softmax ignores what all keys of a row share. So each term is shown centred, less its mean over the row "
            "weighted by attention: this is how much log attention grows with the term. "
        )
    lead += f"The sum agrees with the model’s own scores to {result.error:.0e} of the row’s range."
    if result.head is None:
        lead += f" Of {len(result.heads)} heads of this layer, this one {CHOICE}."
    caption = f"Terms for {key_name(result, row.index)}. Blue raises attention to it, orange lowers it."
    warning = html.paragraph(remark(result, row)) if remark(result, row) else html.Html("")
    bars = drawn("terms", "Leading terms", caption)
    listed = leading(result, row, _LISTED)
    values = html.numbers([*listed.values, listed.others, listed.total], signed=True)
    names = [(str(query), str(key)) for query, key, _ in listed.terms]
    names += [("constant", name) for name in listed.constants]
    names += [("other terms", grouped(listed.count)), ("sum", "")]
    cells = [(*pair, value) for pair, value in zip(names, values, strict=True)]
    table = html.table(["query side", "key side", "logits"], cells, text_columns=2)
    numbers = tag("details", tag("summary", f"The {len(listed.terms)} largest terms in numbers"), table)
    return Section("why", "Why did this head look there?", html.paragraph(lead, kind="lead") + warning + bars + numbers)


def _tokens(result: ScoreAttribution, row: HeadRow, drawn: Drawn) -> Section:
    zero = row.level if row.centred else "zero"
    lead = (
        f"Every key of the row, coloured by its score above (blue) or below (orange) {zero}. The key that is explained "
        "is underlined."
    )
    limit = _limit(row.totals) or 1.0
    words: list[Content] = []
    order = np.arange(len(row.weights))
    if len(order) > _KEYS:
        order = np.argsort(-row.weights, kind="stable")
        lead += " Those with the largest weights come first."
    for index in order.tolist():
        position, token, total = result.keys[index], result.tokens[index], row.totals[index]
        shade = min(_SHADES, math.ceil(_SHADES * abs(float(total)) / limit))
        kind = f"token {'for' if total > 0 else 'against'}-{shade}" if shade else "token"
        said = f"{position}: weight {row.weights[index]:.3f}, {signed(float(total))} logits"
        marked = " traced" if index == row.index else ""
        words += [tag("span", token_label(token, 40), class_=kind + marked, title=said), " "]
    caption = f"Bars: attention weights. Rows: the score above {zero}, and the components at the key that make it."
    chart_of_keys = drawn("tokens", "What each token received", caption)
    body = html.paragraph(lead, kind="lead") + html.paragraph(*words, kind="prompt") + chart_of_keys
    return Section("received", "What each token received", body)


@draws(ScoreAttribution)
@chart
def attribution_chart(
    result: ScoreAttribution,
    *,
    picture: AttributionPicture = "all",
    head: int | None = None,
    key: int | None = None,
    raw: bool = False,
    count: int = 10,
    title: str | None = None,
) -> Figure:
    if picture not in ("all", "map", "terms", "tokens"):
        raise ValueError(f'picture must be "all", "map", "terms" or "tokens", got {picture!r}')
    row = row_of(result, head, key, raw)
    table, sides = _collapsed(result, row.terms[row.index])
    best = leading(result, row, min(checks.integer("count", count, 1), BARS))
    tall = 2.1 + min(8.0, max(2.4, 0.145 * len(table)))
    bars = 1.0 + 0.22 * (len(best.terms) + len(best.constants) + 2)
    wide = 2.4 + 0.2 * min(len(result.keys), _KEYS)
    width, heights = {
        "all": (12.0, [max(tall, bars), 3.6]),
        "map": (7.4, [tall]),
        "terms": (5.8, [bars]),
        "tokens": (min(12.0, max(6.4, wide)), [3.6]),
    }[picture]
    figure = charts.blank(width, sum(heights) + 0.2)
    panels = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if picture == "all":
        left, right = panels[0].subfigures(1, 2, width_ratios=[7.0, 5.0])
        _draw_map(left, row, table, sides)
        _draw_terms(right, row, best)
        _draw_tokens(panels[1], result, row)
    elif picture == "map":
        _draw_map(panels[0], row, table, sides)
    elif picture == "terms":
        _draw_terms(panels[0], row, best)
    else:
        _draw_tokens(panels[0], result, row)
    looks = f"{query_name(result)} looks at {key_name(result, row.index)}"
    what = f"{result.model}, {head_name(result, row.head)}: why {looks}"
    figure.suptitle(literal(title or shorten(what, 110)))
    return figure


def _draw_map(panel: Any, row: HeadRow, table: Array, sides: tuple[list[str], list[str]]) -> None:
    grid = {"width_ratios": [6, 1], "height_ratios": [1, 6], "wspace": 0.02, "hspace": 0.02}
    (above, corner), (axes, beside) = panel.subplots(2, 2, sharex="col", sharey="row", gridspec_kw=grid)
    corner.set_axis_off()
    limit = _limit(table) or 1.0
    look = {"aspect": "auto", "interpolation": "none", "cmap": charts.signed_map(), "vmin": -limit, "vmax": limit}
    image = axes.imshow(table, **look)
    axes.spines[["top", "right"]].set_visible(True)
    for axis, names in ((axes.yaxis, sides[0]), (axes.xaxis, sides[1])):
        step = -(-len(names) // 32)
        axis.set_ticks(range(0, len(names), step), [literal(name) for name in names[::step]])
    axes.tick_params(labelsize=7, length=2)
    axes.tick_params(axis="x", rotation=90)
    layered = len(table) != row.terms.shape[1]
    axes.set_ylabel("written at the query, by layer" if layered else "written at the query")
    axes.set_xlabel("written at the key, by layer" if layered else "written at the key")
    for margin, sums, draw, zero, value, names in (
        (above, table.sum(0), above.bar, above.axhline, above.yaxis, "x"),
        (beside, table.sum(1), beside.barh, beside.axvline, beside.xaxis, "y"),
    ):
        draw(np.arange(len(sums)), sums, 0.8, color=colours(sums))
        margin.tick_params(labelsize=6.5, length=2, labelbottom=margin is beside, labelleft=margin is above)
        value.get_major_locator().set_params(nbins=3)
        margin.tick_params(axis=names, length=0)
        zero(0, color=SOFT, linewidth=0.6)
    axes.figure.colorbar(
        image, ax=[axes, above], location="bottom", fraction=0.04, aspect=40, label=_scale(table, limit), format="{x:g}"
    )
    panel.suptitle(f"pairs of components, {_quantity(row)}", fontsize=9)


def _draw_terms(panel: Any, row: HeadRow, best: Leading) -> None:
    others = [(plural(best.count, "other term"), best.others)] if best.count else []
    sums = [*others, ("sum of all" if row.centred else "the score", best.total)]
    names, values = (
        [*best.names(brief=True), *(name for name, _ in sums)],
        [*best.values, *(value for _, value in sums)],
    )
    axes = panel.subplots()
    charts.draw_bars(axes, names, values, len(best.terms))
    axes.set_title(f"largest terms (query side × key side), {_quantity(row)}", fontsize=9, loc="right")


def _draw_tokens(panel: Any, result: ScoreAttribution, row: HeadRow) -> None:
    chosen = np.argsort(-row.weights, kind="stable")[:_KEYS]
    if len(row.weights) <= _KEYS:
        chosen = np.sort(chosen)
    sums = row.terms.sum(1)[chosen]  # of each component at the key
    order = np.argsort(-(row.weights[chosen] @ np.abs(sums)), kind="stable")[:_PARTS]
    rest = sums.sum(1) - sums[:, order].sum(1)
    lines = [row.totals[chosen], *sums[:, order].T]
    names = ["sum of all", *(f"{short(result.key_components[part])} at the key" for part in order)]
    if sums.shape[1] > len(order):
        lines.append(rest)
        names.append(f"{plural(sums.shape[1] - len(order), 'other')} at the key")
    if any(values.any() for values in row.constants.values()):
        lines.append(row.constant[chosen])
        names.append("constant")
    table = np.stack(lines)
    bars, axes = panel.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 1.7], "hspace": 0.03})
    shades = [charts.INK if key == row.index else SOFT for key in chosen]
    bars.bar(np.arange(len(chosen)), row.weights[chosen], color=shades, width=0.75)
    bars.set_ylabel("weight")
    bars.set_ylim(0, 1)
    bars.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    bars.tick_params(axis="x", length=0, labelbottom=False)
    limit = _limit(table) or 1.0
    charts.heat_map(axes, table, limit, label="logits", pad=0.01, fraction=0.04, aspect=12)
    axes.set_yticks(range(len(names)), [literal(name) for name in names])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    name_axis(axes.xaxis, [token_label(result.tokens[key]) for key in chosen], list(range(len(chosen))), turned=True)
    cut = ""
    if len(chosen) < len(result.keys):
        share = percent(float(row.weights[chosen].sum()))
        cut = f"; the {len(chosen)} of {grouped(len(result.keys))} keys with the largest weights, {share} of all"
    panel.suptitle(f"what each token received, {_quantity(row)}{cut}", fontsize=9)
    axes.set_xlabel(_scale(table, limit).removeprefix("logits").strip(" ()"), fontsize=7.5)


def _collapsed(result: ScoreAttribution, table: Array) -> tuple[Array, tuple[list[str], list[str]]]:
    """Sums the components of each layer if there are many, and names rows and columns."""
    sides: list[list[str]] = []
    for axis, names in enumerate((result.components, result.key_components)):
        if max(table.shape) <= _NAMED:
            sides.append([short(name) for name in names])
            continue
        groups = [name.place for name in names]
        kept = list(dict.fromkeys(groups))
        member = np.array([[group == one for group in groups] for one in kept], dtype=np.float64)
        table = member @ table if axis == 0 else table @ member.T
        sides.append(kept)
    return table, (sides[0], sides[1])


def _limit(values: Array) -> float:
    """Returns the end of the colour scale: the 99th percentile of the magnitudes, or the largest of fewer than 100."""
    return float(np.quantile(np.abs(values), 0.99, method="higher")) if values.size else 0.0


def _scale(table: Array, limit: float) -> str:
    beyond = np.abs(table) > limit
    if not beyond.any():
        return "logits"
    extreme = float(table.ravel()[np.abs(table).argmax()])
    cells = plural(int(beyond.sum()), "cell")
    return f"logits (colours end at ±{limit:.3g}, the 99th percentile; {cells} beyond, up to {signed(extreme)})"


def _quantity(row: HeadRow) -> str:
    if row.level != HeadRow.level:
        return f"above {row.level}"
    return "centred over the row" if row.centred else "raw"
