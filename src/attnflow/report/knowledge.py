"""Page sections for a trace: the entries that fired, and what they added to the next token's logit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from attnflow._core.markup import grouped, kinds_of, percent, plural, shorten, token_label
from attnflow.knowledge.reading.provenance import Fired, Trace
from attnflow.knowledge.reading.results import layer_labels
from attnflow.report import charts, html
from attnflow.report.charts import SOFT, Array, Figure, chart, literal, name_axis
from attnflow.report.displays import describes, draws
from attnflow.report.html import Content, tag
from attnflow.report.page import Context, PagePart, Section

_BARS: Final = 16
_ROWS: Final = 40
_CLIPPED: Final = 99  # percentile at which the colours of a map end
ABLATED: Final = (
    "The effect is a first-order estimate of what the logit loses without the entry. Ablated is what it loses when the "
    "model runs without the entry and later layers react; beside it what the probability loses."
)
_PROMPT: Final = 400  # tokens of a prompt that are shown; of a longer one the last
_WIDEST: Final = 96  # tokens of a map; of a longer text the last ones


@describes(Trace)
def trace_part(trace: Trace, _: Context) -> PagePart:
    numbers: list[tuple[Content, Content]] = [
        ("Tokens", tag("span", str(len(trace.tokens)), tag("small", f"{len(trace.positions)} traced"))),
        ("Layers", str(len(trace.layers))),
        ("Active entries", percent(float(active_shares(trace).mean()))),
    ]
    if trace.answers and trace.probabilities is not None:
        answer, chance = token_label(trace.answers[-1], 24), percent(float(trace.probabilities[-1]))
        numbers.append(("Answer", tag("span", answer, tag("small", f"probability {chance}"))))
    caption = "The first layer is at the bottom."
    if not trace.without:
        caption += " Blue raises the logit of the answer, orange lowers it."
    chart = charts.in_page(lambda: trace_chart(trace, picture="layers", title=" "), "Layers by tokens", caption)
    maps = Section("maps", "Layer by layer, token by token", chart)
    sections = [_prompt(trace), _entries(trace), maps, _layers(trace)]
    source = [("Model", html.code(trace.model))]
    return PagePart(f"Entries that fired in {trace.model}", sections, _reading(trace), numbers, source)


def _prompt(trace: Trace) -> Section:
    first = max(0, len(trace.tokens) - _PROMPT)
    before = f"… {plural(first, 'token')} before. " if first else ""
    tokens = html.tokens(trace.tokens[first:], trace.positions, first)
    body = html.paragraph(before, tokens, " " if trace.tokens else "", kind="prompt")
    if trace.answers:
        answer = html.code(token_label(trace.answers[-1], 24))
        body += html.paragraph("The effects are about the logit of ", answer, " after it.", kind="lead")
    return Section("prompt", "Prompt", body)


def _entries(trace: Trace) -> Section:
    title = "Entries of the last token"
    row = len(trace.positions) - 1
    strongest = trace.fired(-1, count=_ROWS)
    if not strongest:
        return Section("entries", title, html.paragraph("No entry fired for the last token."))
    effects = any(one.effect is not None for one in strongest)
    if not effects:
        lead = "The entries with the largest contributions: the model has no logits on which they could have effects."
    else:
        lead = (
            f"The entries with the largest effects on the logit of the token {token_label(trace.answers[row], 24)!r} "
            f"at {token_label(trace.tokens[trace.positions[row]], 24)!r}: first-order estimates of what it loses "
            "without them, over all paths. The direct effect leaves out the paths through later layers. L24N1005 is "
            "neuron 1005 of layer 24. The words of an entry are its text, or the tokens whose logits it raises (↑) and "
            "lowers (↓) most here: weight times value, seen by the unembedding."
        )
        lead += f" There are no direct effects: {trace.without}." if trace.without else ""
    columns: dict[str, Sequence[str]] = {"Entry": [entry_name(fired) for fired in strongest]}
    words = [entry_words(fired, 90) or "–" for fired in strongest]
    if {*words} != {"–"}:  # without an unembedding and without a store, entries have no words
        columns["Text, or tokens"] = words
    columns["Layer"] = [str(fired.layer) for fired in strongest]
    columns[kinds_of(fired.letter for fired in strongest).capitalize()] = [str(fired.neuron) for fired in strongest]
    names = {"Score": "score", "Threshold": "threshold", "Weight": "weight", "Norm": "norm", "Effect": "effect"}
    names["Direct effect"] = "direct_effect"
    if not any(fired.threshold for fired in strongest):
        del names["Threshold"]  # the layers have no biases
    if not effects:
        del names["Effect"]
    if trace.without:
        del names["Direct effect"]
    if any(fired.ablated_effect is not None for fired in strongest):
        names |= {"Ablated": "ablated_effect", "Probability lost": "probability_effect"}
        lead += f" {ABLATED}"
    for name, field in names.items():
        values = [getattr(fired, field) for fired in strongest]
        columns[name] = _numbers(values, signed=name != "Norm")
    table = html.columns(columns, text_columns=1 + ("Text, or tokens" in columns))
    what = "Effects of entries" if effects else "Norms of contributions"
    chart = charts.in_page(lambda: trace_chart(trace, picture="entries", count=_BARS), what)
    return Section("entries", title, html.paragraph(lead, kind="lead") + chart + table)


def _numbers(values: Sequence[float | None], signed: bool = True) -> list[str]:
    return html.numbers([math.nan if value is None else value for value in values], signed=signed)


def _layers(trace: Trace) -> Section:
    lead = (
        "Means over tokens; effects are those at the last token. Active are entries with a positive score; kept ones "
        "explain 1 − |rest| / |all| of what a layer’s entries write."
    )
    layers = list(trace)
    columns: dict[str, Sequence[str]] = {
        "Layer": layer_labels(layers),
        "Entries": [grouped(one.num_entries) for one in layers],
        "Active": [_share(float(one.active.double().mean()) / max(one.num_entries, 1)) for one in layers],
        "Kept explain": [_share(max(0.0, float(one.explained.mean()))) for one in layers],
        "Norm written": html.numbers([float(one.output_norm.mean()) for one in layers]),
    }
    if not trace.without:
        lead += f" {_sum(trace)}"
        for name, effects in (
            ("Entries’ direct effect", [one.direct_effect for one in layers]),
            ("Attention’s direct effect", [one.attention_effect for one in layers]),
        ):
            if any(effect is not None for effect in effects):
                columns[name] = _numbers([None if effect is None else float(effect[-1]) for effect in effects])
    table = html.columns(columns)
    return Section("layers", "Each layer in numbers", html.paragraph(lead, kind="lead") + table)


def _reading(trace: Trace) -> list[Content]:
    shares = active_shares(trace)
    said: list[Content] = [
        f"On average {percent(float(shares.mean()))} of the entries that a layer can read are active for a token."
    ]
    strongest = trace.fired(-1, count=1)
    if strongest and strongest[0].effect is not None:
        one, effect = strongest[0], strongest[0].effect
        said += [
            " At ",
            html.code(token_label(one.token)),
            f" the entry with the largest effect, {one.name}, is {'for' if effect > 0 else 'against'} ",
            html.code(token_label(one.answer)),
            f": an estimate of {abs(effect):.3g} in its logit.",
        ]
    elif trace.without:
        said.append(f" Direct effects on the logits are not defined: {trace.without}.")
    return said


def _sum(trace: Trace) -> str:
    terms = [
        ("entries", math.fsum(float(one.direct_effect[-1]) for one in trace if one.direct_effect is not None)),
        ("attention", math.fsum(float(one.attention_effect[-1]) for one in trace if one.attention_effect is not None)),
    ]
    for name, value in (("embedding", trace.embedding_effect), ("constants", trace.constant_effect)):
        if value is not None and float(value[-1]):
            terms.append((name, float(value[-1])))
    logit = 0.0 if trace.logits is None else float(trace.logits[-1])
    said = ", ".join(f"{name} {value:+.3g}" for name, value in terms).replace("-", "−")
    return f"The logit at the last token, {logit:.3g} above the mean of all tokens, is the sum of {said}."


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


@draws(Trace)
@chart
def trace_chart(
    trace: Trace,
    *,
    picture: Literal["all", "layers", "entries"] = "all",
    position: int = -1,
    count: int = 12,
    title: str | None = None,
) -> Figure:
    """The maps are the share of active entries and their direct effect, or without effects the norm they write."""
    if picture not in ("all", "layers", "entries"):
        raise ValueError(f'picture must be "all", "layers" or "entries", got {picture!r}')
    strongest = trace.fired(position, count=count)
    wide = min(9.0, 2.8 + 0.17 * min(len(trace.positions), _WIDEST))
    ablated = any(one.ablated_effect is not None for one in strongest)
    maps, bars = 2.6 + 0.19 * min(len(trace.layers), 64), 1.7 + (0.34 if ablated else 0.25) * len(strongest)
    widths, height = {
        "all": ([wide, wide, 5.5], max(maps, bars)),
        "layers": ([wide, wide], maps),
        "entries": ([7.6], bars),
    }[picture]
    figure = charts.blank(sum(widths) if picture == "layers" else min(16.0, sum(widths)), height)
    panels = list(figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0])
    if picture != "layers":
        _bars(panels.pop(), trace, strongest, trace.row(position))
    if picture != "entries":
        _map(panels[0], trace, active_shares(trace), "active entries, share of the layer's", signed=False, unit="")
        what, unit = (
            ("norm of what entries write", "norm") if trace.without else ("direct effect on the answer", "logits")
        )
        _map(panels[1], trace, written(trace), what, signed=not trace.without, unit=unit)
    if title or picture != "entries":
        figure.suptitle(literal(title or f"{trace.model}: entries that fired"))
    return figure


def active_shares(trace: Trace) -> Array:
    """Returns active entries as a share of those the layer could read, [layers, positions]."""
    return np.stack([np.asarray(one.active, dtype=np.float64) / max(one.num_entries, 1) for one in trace])


def written(trace: Trace) -> Array:
    """Returns the direct effect of all entries on the answer, or else the norm they write, [layers, positions]."""
    each = [one.output_norm if trace.without else one.direct_effect for one in trace]
    return np.stack([np.asarray(values, dtype=np.float64) for values in each])


def entry_name(one: Fired) -> str:
    return one.name + (f" · head {one.head}" if one.head else "")


def entry_words(one: Fired, limit: int = 28) -> str:
    if one.text:
        return shorten(one.text, limit)
    count = 2 if limit < 40 else 3
    sides = (("↑", one.promotes), ("↓", one.suppresses))
    words = (" ".join([arrow, *map(token_label, each[:count])]) for arrow, each in sides if each)
    return shorten("  ".join(words), limit).translate(charts.PICTURES)


def _map(axes: Any, trace: Trace, table: Array, title: str, *, signed: bool, unit: str) -> None:
    first = max(0, len(trace.positions) - _WIDEST)
    table = table[:, first:]
    sizes = np.abs(table)
    largest = float(sizes.max(initial=0.0)) or 1.0
    limit = (float(np.percentile(sizes, _CLIPPED)) if sizes.size else 0.0) or largest
    charts.heat_map(axes, table, limit, signed=signed, up=True, label=unit)
    names = [trace.token(row) for row in range(first, len(trace.positions))]
    name_axis(axes.xaxis, names, list(trace.positions[first:]), turned=True)
    name_axis(axes.yaxis, layer_labels(trace.layers), [one.layer for one in trace])
    axes.set_ylabel("layer")
    axes.set_xlabel("token → answer" if trace.answers else "token")
    notes = [f"the last {_WIDEST} tokens"] if first else []
    if limit < largest:
        notes.append(f"clipped at the {_CLIPPED}th percentile\n(largest: {largest:.3g})")
    axes.set_title("\n".join([title, *notes]), fontsize=9)


def _bars(axes: Any, trace: Trace, strongest: list[Fired], row: int) -> None:
    """Draws the entries for the answer, then those against it, each with the effect of its ablation if tried."""
    effects = any(one.effect is not None for one in strongest)
    sizes = {id(one): one.norm if one.effect is None else one.effect for one in strongest}
    apart = [[one for one in strongest if sizes[id(one)] > 0], [one for one in strongest if sizes[id(one)] <= 0]]
    listed = [*apart[0], *apart[1]]
    gap = 0.6 if all(apart) else 0.0
    places = [place + gap * (place >= len(apart[0])) for place in range(len(listed))]
    tried = [(at, one.ablated_effect) for at, one in zip(places, listed, strict=True) if one.ablated_effect is not None]
    reach = max(map(abs, [*sizes.values(), *(effect for _, effect in tried)]), default=1.0) or 1.0
    height, shift = (0.38, 0.2) if tried else (0.7, 0.0)
    colours = [charts.POSITIVE if sizes[id(one)] > 0 else charts.NEGATIVE for one in listed]
    shifted = [at - shift for at in places]
    axes.barh(shifted, [sizes[id(one)] for one in listed], color=colours, height=height, label="effect")
    if tried:
        shifted, lost = [at + shift for at, _ in tried], [effect for _, effect in tried]
        axes.barh(shifted, lost, color=SOFT, height=height, label="ablated: lost without the entry")
        axes.legend(loc="lower right")
    axes.set_yticks(places, [literal(entry_name(one)) for one in listed])
    for place, one in zip(places, listed, strict=True):
        # Beyond zero on the other side of the bars, or of the longer one, where nothing is drawn over it.
        size = sizes[id(one)]
        other = (one.ablated_effect or 0.0) if (one.ablated_effect or 0.0) * size < 0 else 0.0
        start = other if effects else size
        side = "right" if size > 0 and effects else "left"
        at = start + (-0.03 if side == "right" else 0.03) * reach
        axes.text(at, place, literal(entry_words(one)), fontsize=7.5, va="center", ha=side)
    axes.set_xlim(*((-1.7 * reach, 1.7 * reach) if effects else (0, 1.7 * reach)))
    axes.set_ylim(max(places, default=0) + (2.4 if tried else 0.6), -0.6)  # with room for the legend
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_ylabel("layer · entry")
    axes.set_xlabel("against the answer   ←   logits   →   for the answer" if effects else "norm of what it writes")
    chance = "" if trace.probabilities is None else f", p = {percent(float(trace.probabilities[row]))}"
    axes.set_title(literal(f"entries at {trace.token(row)}{chance}"), fontsize=9)
