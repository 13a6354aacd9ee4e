"""Charts of scores: models in the plane of symmetry and directionality, scores by layer, scores by head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from attnflow._core.markup import shorten
from attnflow.geometry.published import PublishedScores, published_scores
from attnflow.geometry.summary import Summary
from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.report.charts import SERIES, SOFT, blank, chart, heat_map, literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Literal["plane", "layers", "heads"]

_MARKERS: Final = "osD^vPX*<>"
_SCORES: Final = ("symmetry", "directionality")
_MODALITIES: Final = {"language-models": "o", "vision-models": "^", "audio-models": "s"}
# One matrix of random weights of width d: symmetry 1/d +- 1.4/d, directionality 0 +- this / sqrt(d).
_SPREAD: Final = {"excess": 4.7, "norm": 3.2}


@chart
def score_chart(
    scores: GeometryScores, *others: GeometryScores, picture: Picture = "plane", title: str | None = None
) -> Figure:
    """The scores of models: in a plane, by layer, or (of one model) by head.

    "plane" is symmetry against directionality: each layer of a single model, coloured and numbered, or the medians and
    quartiles of several; the published records behind. The grey band is that of chance: random weights of the same
    width lie in it 19 times of 20.
    """
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
    width, chance = _chance(models)
    if width:
        grey = {"color": SOFT, "alpha": 0.13, "linewidth": 0, "zorder": 0}
        bands = chance_bands(width, reading[1])
        axes.axhspan(*bands["directionality"], **grey, label=chance)
        axes.axvspan(*bands["symmetry"], **grey)
    if reading == (2.0, "excess"):
        for modality, mark in _MODALITIES.items():
            records = [record for record in background() if record.modality == modality]
            x, y = ([getattr(record, name).median for record in records] for name in _SCORES)
            label = f"published, {modality.removesuffix('-models')} ({len(records)})"
            axes.scatter(x, y, s=11, marker=mark, color="none", edgecolors=SOFT, alpha=0.5, linewidths=0.7, label=label)
    stacks = [
        (scores, one)
        for scores in models
        for one in scores.summaries
        if one.matrix == "all" and not math.isnan(one.symmetry.median)
    ]
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
    axes.set_ylabel(f"directionality ({_words(reading)})")
    axes.set_title(literal(title or _title(models, "symmetry and directionality")))
    _legend(axes)
    return figure


def _numbered(axes: Any, scores: GeometryScores, summary: Summary) -> None:
    """Every layer of the one model, coloured from the first to the last, with its number."""
    rows = [row for row in rows_of(scores, summary) if not math.isnan(row.symmetry)]
    x, y, layers = ([getattr(row, name) for row in rows] for name in (*_SCORES, "layer"))
    look = {"s": 26, "zorder": 2, "edgecolors": SOFT, "linewidths": 0.5, "label": "layers, by number"}
    dots = axes.scatter(x, y, c=layers, cmap="viridis", **look)
    for row in rows:
        place = {"xytext": (3.5, 2.5), "textcoords": "offset points"}
        axes.annotate(str(row.layer), (row.symmetry, row.directionality), fontsize=7, **place)
    bar = axes.figure.colorbar(dots, ax=axes, pad=0.02, fraction=0.03, label="layer")
    bar.ax.invert_yaxis()  # layer 0 at the top, as everywhere
    bar.locator.set_params(integer=True)
    bar.outline.set_visible(False)


def _layers(models: Sequence[GeometryScores], title: str | None) -> Figure:
    """Both scores of the full matrix by layer, a line for each attention of each model."""
    reading = _same_reading(models)
    figure = blank(9.0, 3.6)
    panels = figure.subplots(1, 2)
    lines = [(scores, s) for scores in models for s in scores.summaries if s.matrix == "all"]
    width, chance = _chance(models)
    for name, axes in zip(_SCORES, panels, strict=True):
        axes.axhline(0, color=SOFT, linewidth=0.6, zorder=0)
        if width:
            axes.axhspan(
                *chance_bands(width, reading[1])[name], color=SOFT, alpha=0.13, linewidth=0, zorder=0, label=chance
            )
        for index, (scores, summary) in enumerate(lines):
            rows = rows_of(scores, summary)
            look = _style(index) | {"markersize": 4, "linewidth": 1.4, "label": _label(scores, summary)}
            axes.plot([row.layer for row in rows], [getattr(row, name) for row in rows], **look)
        axes.set_xlabel("layer")
        axes.set_ylabel(name if name == "symmetry" else f"{name} ({_words(reading)})")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(literal(title or _title(models, "scores by layer")))
    _legend(panels[1])
    return figure


def _heads(scores: GeometryScores, title: str | None) -> Figure:
    """Heat maps of both scores: layers downwards, heads to the right; a pair of maps for each kind of attention."""
    groups = [summary for summary in scores.summaries if summary.matrix == "head"]
    if not groups:
        raise ValueError(f"{scores.model} was scored without its heads: call score(..., per_head=True)")
    grids = [[head_grid(rows_of(scores, summary), name) for name in _SCORES] for summary in groups]
    figure = blank(9.0, sum(min(9.0, max(1.6, 0.16 * len(pair[0]))) + 0.9 for pair in grids) + 0.3)
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for summary, row, pair in zip(groups, panels, grids, strict=True):
        for name, axes, grid in zip(_SCORES, row, pair, strict=True):
            limit = float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0
            heat_map(axes, np.ma.masked_invalid(grid), limit)
            axes.set_facecolor("0.85")
            axes.set(xlabel="head", ylabel="layer")
            axes.set_title(name if len(groups) == 1 else f"{name}, {summary.what}")
            for axis in (axes.xaxis, axes.yaxis):
                axis.get_major_locator().set_params(integer=True)
    reading = _words((scores.gamma, scores.mode))
    figure.suptitle(literal(title or f"{shorten(scores.model, 70)} (directionality: {reading})"))
    return figure


def head_grid(rows: Sequence[MatrixScores], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One score of layers (rows) by heads (columns), NaN where a layer has no such head."""
    grid = np.full((1 + max(row.layer for row in rows), 1 + max(int(row.head) for row in rows)), math.nan)
    for row in rows:
        grid[row.layer, int(row.head)] = getattr(row, name)
    return grid


def background() -> tuple[PublishedScores, ...]:
    """Published records of self-attention, without those known to be wrong."""
    return tuple(record for record in published_scores() if not record.fault and record.kind == "self")


def chance_bands(width: int, mode: str) -> dict[str, tuple[float, float]]:
    """Between which scores 19 of 20 matrices of random weights of this width lie, in this reading of directionality."""
    spread = 2 * _SPREAD[mode] / math.sqrt(width)
    return {"symmetry": (-1.8 / width, 3.8 / width), "directionality": (-spread, spread)}


def _chance(models: Sequence[GeometryScores]) -> tuple[int, str]:
    """The width of the narrowest model, in which chance reaches farthest, and in words; 0 if no width is known."""
    widths = {row.width for scores in models for row in scores if row.head == "all" and row.kind == "self"}
    least = min(widths, default=0)
    return least, f"chance at width {least}" + (" (less at larger ones)" if len(widths) > 1 else "")


def _same_reading(models: Sequence[GeometryScores]) -> tuple[float, str]:
    readings = {(scores.gamma, scores.mode) for scores in models}
    if len(readings) != 1:
        what = " and ".join(_words(reading) for reading in sorted(readings))
        raise ValueError(f"expected models with one reading of directionality, got {what}; score them alike")
    return readings.pop()


def rows_of(scores: GeometryScores, summary: Summary) -> list[MatrixScores]:
    """The rows that a summary is of."""
    group = (summary.tower, summary.kind, summary.matrix == "all")
    return [row for row in scores if (row.tower, row.kind, row.head == "all") == group]


def has_several(scores: GeometryScores) -> bool:
    """Whether a model has more than one kind of attention, so that each is named."""
    return len({(row.tower, row.kind) for row in scores}) > 1


def name_of(scores: GeometryScores, summary: Summary) -> str:
    """The model, and its attention if it has several."""
    return f"{scores.model}: {summary.what}" if has_several(scores) else scores.model


def _words(reading: tuple[float, str]) -> str:
    return f"{reading[1]}, gamma {reading[0]:g}"


def _title(models: Sequence[GeometryScores], what: str) -> str:
    return f"{shorten(models[0].model, 60)}: {what}" if len(models) == 1 else f"{len(models)} models: {what}"


def _label(scores: GeometryScores, summary: Summary) -> str:
    return literal(shorten(name_of(scores, summary), 44))


def _style(index: int) -> dict[str, Any]:
    return {"color": SERIES[index % len(SERIES)], "marker": _MARKERS[index // len(SERIES) % len(_MARKERS)]}


def _legend(axes: Any) -> None:
    """Below the chart, where it covers nothing and a narrow page can show it."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 3 if len(labels) <= 24 else 4
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(1, len(labels))))
