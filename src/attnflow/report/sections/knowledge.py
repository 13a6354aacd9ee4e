"""From which entries a model reads: those that fired for a text, what they added to the next token's logit."""

from __future__ import annotations

from typing import Final

import numpy as np

from attnflow._core.markup import grouped, percent, plural, token_label
from attnflow.knowledge.provenance import Fired, LayerTrace, Trace
from attnflow.report import bias_charts, html, knowledge_charts
from attnflow.report.html import Content, Html, tag
from attnflow.report.subject import Section, Subject
from attnflow.report.trace_figure import Array, active_shares, entry_name, entry_words, written_by

_BARS: Final = 16
_ROWS: Final = 40
_WIDEST: Final = 180  # tokens of a map; of a longer text the last ones


def trace_entries(subject: Subject) -> Section | None:
    """The strongest entries of the last token, as bars and as a table."""
    found = subject.trace
    if found is None:
        return None
    row = len(found.positions) - 1
    strongest = found.fired(-1, count=_ROWS)
    if not strongest:
        return Section("entries", "Entries of the last token", html.paragraph("No entry fired for the last token."))
    signed = not found.without
    sizes = [one.norm if one.effect is None else one.effect for one in strongest[:_BARS]]
    bars = [(entry_name(one), entry_words(one, 44), size) for one, size in zip(strongest, sizes, strict=False)]
    if signed:
        lead = (
            f"What the strongest entries add to the logit of the token {token_label(found.targets[row], 24)!r} at "
            f"{token_label(found.tokens[found.positions[row]], 24)!r}, less what they add to all tokens alike: their "
            "direct effect, with the scale of the final norm held still and without the detours through later layers. "
            "An entry is named by layer and id. Its words are its text, or the tokens that it promotes; “not”, those "
            "that it pushes down here, with a negative weight."
        )
    else:
        lead = f"The entries with the largest contributions. There are no direct effects: {found.without}."
    what = "Direct effects of entries" if signed else "Norms of contributions"
    parts: list[Content] = [
        html.paragraph(lead, kind="lead"),
        html.figure(Html(knowledge_charts.entry_bars(bars, what, signed=signed)), kind="natural"),
        html.table(_HEAD, [_row(one) for one in strongest], text_columns=2),
    ]
    return Section("entries", "Entries of the last token", html.join(parts))


def trace_maps(subject: Subject) -> Section | None:
    """Active entries and what they wrote, layers by tokens."""
    found = subject.trace
    if found is None:
        return None
    table, what = written_by(found)
    shares = active_shares(found)
    parts = [
        tag("h3", "Active entries"),
        _map(found, shares, "Share of active entries", f"active entries, up to {percent(float(shares.max()))}"),
        tag("h3", what.capitalize()),
        _map(found, table, what.capitalize(), "blue raises the logit of the target, red lowers it", found.without),
    ]
    if len(found.positions) > _WIDEST:
        parts.append(html.paragraph(f"Shown are the last {_WIDEST} of {plural(len(found.positions), 'token')}."))
    return Section("maps", "Layer by layer, token by token", html.join(parts))


def trace_layers(subject: Subject) -> Section | None:
    """Each layer in numbers."""
    found = subject.trace
    if found is None:
        return None
    head = ["Layer", "Entries", "Active", "Kept explain", "Norm written"]
    head += [] if found.without else ["Entries’ effect", "Attention’s effect"]
    lead = (
        "Means over tokens; effects are those at the last token. Active are entries with a positive score; kept ones "
        "explain 1 − |rest| / |all| of what a layer’s entries write."
    )
    if not found.without:
        lead += f" {_sum(found)}"
    rows = [[str(one.layer), grouped(one.num_entries), *_numbers(one)] for one in found]
    body = html.paragraph(lead, kind="lead") + html.table(head, rows, text_columns=1)
    return Section("layers", "Each layer in numbers", body)


def trace_reading(found: Trace) -> list[Content]:
    """What fired, in one or two sentences."""
    shares = active_shares(found)
    said: list[Content] = [
        f"On average {percent(float(shares.mean()))} of the entries that a layer can read are active for a token."
    ]
    strongest = found.fired(-1, count=1)
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
    elif found.without:
        said.append(f" Direct effects on the logits are not defined: {found.without}.")
    return said


def trace_numbers(found: Trace) -> list[tuple[str, Content]]:
    """The numbers that head the page."""
    rows: list[tuple[str, Content]] = [
        ("Tokens", tag("span", str(len(found.tokens)), tag("small", f"{len(found.positions)} traced"))),
        ("Layers", str(len(found.layers))),
        ("Active entries", percent(float(active_shares(found).mean()))),
    ]
    if found.logits is not None:
        rows.append(("Logit", tag("span", f"{float(found.logits[-1]):.3g}", tag("small", "above the mean"))))
    return rows


_HEAD: Final = ("Entry", "Text, or tokens", "Score", "Threshold", "Weight", "Norm", "Effect")


def _row(one: Fired) -> list[Content]:
    numbers = (one.score, one.threshold, one.weight)
    effect = "" if one.effect is None else f"{one.effect:+.3g}"
    cells = [f"{value:+.3g}" for value in numbers] + [f"{one.norm:.3g}", effect]
    return [entry_name(one), entry_words(one, 90), *(cell.replace("-", "−").replace("+nan", "–") for cell in cells)]


def _map(found: Trace, table: Array, what: str, caption: str, without: str = "") -> Html:
    first = max(0, len(found.positions) - _WIDEST)
    rows = [str(one.layer) for one in found][::-1]  # what enters is below, what leaves above
    names = [found.token(row) for row in range(first, len(found.positions))]
    shown = table[::-1, first:]
    limit = float(np.abs(shown).max(initial=0.0))
    chart = bias_charts.map_chart(
        shown, np.ones(shown.shape, dtype=np.bool_), rows, names, limit, "layer", "token", what
    )
    said = f"norm, up to {limit:.3g}" if without else caption
    return html.figure(Html(chart), said, kind="natural")


def _numbers(one: LayerTrace) -> list[str]:
    active = float(one.active.double().mean()) / max(one.num_entries, 1)
    cells = [percent(active), percent(max(0.0, float(one.explained.mean()))), f"{float(one.output_norm.mean()):.3g}"]
    for effect in (one.effect, one.attention_effect):
        cells += [] if effect is None else [f"{float(effect[-1]):+.3g}".replace("-", "−")]
    return cells


def _sum(found: Trace) -> str:
    """The logit of the last token as a sum."""
    zero = 0.0
    entries = sum((float(one.effect[-1]) for one in found if one.effect is not None), zero)
    attention = sum((float(one.attention_effect[-1]) for one in found if one.attention_effect is not None), zero)
    terms = [("entries", entries), ("attention", attention)]
    for name, value in (
        ("embedding", found.embedding_effect),
        ("constants", found.constant_effect),
        ("layers not traced", found.rest_effect),
    ):
        if value is not None and float(value[-1]):
            terms.append((name, float(value[-1])))
    logit = 0.0 if found.logits is None else float(found.logits[-1])
    said = ", ".join(f"{name} {value:+.3g}" for name, value in terms).replace("-", "−")
    return f"The logit at the last token, {logit:.3g} above the mean of all tokens, is the sum of {said}."
