"""Why a query looked at a key: a map of pairs of components, the leading terms as bars, and the tokens of the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnflow._core import checks
from attnflow._core.markup import grouped, percent, plural, shorten, token_label
from attnflow.geometry.attribution import ScoreAttribution, telling
from attnflow.models.passes.recording import ComponentName
from attnflow.report import charts, html
from attnflow.report.charts import INK, SIGNED, SOFT, blank, chart, colours, draw_bars, literal, name_axis, signed
from attnflow.report.displays import describes, draws
from attnflow.report.html import Content, tag
from attnflow.report.page import Context, PagePart, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]
AttributionPicture = Literal["all", "map", "terms", "tokens"]
Drawn = Callable[[AttributionPicture, str, str], html.Html]  # draws a picture of a page, with its name and caption

BARS: Final = 60  # terms that are drawn; the others are summed
_NAMED: Final = 24  # components up to which a map has a row for each; of more components, a row for each layer
_KEYS: Final = 48  # tokens in the picture of a row
_PARTS: Final = 5  # components in the picture of a row, each with a line of its own
_LISTED: Final = 40  # terms in the table of a page
_MOST: Final = 0.9  # of the weight of a row: of a key with more, centred terms say little
_SHADES: Final = 4  # of each colour, in the text of a page
CHOICE: Final = "has the most weight on a token besides the first and the query"


@dataclass(frozen=True)
class HeadRow:
    """One head's row of an attribution, and the key that is explained.

    `terms` are [keys, query components, key components]; `constants` hold their parts, [keys] each; in logits. Both
    are above `level`: the row's mean, or another key.
    """

    head: int | None
    index: int
    centred: bool
    terms: Array
    constants: Mapping[str, Array]
    scores: Array
    weights: Array
    level: str = "the row’s mean"

    @property
    def constant(self) -> Array:
        return np.sum(list(self.constants.values()), axis=0) if self.constants else np.zeros(len(self.scores))

    @property
    def totals(self) -> Array:
        """What the terms and constants of each key sum to: its score, or its score above the row's mean."""
        return self.terms.sum((1, 2)) + self.constant


@dataclass(frozen=True)
class Leading:
    terms: Sequence[tuple[ComponentName, ComponentName, float]]
    constants: Mapping[str, float]
    count: int  # of the other terms
    others: float
    total: float


def row_of(result: ScoreAttribution, head: int | None = None, key: int | None = None, raw: bool = False) -> HeadRow:
    """Returns the row of a head and the position in it of the key to explain.

    By default the head is the one with the largest weight on a token other than the first and the query itself, and the
    key is the one with the largest weight of that head. Of a result that compares two keys it is the first of them, and
    terms are those of the two less each other.
    """
    heads = list(result.heads)
    contrasts = result.against is not None and not raw
    raw = raw or contrasts
    constants = result.constants if raw else result.centred_constants
    everything = [result.weights, result.scores, result.raw if raw else result.centred, *constants.values()]
    if result.head is not None:
        everything = [values[None] for values in everything]
    weights, scores, terms, *parts = (np.asarray(values, dtype=np.float64) for values in everything)
    if head is not None and head not in heads:
        raise ValueError(f"head must be one of the attributed {heads}, got {head}")
    if key is not None and key not in result.keys:
        raise ValueError(
            f"key must be a position that query {result.query} may attend to, {_positions(result.keys)}, got {key}"
        )
    if head is None:
        others = telling(result) or slice(None)
        head = heads[int(weights[:, others].max(axis=1).argmax())]
    place = heads.index(head)
    row = weights[place]
    first = 0 if result.against is not None else int(row.argmax())
    index = first if key is None else result.keys.index(key)
    chosen = {name: values[place] for name, values in zip(constants, parts, strict=True)}
    if contrasts:
        less = {name: values - values[::-1] for name, values in chosen.items()}
        other = key_name(result, 1 - index)
        return HeadRow(head, index, True, terms[place] - terms[place][::-1], less, scores[place], row, other)
    return HeadRow(head, index, not raw, terms[place], chosen, scores[place], row)


def leading(result: ScoreAttribution, row: HeadRow, count: int) -> Leading:
    checks.integer("count", count, 1)
    table = row.terms[row.index]
    order = np.argsort(-np.abs(table), axis=None, kind="stable")[:count]
    places = [(int(place) // table.shape[1], int(place) % table.shape[1]) for place in order]
    terms = [(result.components[q], result.key_components[k], float(table[q, k])) for q, k in places]
    constants = {name: float(values[row.index]) for name, values in row.constants.items() if values.any()}
    others = math.fsum(table.ravel().tolist()) - math.fsum(value for *_, value in terms)
    return Leading(terms, constants, table.size - len(terms), others, float(row.totals[row.index]))


def remark(result: ScoreAttribution, row: HeadRow) -> str:
    """Warns of a key with nearly all of the weight, whose centred terms say little; otherwise returns ""."""
    if not row.centred or result.against is not None or row.weights[row.index] < _MOST:
        return ""
    if len(result.keys) == 1 and row.weights[0] == 1:
        return "The query can attend to no other token, so that this weight is 1 whatever the score."
    return (
        "This key has nearly all of the weight, so the row’s mean is nearly its own score and centred terms are small. "
        "Those of another key say why it got less, and raw terms what the score is made of."
    )


@describes(ScoreAttribution)
def attribution_part(result: ScoreAttribution, _: Context, *, key: int | None = None, raw: bool = False) -> PagePart:
    row = row_of(result, None, key, raw)
    best = leading(result, row, 10)
    where = _where(result, row)
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
        return [f"In {_where(result, row)} the query {query_name(result)} has one key. ", remark(result, row)]
    return [
        f"In {_where(result, row)} the query {query_name(result)} gives ",
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
        f"In {_where(result, row)}, {query_name(result)} looks at {key_name(result, row.index)} with weight "
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
    caption = f"Terms for {key_name(result, row.index)}. Blue raises attention to it, red lowers it."
    warning = html.paragraph(remark(result, row)) if remark(result, row) else html.Html("")
    bars = drawn("terms", "Leading terms", caption)
    listed = leading(result, row, _LISTED)
    values = [value for *_, value in listed.terms] + [*listed.constants.values(), listed.others, listed.total]
    names = [(str(query), str(key)) for query, key, _ in listed.terms] + [
        ("constant", name) for name in listed.constants
    ]
    names += [("other terms", grouped(listed.count)), ("sum", "")]
    cells = [(*pair, value) for pair, value in zip(names, html.numbers(values, signed=True), strict=True)]
    table = html.table(["query side", "key side", "logits"], cells, text_columns=2)
    numbers = tag("details", tag("summary", f"The {len(listed.terms)} largest terms in numbers"), table)
    return Section("why", "Why did this head look there?", html.paragraph(lead, kind="lead") + warning + bars + numbers)


def _tokens(result: ScoreAttribution, row: HeadRow, drawn: Drawn) -> Section:
    zero = row.level if row.centred else "zero"
    lead = (
        f"Every key of the row, coloured by its score above (blue) or below (red) {zero}. The key that is explained is "
        "underlined."
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
        kind = f"token {'attract' if total > 0 else 'repel'}-{shade}" if shade else "token"
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
    """Draws why a query looked at a key: pairs of components, the leading terms, and the tokens of the row.

    Terms are centred by the row's attention, or as they enter the score if `raw`; both are in logits.
    """
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
    figure = blank(width, sum(heights) + 0.2)
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
    said = f"{result.model}, {_where(result, row)}: why {query_name(result)} looks at {key_name(result, row.index)}"
    figure.suptitle(literal(title or shorten(said, 110)))
    return figure


def _draw_map(panel: Any, row: HeadRow, table: Array, sides: tuple[list[str], list[str]]) -> None:
    grid = {"width_ratios": [6, 1], "height_ratios": [1, 6], "wspace": 0.02, "hspace": 0.02}
    (above, corner), (axes, beside) = panel.subplots(2, 2, sharex="col", sharey="row", gridspec_kw=grid)
    corner.set_axis_off()
    limit = _limit(table) or 1.0
    look = {"aspect": "auto", "interpolation": "none", "cmap": SIGNED, "vmin": -limit, "vmax": limit}
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
    for margin, sums, direction in ((above, table.sum(0), above.bar), (beside, table.sum(1), beside.barh)):
        direction(np.arange(len(sums)), sums, color=colours(sums), **{"width" if margin is above else "height": 0.8})
        margin.tick_params(labelsize=6.5, length=2, labelbottom=margin is beside, labelleft=margin is above)
        value, name = (margin.yaxis, "y") if margin is above else (margin.xaxis, "x")
        value.get_major_locator().set_params(nbins=3)
        margin.tick_params(axis="y" if name == "x" else "x", length=0)
        (margin.axhline if name == "y" else margin.axvline)(0, color=SOFT, linewidth=0.6)
    axes.figure.colorbar(
        image, ax=[axes, above], location="bottom", fraction=0.04, aspect=40, label=_scale(table, limit), format="{x:g}"
    )
    panel.suptitle(f"pairs of components, {_quantity(row)}", fontsize=9)


def _draw_terms(panel: Any, row: HeadRow, best: Leading) -> None:
    names = [f"{short(query)} × {short(key)}" for query, key, _ in best.terms]
    names += [f"constant: {name}" for name in best.constants]
    values = [value for *_, value in best.terms] + [*best.constants.values()]
    if best.count:
        names.append(plural(best.count, "other term"))
        values.append(best.others)
    names.append("sum of all" if row.centred else "the score")
    values.append(best.total)
    axes = panel.subplots()
    draw_bars(axes, names, values, len(best.terms))
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
    shades = [INK if key == row.index else SOFT for key in chosen]
    bars.bar(np.arange(len(chosen)), row.weights[chosen], color=shades, width=0.75)
    bars.set_ylabel("weight")
    bars.set_ylim(0, 1)
    bars.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    bars.tick_params(axis="x", length=0, labelbottom=False)
    limit = _limit(table) or 1.0
    image = axes.imshow(table, aspect="auto", interpolation="none", cmap=SIGNED, vmin=-limit, vmax=limit)
    axes.spines[["top", "right"]].set_visible(True)
    axes.set_yticks(range(len(names)), [literal(name) for name in names])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    name_axis(axes.xaxis, [token_label(result.tokens[key]) for key in chosen], list(range(len(chosen))), turned=True)
    bar = panel.colorbar(image, ax=axes, pad=0.01, fraction=0.04, aspect=12, label="logits")
    bar.outline.set_visible(False)
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
        if max(table.shape) <= _NAMED and len(sides) == axis:
            sides.append([short(name) for name in names])
            continue
        groups = [name.place.replace("layer ", "") for name in names]
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


def short(name: ComponentName) -> str:
    """ "attention 7" for layer 7 attention."""
    which = f"({name.which})" if name.which else ""
    number = "" if name.layer is None else str(name.layer)
    return shorten(" ".join(filter(None, (name.half, name.kind, which, number))), 34)


def _where(result: ScoreAttribution, row: HeadRow) -> str:
    kind = "" if result.attention == "self" else f" of its {result.attention}-attention"
    return f"layer {result.layer}, head {row.head}{kind}"


def query_name(result: ScoreAttribution) -> str:
    return f"“{token_label(result.query_token)}” ({result.query})"


def key_name(result: ScoreAttribution, index: int) -> str:
    return f"“{token_label(result.tokens[index])}” ({result.keys[index]})"


def _positions(keys: Sequence[int]) -> str:
    return f"{min(keys)} to {max(keys)}" if len(keys) == max(keys) - min(keys) + 1 else str(list(keys))
