"""In which geometry models attend: symmetry and directionality beside published values, on a page and as text."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from attnflow._core.markup import aligned, plural
from attnflow.geometry.summary import Quartiles, Summary
from attnflow.geometry.table import IGNORED, GeometryScores
from attnflow.report import charts, html
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.page import Context, Part, Section
from attnflow.report.score_chart import background, has_several, name_of, rows_of, score_chart

_MAPS: Final = 24  # models whose heads are drawn
_HEAD: Final = ("model", "matrices", "symmetry", "quartiles", "directionality", "quartiles")
_LAYER_HEAD: Final = ("layer", "symmetry", "directionality")

Models = Sequence[GeometryScores]


def scores_part(models: Models, _: Context) -> Part:
    """The scores of one or several models: in one plane, by layer, by head."""
    sections = [_scores(models), _by_layer(models)]
    if any(one.head != "all" for model in models for one in model):
        sections.append(_by_head(models))
    numbers: list[tuple[str, Content]] = []
    for summary in (s for s in models[0].summaries if s.matrix == "all") if len(models) == 1 else ():
        where = tag("small", summary.what if has_several(models[0]) else f"median of {plural(summary.count, 'layer')}")
        numbers.append(("Symmetry", tag("span", _text(summary.symmetry.median), where)))
        numbers.append(("Directionality", tag("span", _text(summary.directionality.median), where)))
    title = f"Geometry of {models[0].model if len(models) == 1 else plural(len(models), 'model')}"
    source = [("Model", code(model.model)) for model in models]
    return Part(title, sections, _reading(models), numbers, source)


def _scores(models: Models) -> Section:
    """Medians and quartiles of every model: in planes of those that were scored alike, and as a table."""
    readings = sorted({(model.gamma, model.mode) for model in models})
    words = ", ".join(f"gamma {gamma:g} and mode {mode}" for gamma, mode in readings)
    lead = (
        "M = W_q^T W_k holds what a token looks for (rows) against what others offer (columns). Symmetry is 1 if "
        "M = M^T and −1 if M = −M^T. Directionality is negative where a few columns, the key’s side, have outstanding "
        f"norms, and positive where rows do. Ignored: {IGNORED}. Directionality has {words}."
    )
    caption = (
        "Crosses: medians over layers with their quartiles. The grey band is that of random weights of this width."
    )
    parts: list[Content] = [html.paragraph(lead, kind="lead")]
    for reading in readings:
        alike = [model for model in models if (model.gamma, model.mode) == reading]
        behind = reading == (2.0, "excess")
        said = f" Open marks: {len(background())} published records, without those known to be wrong." if behind else ""
        title = "Symmetry and directionality"
        parts.append(charts.in_page(partial(score_chart, *alike, title=" "), title, caption + said))
    parts.append(html.table(_HEAD, _rows(models), text_columns=2))
    return Section("geometry", "Symmetry and directionality", html.join([*parts, *_remarks(models)]))


def _by_layer(models: Models) -> Section:
    """Both scores of the full matrix in each layer."""
    parts: list[Content] = []
    for reading in sorted({(model.gamma, model.mode) for model in models}):
        alike = [model for model in models if (model.gamma, model.mode) == reading]
        draw = partial(score_chart, *alike, picture="layers", title=" ")
        parts.append(charts.in_page(draw, "Scores by layer", "Grey: where random weights of this width would lie."))
    for model in models:
        for summary in model.summaries:
            if summary.matrix == "all":
                name = f"Numbers of {name_of(model, summary)}"
                rows = [
                    [str(row.layer), _text(row.symmetry), _text(row.directionality)] for row in rows_of(model, summary)
                ]
                parts.append(tag("details", tag("summary", name), html.table(_LAYER_HEAD, rows)))
    return Section("layers", "Layer by layer", html.join(parts))


def _by_head(models: Models) -> Section:
    """Both scores of each head in each layer, as maps."""
    scored = [model for model in models if any(one.head != "all" for one in model)]
    lead = (
        "Each head has a matrix of its own, and the full matrix is their sum. Blue is positive, red negative; each "
        "map has a scale of its own, with zero in the middle."
    )
    parts: list[Content] = [html.paragraph(lead, kind="lead")]
    for model in scored[:_MAPS]:
        draw = partial(score_chart, model, picture="heads")
        parts.append(charts.in_page(draw, f"Scores of each head of {model.model}"))
    return Section("heads", "Head by head", html.join([*parts, html.rest(len(scored) - _MAPS)]))


def _reading(models: Models) -> list[Content]:
    scored = [
        (model, s)
        for model in models
        for s in model.summaries
        if s.matrix == "all" and s.kind == "self" and not math.isnan(s.symmetry.median)
    ]
    if not scored:
        return ["No model has a full matrix of self-attention that could be scored."]
    if len(scored) == 1:
        (model, summary) = scored[0]
        d = summary.directionality.median
        side = "no side has more" if d == 0 else "the key’s side has more" if d < 0 else "the query’s side has more"
        return [
            f"Over {plural(summary.count, 'layer')} of ",
            code(model.model),
            f", the median symmetry is {_text(summary.symmetry.median)} and the median directionality {_text(d)}: "
            f"{side} of the outstanding norms.",
        ]
    first = max(scored, key=lambda pair: pair[1].symmetry.median)
    last = min(scored, key=lambda pair: pair[1].symmetry.median)
    return [
        f"Of {len(scored)} stacks of self-attention, ",
        code(name_of(*first)),
        f" is the most symmetric ({_text(first[1].symmetry.median)}) and ",
        code(name_of(*last)),
        f" the least ({_text(last[1].symmetry.median)}).",
    ]


def _rows(models: Models) -> list[list[Content]]:
    rows: list[list[Content]] = []
    for model in models:
        for index, summary in enumerate(model.summaries):
            matrices = plural(summary.count, "layer" if summary.matrix == "all" else "head")
            where = f"{summary.what}: {matrices}" if has_several(model) else matrices
            cells = [*_cells(summary.symmetry), *_cells(summary.directionality)]
            rows.append(["" if index else code(model.model), where, *cells])
        for comparison in model.compare():
            published = comparison.published
            where = ", ".join(filter(None, ("published", published.tower, plural(published.num_layers, "layer"))))
            rows.append(["", tag("i", where), *_cells(published.symmetry), *_cells(published.directionality)])
    return rows


def _remarks(models: Models) -> list[Html]:
    """By model: flags, remarks of the reader, and why published values differ."""
    remarks: list[Html] = []
    for model in models:
        flags = Counter(flag for row in model for flag in row.flags)
        lines = [f"{plural(n, 'matrix', 'matrices')} flagged “{flag}”." for flag, n in flags.items()]
        lines += [f"{note[:1].upper()}{note[1:]}." for note in model.notes]
        for comparison in model.compare():
            if comparison.reasons:
                record = comparison.published
                lines.append(f"Against {record.model} as published: {'; '.join(comparison.reasons)}.")
        if lines:
            remarks.append(html.note("neutral", html.paragraph(code(model.model)), *map(html.paragraph, lines)))
    return remarks


def _cells(quartiles: Quartiles) -> tuple[str, str]:
    if math.isnan(quartiles.median):
        return "none", ""
    return _text(quartiles.median), f"{_text(quartiles.q25)} to {_text(quartiles.q75)}"


def _text(value: float) -> str:
    return _score(value).replace("-", "−")


def overview(models: Sequence[GeometryScores], width: int = 110) -> str:
    """Medians and quartiles of several models, what they leave out, how they compare.

    A table that is wider than the terminal becomes a list.
    """
    rows: list[list[str]] = []
    for scores in models:
        for index, one in enumerate(scores.summaries):
            quartiles = ("none" if math.isnan(q.median) else str(q) for q in (one.symmetry, one.directionality))
            rows.append(["" if index else scores.model, _matrices(scores, one), *quartiles])
    head = ["model", "matrices", "symmetry", "directionality"]
    table = aligned([head, *rows], left=range(4))
    if max(map(len, table.splitlines())) > width:
        lines: list[str] = []
        for model, matrices, symmetry, directionality in rows:
            lines += [model] if model else []
            lines += [f"  {matrices}", f"    symmetry        {symmetry}", f"    directionality  {directionality}"]
        table = "\n".join(lines)
    readings = sorted({f"gamma {scores.gamma:g} and mode {scores.mode}" for scores in models})
    remarks = [f"Median [quartiles]. Directionality has {', '.join(readings)}. Ignored: {IGNORED}."]
    for scores in models:
        remarks += [f"{scores.model}: {_flags(scores, one)}" for one in scores.summaries if one.flagged]
        remarks += [f"{scores.model}: {note}" for note in scores.notes]
        remarks += [str(comparison) for comparison in scores.compare()]
    wrapped = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in remarks]
    return "\n".join([table, "", *wrapped])


def details(scores: GeometryScores, *, heads: bool = True, width: int = 110) -> str:
    """Every row of one model as a table; without its heads if they are not wanted."""
    counted = width >= 80  # there is room for the counts of outstanding rows and columns
    several = has_several(scores)
    head = [*(["attention"] if several else []), "layer", "head", "symmetry", "directionality", "norm"]
    table = [[*head, *(["rows", "columns"] if counted else []), "flags"]]
    for row in scores if heads else (row for row in scores if row.head == "all"):
        where = [", ".join(filter(None, (row.tower, row.kind)))] if several else []
        numbers = (_score(row.symmetry), _score(row.directionality), f"{row.norm:.4g}")
        counts = [str(row.outlier_rows), str(row.outlier_columns)] if counted else []
        table.append([*where, str(row.layer), str(row.head), *numbers, *counts, ", ".join(row.flags)])
    words = len(table[0]) - (6 if counted else 4)
    lines = aligned(table, left=[*range(words), len(table[0]) - 1])
    return "\n".join([scores.model, "", lines, *(["", "rows, columns: how many have an outstanding norm"] * counted)])


def _matrices(scores: GeometryScores, summary: Summary) -> str:
    count = f"{summary.count} {'layers' if summary.matrix == 'all' else 'heads'}"
    return f"{summary.what}: {count}" if has_several(scores) else count


def _flags(scores: GeometryScores, summary: Summary) -> str:
    counts = Counter(flag for row in rows_of(scores, summary) for flag in row.flags)
    listed = ", ".join(f"{count} flagged {flag!r}" for flag, count in counts.items())
    return f"of {_matrices(scores, summary)}, {listed}"


def _score(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.3f}"
