"""Scores as matplotlib figures (extra `report`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from attnflow._core.errors import MissingExtra
from attnflow._core.markup import shorten
from attnflow.geometry.published import PublishedScores, published_scores
from attnflow.geometry.summary import Summary
from attnflow.geometry.table import GeometryScores, MatrixScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers go on where they run out.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS: Final = "osD^vPX*<>"
_SCORES: Final = ("symmetry", "directionality")

Picture = Literal["plane", "layers", "heads"]


def score_figure(scores: GeometryScores, *others: GeometryScores, picture: Picture = "plane") -> Figure:
    """The scores of one or more models as a matplotlib figure.

    Args:
        scores: of a model.
        others: more models for "plane" and "layers".
        picture: "plane" (median and quartiles of symmetry against directionality, a mark per model), "layers" (both
            scores by layer, a line per model) or "heads" (a heat map of heads by layers, of one model).

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: there is no such picture, or "heads" of several models or of a table without heads.
    """
    if picture == "heads":
        if others:
            raise ValueError('a heat map shows one model: call figure(..., picture="heads") of each')
        return heads(scores)
    if picture not in ("plane", "layers"):
        raise ValueError(f'picture must be "plane", "layers" or "heads", got {picture!r}')
    return (plane if picture == "plane" else layers)((scores, *others))


def plane(models: Sequence[GeometryScores], *, published: bool = True, title: str | None = None) -> Figure:
    """Median symmetry against median directionality with quartile whiskers, a mark for each attention of each model.

    What figure 2 of the paper shows for families of models, in one plane.

    Args:
        models: one or more, scored with the same gamma and mode.
        published: whether the published records without a known fault are shown behind, as grey dots.
        title: heading.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: no models, or models that were scored in different ways.
    """
    reading = _same_reading(models)
    figure = _new_figure((7.5, 5.0))
    axes = figure.add_subplot()
    axes.axhline(0, color="0.75", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.75", linewidth=0.8, zorder=0)
    if published and reading == (2.0, "excess"):
        known = background()
        x, y = ([getattr(record, name).median for record in known] for name in _SCORES)
        axes.scatter(x, y, s=12, color="0.8", linewidths=0, zorder=1, label=f"published ({len(known)} records)")
    shown = [(scores, s) for scores in models for s in scores.summaries if s.matrix == "all" and _known(s)]
    for index, (scores, summary) in enumerate(shown):
        whiskers = {
            f"{axis}err": [[abs(q.median - q.q25)], [abs(q.q75 - q.median)]]
            for axis, q in (("x", summary.symmetry), ("y", summary.directionality))
        }
        axes.errorbar(
            summary.symmetry.median,
            summary.directionality.median,
            **whiskers,
            **_style(index),
            linestyle="none",
            markersize=7,
            capsize=2.5,
            elinewidth=1.1,
            zorder=3,
            label=_label(scores, summary.what),
        )
    axes.set_xlabel("symmetry (median and quartiles over layers)")
    axes.set_ylabel(f"directionality ({_words(reading)})")
    axes.set_title(title or "", fontsize=11)
    _legend(axes, len(shown) + 1)
    return figure


def layers(models: Sequence[GeometryScores], *, title: str | None = None) -> Figure:
    """Both scores of the full matrix by layer, a line for each attention of each model.

    Args:
        models: one or more, scored with the same gamma and mode.
        title: heading.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: no models, or models that were scored in different ways.
    """
    reading = _same_reading(models)
    figure = _new_figure((9.0, 3.8))
    panels = figure.subplots(1, 2)
    lines = [(scores, s) for scores in models for s in scores.summaries if s.matrix == "all"]
    for name, axes in zip(_SCORES, panels, strict=True):
        axes.axhline(0, color="0.75", linewidth=0.8, zorder=0)
        for index, (scores, summary) in enumerate(lines):
            rows = [row for row in _rows(scores, summary) if row.head == "all"]
            values = [getattr(row, name) for row in rows]
            where = [row.layer for row in rows]
            axes.plot(where, values, **_style(index), markersize=4, linewidth=1.4, label=_label(scores, summary.what))
        axes.set_xlabel("layer")
        axes.set_ylabel(name if name == "symmetry" else f"{name} ({_words(reading)})")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title or "", fontsize=11)
    _legend(panels[1], len(lines))
    return figure


def heads(scores: GeometryScores, *, title: str | None = None) -> Figure:
    """Heat maps of both scores: layers to the right, heads downwards; a pair of maps for each kind of attention.

    Args:
        scores: of one model, with its heads.
        title: heading; by default the model.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: the heads were not scored.
    """
    groups = [summary for summary in scores.summaries if summary.matrix == "head"]
    if not groups:
        raise ValueError(f"{scores.model} was scored without its heads: call score(..., per_head=True)")
    grids = [[head_grid(_rows(scores, summary), name) for name in _SCORES] for summary in groups]
    height = sum(max(1.8, 0.18 * len(pair[0])) + 0.9 for pair in grids)
    figure = _new_figure((9.0, height + 0.3))
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for summary, row, pair in zip(groups, panels, grids, strict=True):
        for name, axes, grid in zip(_SCORES, row, pair, strict=True):
            limit = float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0
            image = axes.imshow(np.ma.masked_invalid(grid), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
            axes.set_facecolor("0.85")
            axes.set_xlabel("layer")
            axes.set_ylabel("head")
            axes.set_title(name if len(groups) == 1 else f"{name}, {summary.what}", fontsize=10)
            for axis in (axes.xaxis, axes.yaxis):
                axis.get_major_locator().set_params(integer=True)
            figure.colorbar(image, ax=axes)
    reading = _words((scores.gamma, scores.mode))
    figure.suptitle(title or f"{shorten(scores.model, 70)} (directionality: {reading})", fontsize=11)
    return figure


def head_grid(rows: Sequence[MatrixScores], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One score of heads (rows) by layers (columns), NaN where a layer has no such head."""
    cells = [(row.head, row.layer, getattr(row, name)) for row in rows if row.head != "all"]
    grid = np.full((1 + max(head for head, _, _ in cells), 1 + max(layer for _, layer, _ in cells)), math.nan)
    for head, layer, value in cells:
        grid[head, layer] = value
    return grid


def background() -> tuple[PublishedScores, ...]:
    """Published records of self-attention, without those known to be wrong."""
    return tuple(record for record in published_scores() if not record.fault and record.kind == "self")


def _new_figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "scores as a figure") from error
    return Figure(figsize=size, layout="constrained")  # no pyplot: nothing global is touched


def _same_reading(models: Sequence[GeometryScores]) -> tuple[float, str]:
    readings = {(scores.gamma, scores.mode) for scores in models}
    if len(readings) != 1:
        what = " and ".join(_words(reading) for reading in sorted(readings)) or "no models"
        raise ValueError(f"expected models with one reading of directionality, got {what}; score them alike")
    return readings.pop()


def _rows(scores: GeometryScores, summary: Summary) -> list[MatrixScores]:
    return [row for row in scores if (row.tower, row.kind) == (summary.tower, summary.kind)]


def _known(summary: Summary) -> bool:
    return not math.isnan(summary.symmetry.median)


def _words(reading: tuple[float, str]) -> str:
    return f"{reading[1]}, gamma {reading[0]:g}"


def _label(scores: GeometryScores, what: str) -> str:
    several = len({(summary.tower, summary.kind) for summary in scores.summaries}) > 1
    return shorten(f"{scores.model}: {what}" if several else scores.model, 44)


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index // len(_COLOURS) % len(_MARKERS)]}


def _legend(axes: Any, entries: int) -> None:
    axes.legend(
        fontsize=8,
        frameon=False,
        ncols=1 + (entries - 1) // 25,
        loc="upper left" if entries > 1 else "best",
        bbox_to_anchor=(1.01, 1.0) if entries > 1 else None,
    )
