"""Geometry of attention: symmetry and directionality beside published values, on a page and as charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, cast

import numpy as np

from attnflow._core.markup import plural, shorten
from attnflow.geometry.published import PublishedScores, Quartiles, Summary, published_scores
from attnflow.geometry.table import GeometryScores, MatrixScores, chance_bands
from attnflow.report import charts, html
from attnflow.report.charts import SERIES, SOFT, Figure, blank, chart, heat_map, literal
from attnflow.report.displays import describes, draws
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.page import Context, PagePart, Section

_MAPS: Final = 24  # models whose heads are drawn
_PUBLISHED: Final = (2.0, "excess")  # gamma and mode of the published records
_HEAD: Final = ("model", "matrices", "symmetry", "quartiles", "chance", "directionality", "quartiles", "chance")
_LAYER_HEAD: Final = ("layer", "symmetry", "directionality")

Models = Sequence[GeometryScores]
Picture = Literal["plane", "layers", "heads"]
_MARKERS: Final = "osD^vPX*<>"
SCORES: Final = ("symmetry", "directionality")
_MODALITIES: Final = {"language-models": "o", "vision-models": "^", "audio-models": "s"}
_BANDS: Final = 4  # different bands of chance that a legend names


@describes(GeometryScores, together=True)
def scores_part(models: Models, _: Context) -> PagePart:
    sections = [_scores(models), _by_layer(models)]
    if any(one.head != "all" for model in models for one in model):
        sections.append(_by_head(models))
    numbers: list[tuple[str, Content]] = []
    for summary in (s for s in models[0].summaries if s.matrix == "all") if len(models) == 1 else ():
        where = tag("small", summary.what if has_several(models[0]) else f"median of {plural(summary.count, 'layer')}")
        numbers += [(name.capitalize(), tag("span", _text(getattr(summary, name).median), where)) for name in SCORES]
    title = f"Geometry of {models[0].model if len(models) == 1 else plural(len(models), 'model')}"
    source = [("Model", code(model.model)) for model in models]
    return PagePart(title, sections, _reading(models), numbers, source)


def _scores(models: Models) -> Section:
    words = ", ".join(f"gamma {gamma:g} and mode {mode}" for gamma, mode in _by_reading(models))
    kinds = {scores.ignored: [one.model for one in models if one.ignored == scores.ignored] for scores in models}
    ignored = "; ".join(f"{what} ({', '.join(names)})" if len(kinds) > 1 else what for what, names in kinds.items())
    lead = (
        "M = W_q^T W_k holds what a token looks for (rows) against what others offer (columns). Symmetry is 1 if "
        "M = M^T and −1 if M = −M^T. Directionality is negative where a few columns, the key’s side, have outstanding "
        f"norms, and positive where rows do. Ignored: {ignored}. Directionality has {words}."
    )
    caption = (
        "Crosses: medians over layers with their quartiles. The bands hold 19 of 20 models with random weights of the "
        "same width and number of layers."
    )
    parts: list[Content] = [html.paragraph(lead, kind="lead")]
    for reading, alike in _by_reading(models).items():
        behind = f" Open marks: {len(background())} published records, of stored weights, without known faults."
        shown = caption + (behind if reading == _PUBLISHED else "")
        parts.append(charts.in_page(partial(score_chart, *alike, title=" "), "Symmetry and directionality", shown))
    parts.append(html.table(_HEAD, _rows(models), text_columns=2))
    return Section("geometry", "Symmetry and directionality", html.join([*parts, *_remarks(models)]))


def _by_reading(models: Models) -> dict[tuple[float, str], list[GeometryScores]]:
    readings: dict[tuple[float, str], list[GeometryScores]] = {}
    for model in sorted(models, key=lambda model: (model.gamma, model.mode)):
        readings.setdefault((model.gamma, model.mode), []).append(model)
    return readings


def _by_layer(models: Models) -> Section:
    parts: list[Content] = []
    for alike in _by_reading(models).values():
        draw = partial(score_chart, *alike, picture="layers", title=" ")
        parts.append(charts.in_page(draw, "Scores by layer", "The bands hold 19 of 20 random layers of this width."))
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
    scored = [model for model in models if any(one.head != "all" for one in model)]
    lead = (
        "Each head has a matrix of its own, and the full matrix is their sum. Blue is positive, orange negative; each "
        "map has a scale of its own, with zero in the middle."
    )
    parts: list[Content] = [html.paragraph(lead, kind="lead")]
    for model in scored[:_MAPS]:
        draw = partial(score_chart, model, picture="heads")
        parts.append(charts.in_page(draw, f"Scores of each head of {model.model}"))
    return Section("heads", "Head by head", html.join([*parts, html.rest(len(scored) - _MAPS)]))


def _reading(models: Models) -> list[Content]:
    scored = [(model, summary) for model, summary in _stacks(models) if summary.kind == "self"]
    if not scored:
        return ["No model has a full matrix of self-attention that could be scored."]
    if len(scored) == 1:
        return [_verdict(*scored[0])]
    known = [(median.directionality.median, bands) for model, median in scored if (bands := model.chance(median))]
    beyond = sum(abs(median) > bands["directionality"][1] for median, bands in known)
    directed = f" {beyond or 'None'} of {len(known)} have a directionality beyond chance." if known else ""
    first = max(scored, key=lambda pair: pair[1].symmetry.median)
    last = min(scored, key=lambda pair: pair[1].symmetry.median)
    return [
        f"Of {len(scored)} stacks of self-attention, ",
        code(name_of(*first)),
        f" is the most symmetric ({_text(first[1].symmetry.median)}) and ",
        code(name_of(*last)),
        f" the least ({_text(last[1].symmetry.median)}).{directed}",
    ]


def _stacks(models: Models) -> list[tuple[GeometryScores, Summary]]:
    full = [(scores, summary) for scores in models for summary in scores.summaries if summary.matrix == "all"]
    return [(scores, summary) for scores, summary in full if not math.isnan(summary.symmetry.median)]


def _verdict(scores: GeometryScores, summary: Summary) -> str:
    medians = {name: getattr(summary, name).median for name in SCORES}
    values = ", ".join(f"{name} {_text(median)}" for name, median in medians.items())
    verdict = f"{values.capitalize()} (median of {plural(summary.count, 'layer')})."
    bands = scores.chance(summary)
    if bands is None:
        return verdict
    beyond = [name for name, median in medians.items() if not bands[name][0] <= median <= bands[name][1]]
    if len(beyond) == 2:
        verdict += " Random weights would hardly give either."
    elif beyond:
        other = next(name for name in SCORES if name not in beyond)
        verdict += f" Random weights would hardly give this {beyond[0]}; this {other} is within chance."
    else:
        verdict += " Both are within chance: random weights give such values too."
    if "directionality" in beyond:
        side = "key" if medians["directionality"] < 0 else "query"
        verdict += f" The {side}’s side has more of the outstanding norms."
    return verdict


def _rows(models: Models) -> list[list[Content]]:
    rows: list[list[Content]] = []
    for model in models:
        for index, summary in enumerate(model.summaries):
            matrices = plural(summary.count, "layer" if summary.matrix == "all" else "head")
            where = f"{summary.what}: {matrices}" if has_several(model) else matrices
            bands = model.chance(summary) or {}
            cells = [cell for name in SCORES for cell in (*_cells(getattr(summary, name)), _interval(bands.get(name)))]
            rows.append(["" if index else code(model.model), where, *cells])
        for comparison in model.compare():
            published = comparison.published
            where = ", ".join(filter(None, ("published", published.tower, plural(published.num_layers, "layer"))))
            cells = [cell for name in SCORES for cell in (*_cells(getattr(published, name)), "")]
            rows.append(["", tag("i", where), *cells])
    return rows


def _remarks(models: Models) -> list[Html]:
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
    return _text(quartiles.median), _interval((quartiles.q25, quartiles.q75))


def _interval(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"{_text(bounds[0])} to {_text(bounds[1])}"


def _text(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.3f}".replace("-", "−")


@draws(GeometryScores)
@chart
def score_chart(
    scores: GeometryScores, *others: GeometryScores, picture: Picture = "plane", title: str | None = None
) -> Figure:
    """The bands hold 19 of 20 models, or single layers, of random weights of the same width."""
    if picture not in ("plane", "layers", "heads"):
        raise ValueError(f'picture must be "plane", "layers" or "heads", got {picture!r}')
    if picture == "heads":
        if others:
            raise ValueError('a heat map shows one model: call figure(..., picture="heads") of each')
        return _heads(scores, title)
    return (_plane if picture == "plane" else _layers)((scores, *others), title)


def _plane(models: Sequence[GeometryScores], title: str | None) -> Figure:
    reading = _same_reading(models)
    figure = blank(7.2, 4.8)
    axes = figure.add_subplot()
    axes.axhline(0, color=SOFT, linewidth=0.6, zorder=0)
    axes.axvline(0, color=SOFT, linewidth=0.6, zorder=0)
    stacks = _stacks(models)
    single = [1] if len(stacks) == 1 else []  # whose layers are shown as well
    _bands({"symmetry": axes.axvspan, "directionality": axes.axhspan}, stacks, reading[1], [*single, 0])
    if reading == _PUBLISHED:
        for modality, mark in _MODALITIES.items():
            records = [record for record in background() if record.modality == modality]
            x, y = ([getattr(record, name).median for record in records] for name in SCORES)
            label = f"published, {modality.removesuffix('-models')} ({len(records)})"
            axes.scatter(x, y, s=11, marker=mark, color="none", edgecolors=SOFT, alpha=0.5, linewidths=0.7, label=label)
    if len(stacks) == 1:
        _numbered(axes, *stacks[0])
    for index, (scores, summary) in enumerate(stacks):
        whiskers = {
            f"{axis}err": [[abs(q.median - q.q25)], [abs(q.q75 - q.median)]]
            for axis, q in (("x", summary.symmetry), ("y", summary.directionality))
        }
        look = _style(index) | {"linestyle": "none", "markersize": 7, "capsize": 2.5, "elinewidth": 1.1, "zorder": 3}
        place = summary.symmetry.median, summary.directionality.median
        axes.errorbar(*place, **whiskers, **look, label=_label(scores, summary))
    axes.set_xlabel("symmetry (median and quartiles over layers)")
    axes.set_ylabel(f"directionality ({reading_words(reading)})")
    axes.set_title(literal(title or _title(models, "symmetry and directionality")))
    _legend(axes)
    return figure


def _numbered(axes: Any, scores: GeometryScores, summary: Summary) -> None:
    rows = [row for row in rows_of(scores, summary) if not math.isnan(row.symmetry)]
    x, y, layers = ([getattr(row, name) for row in rows] for name in (*SCORES, "layer"))
    look = {"s": 26, "zorder": 2, "edgecolors": SOFT, "linewidths": 0.5, "label": "layers, by number"}
    dots = axes.scatter(x, y, c=layers, cmap="viridis", **look)
    for row in rows:
        place = {"xytext": (3.5, 2.5), "textcoords": "offset points"}
        axes.annotate(str(row.layer), (row.symmetry, row.directionality), fontsize=7, **place)
    bar = axes.figure.colorbar(dots, ax=axes, pad=0.02, fraction=0.03, label="layer")
    bar.locator.set_params(integer=True)
    bar.outline.set_visible(False)


def _layers(models: Sequence[GeometryScores], title: str | None) -> Figure:
    reading = _same_reading(models)
    figure = blank(9.0, 3.6)
    panels = figure.subplots(1, 2)
    lines = [(scores, s) for scores in models for s in scores.summaries if s.matrix == "all"]
    _bands({name: axes.axhspan for name, axes in zip(SCORES, panels, strict=True)}, lines, reading[1], [1])
    for name, axes in zip(SCORES, panels, strict=True):
        axes.axhline(0, color=SOFT, linewidth=0.6, zorder=0)
        for index, (scores, summary) in enumerate(lines):
            rows = rows_of(scores, summary)
            look = _style(index) | {"markersize": 4, "linewidth": 1.4, "label": _label(scores, summary)}
            axes.plot([row.layer for row in rows], [getattr(row, name) for row in rows], **look)
        axes.set_xlabel("layer")
        axes.set_ylabel(name if name == "symmetry" else f"{name} ({reading_words(reading)})")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(literal(title or _title(models, "scores by layer")))
    _legend(panels[1])
    return figure


def _heads(scores: GeometryScores, title: str | None) -> Figure:
    groups = [summary for summary in scores.summaries if summary.matrix == "head"]
    if not groups:
        raise ValueError(f"{scores.model} was scored without its heads: call score(..., per_head=True)")
    grids = [[head_grid(rows_of(scores, summary), name) for name in SCORES] for summary in groups]
    figure = blank(9.0, sum(min(9.0, max(1.6, 0.16 * len(pair[0]))) + 0.9 for pair in grids) + 0.3)
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for summary, row, pair in zip(groups, panels, grids, strict=True):
        for name, axes, grid in zip(SCORES, row, pair, strict=True):
            limit = float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0
            heat_map(axes, np.ma.masked_invalid(grid), limit, up=True)
            axes.set_facecolor("0.85")
            axes.set(xlabel="head", ylabel="layer")
            axes.set_title(name if len(groups) == 1 else f"{name}, {summary.what}")
            for axis in (axes.xaxis, axes.yaxis):
                axis.get_major_locator().set_params(integer=True)
    reading = reading_words((scores.gamma, scores.mode))
    figure.suptitle(literal(title or f"{shorten(scores.model, 70)} (directionality: {reading})"))
    return figure


def head_grid(rows: Sequence[MatrixScores], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns one score as [layers, heads], NaN where a layer has no such head."""
    grid = np.full((1 + max(row.layer for row in rows), 1 + max(int(row.head) for row in rows)), math.nan)
    for row in rows:
        grid[row.layer, int(row.head)] = getattr(row, name)
    return grid


def background() -> tuple[PublishedScores, ...]:
    return tuple(record for record in published_scores() if not record.fault and record.kind == "self")


def _bands(
    spans: Mapping[str, Any], stacks: Sequence[tuple[GeometryScores, Summary]], mode: str, counts: Sequence[int]
) -> None:
    """Draws the bands of chance of each stack: of the median over `counts` of its layers, 0 for all of them.

    A band has its first stack's colour, or is grey where all stacks share it.
    """
    bands: dict[tuple[int, int], str] = {}
    for index, (scores, summary) in enumerate(stacks):
        width, layers = scores.extent(summary)
        for count in counts if width else ():
            bands.setdefault((width, count or layers), _style(index)["color"])
    same_width = len({width for width, _ in bands}) == 1
    for index, ((width, count), colour) in enumerate(bands.items()):
        label = f"chance, {'one layer' if count == 1 else f'median of {count} layers'} of width {width}"
        if len(bands) > _BANDS:
            label = "" if index else "chance, in each model’s colour"
        colour = SOFT if len(bands) == 1 or (same_width and count == 1) else colour
        look = {"facecolor": (colour, 0.12), "edgecolor": (colour, 0.55), "linewidth": 0.6, "zorder": 0}
        for name, bounds in chance_bands(width, cast("Literal['excess', 'norm']", mode), count).items():
            spans[name](*bounds, **look, label=label if name == "directionality" else "")


def _same_reading(models: Sequence[GeometryScores]) -> tuple[float, str]:
    readings = {(scores.gamma, scores.mode) for scores in models}
    if len(readings) != 1:
        what = " and ".join(reading_words(reading) for reading in sorted(readings))
        raise ValueError(f"expected models with one reading of directionality, got {what}; score them alike")
    return readings.pop()


def rows_of(scores: GeometryScores, summary: Summary) -> list[MatrixScores]:
    group = (summary.tower, summary.kind, summary.matrix == "all")
    return [row for row in scores if (row.tower, row.kind, row.head == "all") == group]


def has_several(scores: GeometryScores) -> bool:
    """Tells whether a model has more than one kind of attention, so that each is named."""
    return len({(row.tower, row.kind) for row in scores}) > 1


def name_of(scores: GeometryScores, summary: Summary) -> str:
    return f"{scores.model}: {summary.what}" if has_several(scores) else scores.model


def reading_words(reading: tuple[float, str]) -> str:
    return f"{reading[1]}, gamma {reading[0]:g}"


def _title(models: Sequence[GeometryScores], what: str) -> str:
    return f"{shorten(models[0].model, 60)}: {what}" if len(models) == 1 else f"{len(models)} models: {what}"


def _label(scores: GeometryScores, summary: Summary) -> str:
    return literal(shorten(name_of(scores, summary), 44))


def _style(index: int) -> dict[str, Any]:
    return {"color": SERIES[index % len(SERIES)], "marker": _MARKERS[index // len(SERIES) % len(_MARKERS)]}


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = 3 if len(labels) <= 24 else 4
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(1, len(labels))))
