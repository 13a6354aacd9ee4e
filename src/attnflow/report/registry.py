"""How each kind of result is shown as a picture, on a page and in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, cast

from attnflow._core.errors import MissingExtra
from attnflow._core.handles import Handle
from attnflow._core.results import Result
from attnflow.audit.measurement import MeasuredOrder
from attnflow.geometry.monitor import Monitor
from attnflow.geometry.score import GeometrySurvey
from attnflow.masks.batches import MaskGrid
from attnflow.masks.export.slices import FlashMask, MagiRanges
from attnflow.masks.export.varlen import Varlen
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow
from attnflow.order.hasse import Hasse, Sparse
from attnflow.report import (
    attribution,
    audit,
    bias,
    entry,
    explain,
    geometry,
    html,
    knowledge,
    model_masks,
    recorded,
    svg,
    tasks,
)
from attnflow.report.charts import Figure, in_page, svg_of
from attnflow.report.displays import DISPLAYS, Display, describes, draws, opens
from attnflow.report.mask import flow_of
from attnflow.report.mask_picture import mask_svg
from attnflow.report.page import Context, Page, PagePart, Section, build
from attnflow.report.svg import Svg, standalone
from attnflow.report.tables import card, cell, gallery, table_svg
from attnflow.tasks.leaks import LeakReport, check
from attnflow.tasks.merging import MergedTask
from attnflow.tasks.task import Task


@describes(Result)
def _table_part(result: Result, _: Context) -> PagePart:
    rows, name, ok = result.rows(), type(result).__name__, getattr(result, "ok", None)
    cells = [[cell(value, _LONGEST) for value in row.values()] for row in rows]
    body = html.table(list(rows[0]), cells, text_columns=len(rows[0])) if rows else html.paragraph("No rows.")
    draw = kind_of(result).figure
    if draw is not None:
        with suppress(ValueError):  # nothing to draw
            body = in_page(lambda: cast("Figure", draw(result)), name) + body
    if ok is not None:
        body = html.note("good" if ok else "bad", html.paragraph(str(result).partition("\n")[0])) + body
    return PagePart(name, [Section(name.lower(), name, body)], failed=ok is False)


@describes(Handle, Monitor)
def _handle_part(handle: Handle, _: Context) -> PagePart:
    body = html.join([html.paragraph(line) for line in str(handle).splitlines()])
    return PagePart(type(handle).__name__, [Section("change", "What was changed", body)])


@draws(MergedTask)
def _merged_figure(merged: MergedTask, **options: Any) -> str:
    return tasks.task_svg(merged.task, **options)


@draws(GeometrySurvey)
def _survey_figure(survey: GeometrySurvey, **options: Any) -> Figure:
    return geometry.score_chart(*survey.models, **options)


# They register what they draw.
SHOWN: Final = (attribution, audit, bias, entry, explain, knowledge, model_masks, recorded)
opens(Mask, to=lambda mask: [flow_of(mask)[0] or mask])
opens(MaskGrid, to=lambda grid: list(dict.fromkeys(mask for row in grid.masks for mask in row)))
opens(MeasuredOrder, to=lambda measured: measured.flows)
opens(Sparse, to=lambda sparse: [sparse.mask])
opens(Varlen, FlashMask, MagiRanges, to=lambda form: [form.to_mask()])
opens(Task, to=lambda task: [task.flow, check(task)])
opens(MergedTask, to=lambda merged: [merged.task])
opens(GeometrySurvey, to=lambda survey: survey.models)
opens(Monitor, Handle, to=lambda handle: handle.results())


_LONGEST: Final = 400  # characters of a cell on a page


def kind_of(result: object) -> Display:
    """Returns how a result is shown; raises TypeError, listing what can be shown, if it cannot be."""
    for base in type(result).__mro__:
        if base in DISPLAYS:
            return DISPLAYS[base]
    names = ", ".join(sorted(kind.__name__ for kind in DISPLAYS if kind not in (Handle, Result)))
    raise TypeError(f"expected a result ({names}, any other, or a handle), got {type(result).__name__}")


def _part(kind: Display) -> Callable[..., PagePart]:
    return kind.part or _table_part


def figure(result: object, *others: object, **options: Any) -> Svg | Figure:
    """Draw any result, task or handle: charts are matplotlib figures, masks, diagrams and tables are SVG.

    Both have `savefig(path)`, which writes .svg, .pdf or .png; notebooks show them.

    Args:
        result: a mask, a task, a handle or any other result. One without a drawing of its own is drawn as a table with
            bars; a handle is drawn as what it holds: its masks, its latest report.
        others: more results of the same kind for pictures that show several: scores, or maps to compare.
        options: options of the drawing. All take `title`.
            Mask: `labels`, a text for each of at most 64 positions, and `size`, the approximate width of the cells in
            pixels.
            Flow: `picture`, "hasse" or "growth".
            Task, also merged: `picture`, "mask" (with a token for each row), "hasse" (with the first leak) or "leaks".
            Hasse, and a flow's: `labels`; `highlight`, a path as `flow.path` returns it; `max_nodes`, the number of
            boxes above which the diagram is summarised, by default what fits on a page and at most 60.
            BiasMap: `picture`: "bias", "weights" (post-softmax, with it) or "compare" (the weights of a query with and
            without the bias, of several maps with `names`); `layer`; `query`, a position, -1 for the last one; `head`,
            None for the mean.
            BiasGraph: `max_edges`, the number of edges above which only the strongest are drawn.
            GeometryScores: `picture`, "plane", "layers" or "heads".
            ScoreAttribution: `picture`, "all", "map" (pairs of components), "terms" (the `count` largest) or "tokens";
            `head` and `key`, a position, by default those with the largest weights; `raw`, for terms that are not
            centred over the row.
            Explanation: `width` in pixels, narrow for a telephone, and `lines`, the most that are drawn.
            Trace: `picture`, "all", "layers" (maps) or "entries" (bars); `position` of the token whose entries are
            shown, -1 for the last one; their `count`.

    Raises:
        TypeError: not a result of this package, the message lists what is; or an option that the drawing lacks.
        ValueError: an option does not fit the result, such as a layer that it does not have; or it is empty, such as a
            monitor before its first record.
        MissingExtra: the picture is a chart, and matplotlib is not installed.

    >>> import attnflow as af
    >>> af.report.figure(af.masks.causal(3))
    Svg(Mask causal(n=3): 66.7\xa0% of (3, 3) pairs allowed: 4 KiB)
    """
    kind = kind_of(result)
    if kind.figure is not None:
        drawn = kind.figure(result, *others, **options)
        return standalone(drawn) if isinstance(drawn, str) else drawn
    if others:
        raise TypeError(f"{type(result).__name__} is drawn alone, got {len(others)} more")
    if kind.opens is None:
        assert isinstance(result, Result)
        return standalone(table_svg(result, **options))
    results = kind.opens(result)
    if not results:  # a handle that only changes its model
        return standalone(card(str(result), **options))
    masks = [mask for mask in results if isinstance(mask, Mask)]
    if len(masks) == len(results) > 1:
        title = options.pop("title", None)
        return standalone(gallery([mask_svg(mask, **options) for mask in masks], str(result), title))
    return figure(next((one for one in results if getattr(one, "ok", True) is False), results[-1]), **options)


def page(
    *results: object,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    details: Mapping[str, str] | None = None,
    problems: Mapping[str, str] | None = None,
) -> Page:
    """Put any results on one self-contained HTML page; results that report a failure come first.

    A mask is shown with its order. Leaks are drawn on the order of the first mask or flow on the page. Your own
    `Section` (`attnflow.report.page`) appears where you put it.

    Args:
        results: masks, flows, and results of any room.
        title: heading (default: a description of the first result).
        labels: a text for each position of the first mask, such as its token.
        details: more rows for the provenance, such as a command line or a seed.
        problems: results that could not be computed, each with the reason.

    Raises:
        TypeError: a result cannot be shown; the message lists what can.
        ValueError: there is nothing to show, nothing with positions for the labels, or another number of positions.

    Cost: a few seconds for masks of up to 16,384 positions; the document stays below 2 MB at any size.

    >>> import attnflow as af
    >>> [section.name for section in af.report.page(af.masks.causal(8)).sections]
    ['mask', 'order', 'growth', 'blocks']
    """
    problems = dict(problems or {})
    for result in results:
        problems |= result.unscored if isinstance(result, GeometrySurvey) else {}
    if not results and not problems:
        raise ValueError("expected at least one result, got none: nothing to show")
    subjects = list[object]()
    for subject in (subject for result in results for subject in _subjects(result)):
        if not any(_same(subject, shown) for shown in subjects):
            subjects.append(subject)
    first = next((subject for subject in subjects if isinstance(subject, Mask | Flow)), None)
    size = next((size for subject in (first, *subjects) if (size := _size(subject)) is not None), None)
    if labels is not None and len(labels) != size:
        what = "a mask, an order or leaks for the labels, got none" if size is None else ""
        raise ValueError(f"expected {what or f'a label for each of {size} positions, got {len(labels)}'}")
    flow = first if isinstance(first, Flow) else None
    context = Context(flow, None if labels is None else tuple(labels))
    parts: list[PagePart] = []
    gathered: set[Display] = set()
    for subject in subjects:
        if isinstance(subject, Section):
            parts.append(PagePart(subject.title, [subject]))
            continue
        kind = kind_of(subject)
        part = _part(kind)
        if not kind.together:
            other = _size(subject) != size or (isinstance(subject, Mask | Flow) and subject is not first)
            parts.append(part(subject, replace(context, labels=None) if other else context))
        elif kind not in gathered:
            gathered.add(kind)
            alike = [one for one in subjects if not isinstance(one, Section) and kind_of(one) is kind]
            parts.append(part(alike, context))
    return build(parts, title, dict(details or {}), problems)


def _size(subject: object) -> int | None:
    """Returns the number of positions that labels can name."""
    if isinstance(subject, LeakReport):
        return subject.num_positions
    if isinstance(subject, Flow | Mask):
        return subject.size if isinstance(subject, Flow) else subject.num_queries
    return sum(map(len, subject.nodes)) if isinstance(subject, Hasse) else None


def _same(one: object, other: object) -> bool:
    """Whether a page would repeat itself; the arrays of other results are not compared."""
    if isinstance(one, Flow) and isinstance(other, Flow):
        return (one.masks, one.num_layers, one.num_before) == (other.masks, other.num_layers, other.num_before)
    return one is other or (isinstance(one, Mask | LeakReport | Hasse) and one == other)


def _subjects(result: object) -> list[object]:
    """Returns what a page shows for a result: a mask's order, a task's order and proof, a survey's models."""
    opens = None if isinstance(result, Section) else kind_of(result).opens
    parts = () if opens is None else opens(result)
    return [each for part in parts for each in ([part] if type(part) is type(result) else _subjects(part))] or [result]


def encode(result: object, suffix: str) -> bytes:
    return page(result).html.encode() if suffix == ".html" else svg.encode(figure(result), suffix)


def notebook(result: object) -> str:
    kind = kind_of(result)
    title = type(result).__name__
    if kind.figure is not None or not isinstance(result, Result):
        try:
            picture = figure(result)
            return (picture if isinstance(picture, Svg) else standalone(svg_of(picture, title)))._repr_html_()
        except (MissingExtra, ValueError):  # no matplotlib, or nothing to draw
            pass
    part = _part(kind)([result] if kind.together else result, Context())
    return html.tag("div", html.paragraph(*part.reading), *(section.body for section in part.sections)).markup
