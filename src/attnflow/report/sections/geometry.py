"""In which geometry models attend: symmetry and directionality, over layers and heads, beside published values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from attnflow._core.markup import grouped, plural
from attnflow.geometry import GeometryScores
from attnflow.geometry.summary import Quartiles, Summary
from attnflow.geometry.table import IGNORED
from attnflow.report import html, score_charts
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.score_charts import Series
from attnflow.report.score_figures import background, head_grid
from attnflow.report.subject import Section, Subject

_MAPS: Final = 24  # attentions whose heads are drawn


def scores(subject: Subject) -> Section | None:
    """Medians and quartiles of every model: in one plane, and as a table."""
    if not subject.geometry and not subject.unscored:
        return None
    lead = (
        "M = W_q^T W_k holds what a token looks for (rows) against what others offer (columns). Symmetry is 1 if "
        "M = M^T and −1 if M = −M^T. Directionality is negative where a few columns, the key’s side, have outstanding "
        f"norms, and positive where rows do. Ignored: {IGNORED}. {_readings(subject)}"
    )
    parts: list[Content] = [html.paragraph(lead, kind="lead")]
    parts += [
        html.note("bad", html.paragraph(code(model), f" was not scored: {reason}"))
        for model, reason in subject.unscored.items()
    ]
    if subject.geometry:
        parts += [_plane(subject), html.table(_HEAD, _rows(subject), text_columns=2)]
        parts += _remarks(subject)
    return Section("geometry", "Symmetry and directionality", html.join(parts))


def by_layer(subject: Subject) -> Section | None:
    """Both scores of the full matrix in each layer."""
    lines = series_of(subject)
    if not lines:
        return None
    charts = [
        html.figure(
            tag("div", Html(score_charts.layer_chart(lines, which, 510.0, 280.0)), class_="only-wide")
            + tag("div", Html(score_charts.layer_chart(lines, which, 350.0, 230.0)), class_="only-narrow")
        )
        for which in (0, 1)
    ]
    body = _key(lines) + tag("div", *charts, class_="halves")
    tables = [
        tag("details", tag("summary", f"Numbers of {line.label}"), html.table(_LAYER_HEAD, _layer_rows(line)))
        for line in lines
    ]
    return Section("layers", "Layer by layer", body + html.join(tables))


def by_head(subject: Subject) -> Section | None:
    """Both scores of each head in each layer, as maps."""
    groups = [(model, s) for model in subject.geometry for s in model.summaries if s.matrix == "head"]
    if not groups:
        return None
    lead = (
        "Each head has a matrix of its own, and the full matrix is their sum. Colour is the size of the score; each "
        "map has a scale of its own."
    )
    parts: list[Content] = [html.paragraph(lead, kind="lead")]
    for model, summary in groups[:_MAPS]:
        maps = [_map(model, summary, name) for name in ("symmetry", "directionality")]
        parts += [tag("h3", _name(model, summary)), tag("div", *maps, class_="halves")]
    if len(groups) > _MAPS:
        parts.append(html.paragraph(f"… and {grouped(len(groups) - _MAPS)} more.", kind="lead"))
    return Section("heads", "Head by head", html.join(parts))


def series_of(subject: Subject) -> list[Series]:
    """The full matrices of every model, tower and kind."""
    found: list[Series] = []
    for model in subject.geometry:
        for summary in model.summaries:
            if summary.matrix == "all":
                rows = [
                    row for row in model if row.head == "all" and (row.tower, row.kind) == (summary.tower, summary.kind)
                ]
                values = tuple(row.symmetry for row in rows), tuple(row.directionality for row in rows)
                layers = tuple(row.layer for row in rows)
                name = _name(model, summary)
                found.append(Series(name, summary.symmetry, summary.directionality, layers, values))
    return found


def geometry_reading(models: Sequence[GeometryScores]) -> list[Content]:
    """What the scores say, in one or two sentences."""
    known = [
        (model, s)
        for model in models
        for s in model.summaries
        if s.matrix == "all" and s.kind == "self" and not math.isnan(s.symmetry.median)
    ]
    if not known:
        return ["No model has a full matrix of self-attention that could be scored."]
    if len(known) == 1:
        (model, summary) = known[0]
        d = summary.directionality.median
        side = "no side has more" if d == 0 else "the key’s side has more" if d < 0 else "the query’s side has more"
        return [
            f"Over {plural(summary.count, 'layer')} of ",
            code(model.model),
            f", the median symmetry is {_text(summary.symmetry.median)} and the median directionality {_text(d)}: "
            f"{side} of the outstanding norms.",
        ]
    first = max(known, key=lambda pair: pair[1].symmetry.median)
    last = min(known, key=lambda pair: pair[1].symmetry.median)
    return [
        f"Of {len(known)} stacks of self-attention, ",
        code(_name(*first)),
        f" is the most symmetric ({_text(first[1].symmetry.median)}) and ",
        code(_name(*last)),
        f" the least ({_text(last[1].symmetry.median)}).",
    ]


def geometry_numbers(model: GeometryScores) -> list[tuple[str, Content]]:
    """The key numbers of one model: medians of its full matrices."""
    found: list[tuple[str, Content]] = []
    for summary in model.summaries:
        if summary.matrix == "all":
            where = tag("small", summary.what if _several(model) else f"median of {plural(summary.count, 'layer')}")
            found.append(("Symmetry", tag("span", _text(summary.symmetry.median), where)))
            found.append(("Directionality", tag("span", _text(summary.directionality.median), where)))
    return found


_HEAD: Final = ("model", "matrices", "symmetry", "quartiles", "directionality", "quartiles")
_LAYER_HEAD: Final = ("layer", "symmetry", "directionality")


def _plane(subject: Subject) -> Html:
    lines = series_of(subject)
    comparable = all((model.gamma, model.mode) == (2.0, "excess") for model in subject.geometry)
    known = background() if comparable else ()
    dots = [(record.symmetry.median, record.directionality.median) for record in known]
    charts = tag("div", Html(score_charts.plane_chart(lines, dots, 760.0, 400.0)), class_="only-wide")
    charts += tag("div", Html(score_charts.plane_chart(lines, dots, 350.0, 300.0)), class_="only-narrow")
    caption = "Medians over layers; whiskers span the quartiles."
    if known:
        caption += f" Grey: {len(known)} published records of other models, without those known to be wrong."
    return _key(lines) + html.figure(charts, caption)


def _key(lines: list[Series]) -> Html:
    items = [
        tag("li", tag("span", class_=f"swatch-series-{index % score_charts.COLOURS}"), line.label)
        for index, line in enumerate(lines)
    ]
    return tag("ul", *items, class_="keyline")


def _rows(subject: Subject) -> list[list[Content]]:
    rows: list[list[Content]] = []
    for model in subject.geometry:
        for index, summary in enumerate(model.summaries):
            matrices = plural(summary.count, "layer" if summary.matrix == "all" else "head")
            where = f"{summary.what}: {matrices}" if _several(model) else matrices
            cells = [*_cells(summary.symmetry), *_cells(summary.directionality)]
            rows.append(["" if index else code(model.model), where, *cells])
        for comparison in model.compare():
            published = comparison.published
            where = ", ".join(filter(None, ("published", published.tower, plural(published.num_layers, "layer"))))
            rows.append(["", tag("i", where), *_cells(published.symmetry), *_cells(published.directionality)])
    return rows


def _remarks(subject: Subject) -> list[Html]:
    """By model: flags, remarks of the reader, and why published values differ."""
    found: list[Html] = []
    for model in subject.geometry:
        flags = Counter(flag for row in model for flag in row.flags)
        lines = [f"{plural(n, 'matrix', 'matrices')} flagged “{flag}”." for flag, n in flags.items()]
        lines += [f"{note[:1].upper()}{note[1:]}." for note in model.notes]
        for comparison in model.compare():
            if comparison.reasons:
                record = comparison.published
                lines.append(f"Against {record.model} as published: {'; '.join(comparison.reasons)}.")
        if lines:
            found.append(html.note("neutral", html.paragraph(code(model.model)), *map(html.paragraph, lines)))
    return found


def _map(model: GeometryScores, summary: Summary, name: str) -> Html:
    rows = [row for row in model if (row.tower, row.kind) == (summary.tower, summary.kind)]
    grid = head_grid(rows, name)
    limit = float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0
    charts = tag("div", Html(score_charts.head_map(grid, limit, name, 510.0)), class_="only-wide")
    charts += tag("div", Html(score_charts.head_map(grid, limit, name, 350.0)), class_="only-narrow")
    scale = tag(
        "span",
        tag("span", class_="swatch-negative"),
        f"−{limit:.2f}",
        tag("span", class_="swatch-positive"),
        f"+{limit:.2f}",
        class_="scale",
    )
    return html.figure(charts, tag("span", f"{name} ", scale))


def _layer_rows(line: Series) -> list[list[Content]]:
    symmetry, directionality = line.by_layer
    return [[str(layer), _text(s), _text(d)] for layer, s, d in zip(line.layers, symmetry, directionality, strict=True)]


def _cells(quartiles: Quartiles) -> tuple[str, str]:
    if math.isnan(quartiles.median):
        return "none", ""
    return _text(quartiles.median), f"{_text(quartiles.q25)} to {_text(quartiles.q75)}"


def _text(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.3f}".replace("-", "−")


def _readings(subject: Subject) -> str:
    readings = sorted({f"gamma {model.gamma:g} and mode {model.mode}" for model in subject.geometry})
    return f"Directionality has {', '.join(readings)}." if readings else ""


def _several(model: GeometryScores) -> bool:
    return len({(summary.tower, summary.kind) for summary in model.summaries}) > 1


def _name(model: GeometryScores, summary: Summary) -> str:
    return f"{model.model}: {summary.what}" if _several(model) else model.model
