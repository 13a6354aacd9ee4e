"""From which entries a model reads: those that fired for a text, what they added to the next token's logit."""

from __future__ import annotations

from typing import Final

from attnflow._core.markup import grouped, percent, plural, token_label
from attnflow.knowledge.provenance import Trace
from attnflow.report import charts, html
from attnflow.report.html import Content, tag
from attnflow.report.part import Context, Part, Section
from attnflow.report.trace_chart import active_shares, entry_name, entry_words, trace_chart

_BARS: Final = 16
_ROWS: Final = 40
_PROMPT: Final = 400  # tokens of a prompt that are shown; of a longer one the last
_HEAD: Final = ("Entry", "Text, or tokens", "Score", "Threshold", "Weight", "Norm", "Effect")


def trace_part(trace: Trace, _: Context) -> Part:
    """The prompt, the strongest entries of its last token, what each layer did."""
    numbers: list[tuple[str, Content]] = [
        ("Tokens", tag("span", str(len(trace.tokens)), tag("small", f"{len(trace.positions)} traced"))),
        ("Layers", str(len(trace.layers))),
        ("Active entries", percent(float(active_shares(trace).mean()))),
    ]
    if trace.logits is not None:
        numbers.append(("Logit", tag("span", f"{float(trace.logits[-1]):.3g}", tag("small", "above the mean"))))
    sections = [_prompt(trace), _entries(trace), _maps(trace), _layers(trace)]
    source = [("Model", html.code(trace.model))]
    return Part(f"Entries that fired in {trace.model}", sections, _reading(trace), numbers, source)


def _prompt(trace: Trace) -> Section:
    """The text token by token, those that were traced marked, and what was asked about."""
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
    """The strongest entries of the last token, as bars and as a table."""
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
            "An entry is named by layer and id. Its words are its text, or the tokens that it promotes; “not”, those "
            "that it pushes down here, with a negative weight."
        )
    columns = [
        [entry_name(one) for one in strongest],
        [entry_words(one, 90) for one in strongest],
        *(
            html.numbers([getattr(one, name) for one in strongest], signed=True)
            for name in ("score", "threshold", "weight")
        ),
        html.numbers([one.norm for one in strongest]),
        html.numbers([float("nan") if one.effect is None else one.effect for one in strongest], signed=True),
    ]
    table = html.table(_HEAD, [list(cells) for cells in zip(*columns, strict=True)], text_columns=2)
    what = "Norms of contributions" if trace.without else "Direct effects of entries"
    chart = charts.in_page(lambda: trace_chart(trace, picture="entries", count=_BARS), what)
    return Section("entries", title, html.paragraph(lead, kind="lead") + chart + table)


def _maps(trace: Trace) -> Section:
    """Active entries and what they wrote, layers by tokens."""
    caption = "The first layer is at the top."
    if not trace.without:
        caption += " Blue raises the logit of the target, red lowers it."
    chart = charts.in_page(lambda: trace_chart(trace, picture="layers", title=" "), "Layers by tokens", caption)
    return Section("maps", "Layer by layer, token by token", chart)


def _layers(trace: Trace) -> Section:
    """Each layer in numbers."""
    lead = (
        "Means over tokens; effects are those at the last token. Active are entries with a positive score; kept ones "
        "explain 1 − |rest| / |all| of what a layer’s entries write."
    )
    layers = list(trace)
    head = ["Layer", "Entries", "Active", "Kept explain", "Norm written"]
    columns = [
        [str(one.layer) for one in layers],
        [grouped(one.num_entries) for one in layers],
        [_share(float(one.active.double().mean()) / max(one.num_entries, 1)) for one in layers],
        [_share(max(0.0, float(one.explained.mean()))) for one in layers],
        html.numbers([float(one.output_norm.mean()) for one in layers]),
    ]
    if not trace.without:
        lead += f" {_sum(trace)}"
        for name, effects in (
            ("Entries’ effect", [one.effect for one in layers]),
            ("Attention’s effect", [one.attention_effect for one in layers]),
        ):
            if any(effect is not None for effect in effects):
                head.append(name)
                values = [float("nan") if effect is None else float(effect[-1]) for effect in effects]
                columns.append(html.numbers(values, signed=True))
    table = html.table(head, [list(cells) for cells in zip(*columns, strict=True)], text_columns=1)
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
    """The logit of the last token as a sum."""
    zero = 0.0
    entries = sum((float(one.effect[-1]) for one in trace if one.effect is not None), zero)
    attention = sum((float(one.attention_effect[-1]) for one in trace if one.attention_effect is not None), zero)
    terms = [("entries", entries), ("attention", attention)]
    for name, value in (
        ("embedding", trace.embedding_effect),
        ("constants", trace.constant_effect),
        ("layers not traced", trace.rest_effect),
    ):
        if value is not None and float(value[-1]):
            terms.append((name, float(value[-1])))
    logit = 0.0 if trace.logits is None else float(trace.logits[-1])
    said = ", ".join(f"{name} {value:+.3g}" for name, value in terms).replace("-", "−")
    return f"The logit at the last token, {logit:.3g} above the mean of all tokens, is the sum of {said}."


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"
