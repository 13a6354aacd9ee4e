"""Page sections for a trace: the entries that fired, and what they added to the next token's logit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import grouped, percent, plural, shorten, token_label
from attnflow.knowledge.provenance import Fired, Trace
from attnflow.report import charts, html
from attnflow.report.charts import NEGATIVE, PICTURES, POSITIVE, SOFT, blank, chart, heat_map, literal, name_axis
from attnflow.report.html import Content, tag
from attnflow.report.page import Context, Part, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]

_BARS: Final = 16
_ROWS: Final = 40
_PROMPT: Final = 400  # tokens of a prompt that are shown; of a longer one the last
_WIDEST: Final = 96  # tokens of a map; of a longer text the last ones


def trace_part(trace: Trace, _: Context) -> Part:
    """Describes the prompt, the strongest entries of its last token, and each layer."""
    numbers: list[tuple[str, Content]] = [
        ("Tokens", tag("span", str(len(trace.tokens)), tag("small", f"{len(trace.positions)} traced"))),
        ("Layers", str(len(trace.layers))),
        ("Active entries", percent(float(active_shares(trace).mean()))),
    ]
    if trace.logits is not None:
        numbers.append(("Logit", tag("span", f"{float(trace.logits[-1]):.3g}", tag("small", "above the mean"))))
    caption = "The first layer is at the top."
    if not trace.without:
        caption += " Blue raises the logit of the target, red lowers it."
    chart = charts.in_page(lambda: trace_chart(trace, picture="layers", title=" "), "Layers by tokens", caption)
    sections = [
        _prompt(trace),
        _entries(trace),
        Section("maps", "Layer by layer, token by token", chart),
        _layers(trace),
    ]
    source = [("Model", html.code(trace.model))]
    return Part(f"Entries that fired in {trace.model}", sections, _reading(trace), numbers, source)


def _prompt(trace: Trace) -> Section:
    first = max(0, len(trace.tokens) - _PROMPT)
    traced = set(trace.positions)
    tokens = [
        tag("span", token_label(token, 40), class_="token traced" if position in traced else "token")
        for position, token in enumerate(trace.tokens[first:], first)
    ]
    before = f"… {plural(first, 'token')} before. " if first else ""
    parts = [html.paragraph(before, *(part for token in tokens for part in (token, " ")), kind="prompt")]
    if trace.targets:
        asked = ("The effects are about the logit of ", html.code(token_label(trace.targets[-1], 24)), " after it.")
        parts.append(html.paragraph(*asked, kind="lead"))
    return Section("prompt", "Prompt", html.join(parts))


def _entries(trace: Trace) -> Section:
    title = "Entries of the last token"
    row = len(trace.positions) - 1
    strongest = trace.fired(-1, count=_ROWS)
    if not strongest:
        return Section("entries", title, html.paragraph("No entry fired for the last token."))
    if trace.without:
        lead = f"The entries with the largest contributions. There are no direct effects: {trace.without}."
    else:
        lead = (
            f"What the strongest entries add to the logit of the token {token_label(trace.targets[row], 24)!r} at "
            f"{token_label(trace.tokens[trace.positions[row]], 24)!r}, less what they add to all tokens alike: their "
            "direct effect, with the scale of the final norm held still and without the detours through later layers. "
            "An entry is named by layer and id. Its words are its text, or the tokens whose logits it raises (↑) and "
            "lowers (↓) most here: weight times value, seen by the unembedding."
        )
    effects = [math.nan if one.effect is None else one.effect for one in strongest]
    columns: dict[str, Sequence[str]] = {
        "Entry": [entry_name(one) for one in strongest],
        "Text, or tokens": [entry_words(one, 90) for one in strongest],
        "Score": html.numbers([one.score for one in strongest], signed=True),
        "Threshold": html.numbers([one.threshold for one in strongest], signed=True),
        "Weight": html.numbers([one.weight for one in strongest], signed=True),
        "Norm": html.numbers([one.norm for one in strongest]),
        "Effect": html.numbers(effects, signed=True),
    }
    table = html.table(list(columns), zip(*columns.values(), strict=True), text_columns=2)
    what = "Norms of contributions" if trace.without else "Direct effects of entries"
    chart = charts.in_page(lambda: trace_chart(trace, picture="entries", count=_BARS), what)
    return Section("entries", title, html.paragraph(lead, kind="lead") + chart + table)


def _layers(trace: Trace) -> Section:
    lead = (
        "Means over tokens; effects are those at the last token. Active are entries with a positive score; kept ones "
        "explain 1 − |rest| / |all| of what a layer’s entries write."
    )
    layers = list(trace)
    columns: dict[str, Sequence[str]] = {
        "Layer": [str(one.layer) for one in layers],
        "Entries": [grouped(one.num_entries) for one in layers],
        "Active": [_share(float(one.active.double().mean()) / max(one.num_entries, 1)) for one in layers],
        "Kept explain": [_share(max(0.0, float(one.explained.mean()))) for one in layers],
        "Norm written": html.numbers([float(one.output_norm.mean()) for one in layers]),
    }
    if not trace.without:
        lead += f" {_sum(trace)}"
        for name, effects in (
            ("Entries’ effect", [one.effect for one in layers]),
            ("Attention’s effect", [one.attention_effect for one in layers]),
        ):
            if any(effect is not None for effect in effects):
                values = [math.nan if effect is None else float(effect[-1]) for effect in effects]
                columns[name] = html.numbers(values, signed=True)
    table = html.table(list(columns), zip(*columns.values(), strict=True))
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
            f" the entry with the largest direct effect, {one.entry} of layer {one.layer}, "
            f"{'raises' if effect > 0 else 'lowers'} the logit of ",
            html.code(token_label(one.target)),
            f" by {abs(effect):.3g}.",
        ]
    elif trace.without:
        said.append(f" Direct effects on the logits are not defined: {trace.without}.")
    return said


def _sum(trace: Trace) -> str:
    terms = [
        ("entries", math.fsum(float(one.effect[-1]) for one in trace if one.effect is not None)),
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


@chart
def trace_chart(
    trace: Trace,
    *,
    picture: Literal["all", "layers", "entries"] = "all",
    position: int = -1,
    count: int = 12,
    title: str | None = None,
) -> Figure:
    """Draws layers by tokens, first layer on top, and the strongest entries of a token.

    The maps are the share of active entries and their direct effect, or without effects the norm of what they write.
    """
    if picture not in ("all", "layers", "entries"):
        raise ValueError(f'picture must be "all", "layers" or "entries", got {picture!r}')
    strongest = trace.fired(position, count=count)
    wide = min(9.0, 2.2 + 0.17 * min(len(trace.positions), _WIDEST))
    maps, bars = 1.6 + 0.19 * min(len(trace.layers), 64), 1.2 + 0.25 * len(strongest)
    widths, height = {
        "all": ([wide, wide, 5.5], max(maps, bars)),
        "layers": ([wide, wide], maps),
        "entries": ([7.6], bars),
    }[picture]
    figure = blank(sum(widths) if picture == "layers" else min(16.0, sum(widths)), height)
    panels = list(figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0])
    if picture != "layers":
        _bars(panels.pop(), trace, strongest, trace.token(trace.row(position)))
    if picture != "entries":
        _map(panels[0], trace, active_shares(trace), "active entries, share", signed=False)
        what = "norm of what entries write" if trace.without else "direct effect on the target"
        _map(panels[1], trace, written(trace), what, signed=not trace.without)
    if title or picture != "entries":
        figure.suptitle(literal(title or f"{trace.model}: entries that fired"))
    return figure


def active_shares(trace: Trace) -> Array:
    """Returns active entries as a share of those the layer could read, [layers, positions]."""
    return np.stack([np.asarray(one.active, dtype=np.float64) / max(one.num_entries, 1) for one in trace])


def written(trace: Trace) -> Array:
    """Returns the direct effect of all entries on the target, or else the norm they write, [layers, positions]."""
    each = [one.output_norm if trace.without else one.effect for one in trace]
    return np.stack([np.asarray(values, dtype=np.float64) for values in each])


def entry_name(one: Fired) -> str:
    """Names an entry by layer and id, and by head if it is not the first."""
    return f"{one.layer} · {one.entry}" + (f" · head {one.head}" if one.head else "")


def entry_words(one: Fired, limit: int = 28) -> str:
    """Returns the entry's text, or the tokens that it promotes (↑) and suppresses (↓), as many as fit."""
    if one.text:
        return shorten(one.text, limit)
    count = 2 if limit < 40 else 3
    sides = (("↑", one.promotes), ("↓", one.suppresses))
    words = (" ".join([arrow, *map(token_label, each[:count])]) for arrow, each in sides if each)
    return shorten("  ".join(words), limit).translate(PICTURES)


def _map(axes: Any, trace: Trace, table: Array, title: str, *, signed: bool) -> None:
    first = max(0, len(trace.positions) - _WIDEST)
    table = table[:, first:]
    heat_map(axes, table, float(np.abs(table).max(initial=0.0)) or 1.0, signed=signed)
    names = [trace.token(row) for row in range(first, len(trace.positions))]
    name_axis(axes.xaxis, names, list(trace.positions[first:]), turned=True)
    name_axis(axes.yaxis, [str(one.layer) for one in trace], [one.layer for one in trace])
    axes.set_ylabel("layer")
    axes.set_title(f"{title} (the last {_WIDEST} tokens)" if first else title, fontsize=9)


def _bars(axes: Any, trace: Trace, strongest: list[Fired], token: str) -> None:
    sizes = [one.norm if one.effect is None else one.effect for one in strongest]
    places = list(range(len(strongest)))
    axes.barh(places, sizes, color=[POSITIVE if size > 0 else NEGATIVE for size in sizes], height=0.7)
    axes.set_yticks(places, [literal(entry_name(one)) for one in strongest])
    reach = max(map(abs, sizes), default=1.0)
    for place, one, size in zip(places, strongest, sizes, strict=True):
        # Beyond zero on the other side of the bar, where nothing is drawn over it.
        side = "right" if size > 0 and not trace.without else "left"
        at = -0.03 * reach if side == "right" else (0.03 * reach if not trace.without else size + 0.03 * reach)
        axes.text(at, place, literal(entry_words(one)), fontsize=7.5, va="center", ha=side)
    axes.set_xlim(*((-1.7 * reach, 1.7 * reach) if not trace.without else (0, 1.7 * reach)))
    axes.invert_yaxis()
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_title(literal(f"entries at {token}: {'norm' if trace.without else 'direct effect'}"), fontsize=9)
