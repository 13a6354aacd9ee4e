"""How each kind of result is shown as a picture, on a page and in a notebook; and the page about a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from attnflow import audit, bias, geometry, knowledge
from attnflow._core.errors import AttnflowError, MissingExtra
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.audit.report import AuditReport
from attnflow.bias.graph import BiasGraph
from attnflow.bias.kind import layer_biases
from attnflow.bias.map import BiasMap
from attnflow.geometry.score import Survey
from attnflow.geometry.table import GeometryScores
from attnflow.knowledge.entry_report import EntryReport, Removal
from attnflow.knowledge.provenance import Trace
from attnflow.masks.mask import Mask
from attnflow.models.loaded import Loaded, model_inputs, model_name, split, token_texts
from attnflow.order.flow import Flow
from attnflow.order.hasse import Hasse
from attnflow.report import html, svg
from attnflow.report.audit import audit_chart, audit_part
from attnflow.report.bias import bias_part, graph_part, graph_svg, map_chart
from attnflow.report.charts import svg_of
from attnflow.report.entry import entry_chart, entry_part, removal_chart
from attnflow.report.geometry import score_chart, scores_part
from attnflow.report.hasse_svg import hasse_svg
from attnflow.report.knowledge import trace_chart, trace_part
from attnflow.report.mask import flow_of, mask_part
from attnflow.report.mask_picture import mask_svg
from attnflow.report.order import growth_chart, hasse_part, leak_part
from attnflow.report.page import Context, Page, Part, Section, build
from attnflow.report.svg import Svg, standalone
from attnflow.tasks.leaks import LeakReport, check
from attnflow.tasks.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _flow_figure(flow: Flow, *, picture: str = "hasse", **options: Any) -> str | Figure:
    """Draws the order of a mask ("hasse"), or its receptive fields by layer ("growth")."""
    if picture not in ("hasse", "growth"):
        raise ValueError(f'picture must be "hasse" or "growth", got {picture!r}')
    return hasse_svg(flow.hasse, **options) if picture == "hasse" else growth_chart(flow, **options)


def _table_part(result: Result, _: Context) -> Part:
    """Shows a result without a drawing as a table; one that judges says how first."""
    rows, name, ok = result.rows(), type(result).__name__, getattr(result, "ok", None)
    head = list(rows[0]) if rows else []
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    body = html.table(head, cells, text_columns=len(head)) if rows else html.paragraph("No rows.")
    if ok is not None:
        body = html.note("good" if ok else "bad", html.paragraph(str(result).partition("\n")[0])) + body
    return Part(name, [Section(name.lower(), name, body)], failed=ok is False)


def _survey_figure(survey: Survey, **options: Any) -> Figure:
    return score_chart(*survey.models, **options)


@dataclass(frozen=True)
class Kind:
    """How a result is shown: its part of a page, its picture if any, and whether several results share both."""

    part: Callable[[Any, Context], Part] = _table_part
    figure: Callable[..., str | Figure] | None = None
    together: bool = False


_ERRORS: Final = (AttnflowError, ImportError, NotImplementedError, TypeError, ValueError)
TABLE: Final = Kind()
KINDS: Final[dict[type, Kind]] = {
    Mask: Kind(mask_part, mask_svg),
    Flow: Kind(mask_part, _flow_figure),
    Hasse: Kind(hasse_part, hasse_svg),
    LeakReport: Kind(leak_part),
    AuditReport: Kind(audit_part, audit_chart),
    BiasMap: Kind(bias_part, map_chart),
    BiasGraph: Kind(graph_part, graph_svg),
    GeometryScores: Kind(scores_part, score_chart, together=True),
    Survey: Kind(figure=_survey_figure),
    Trace: Kind(trace_part, trace_chart),
    EntryReport: Kind(entry_part, entry_chart),
    Removal: Kind(figure=removal_chart),
}
EXPANDED: Final = (Task,)  # a page shows their parts, see `_subjects`


def kind_of(result: object) -> Kind:
    """Returns how a result is shown; raises TypeError, listing what can be shown, if it cannot be."""
    for base in type(result).__mro__:
        if base in KINDS:
            return KINDS[base]
    if isinstance(result, Result):
        return TABLE
    names = ", ".join(sorted(kind.__name__ for kind in KINDS))
    raise TypeError(f"expected a result ({names}), got {type(result).__name__}")


def figure(result: object, *others: object, **options: Any) -> Svg | Figure:
    """Draw a result: charts are matplotlib figures, masks and diagrams are SVG.

    Both have `savefig(path)`, which writes .svg and, for charts, .png or .pdf; notebooks show them.

    Args:
        result: a mask, or any result that has a picture.
        others: more results of the same kind for pictures that show several: scores, or maps to compare.
        options: options of the drawing. All charts take `title`.
            Mask: `labels`, a text for each position, and `size`, the approximate width of the cells in pixels.
            Flow: `picture`, "hasse" or "growth".
            Hasse, and a flow's: `labels`; `highlight`, a path as `flow.path` returns it; `max_nodes`, the number of
            boxes above which the diagram is summarised.
            BiasMap: `picture`: "bias", "weights" (post-softmax, with it) or "compare" (the weights of a query with and
            without the bias, of several maps with `names`); `layer`; `query`, a position, -1 for the last one; `head`,
            None for the mean.
            BiasGraph: `max_edges`, the number of edges above which only the strongest are drawn.
            GeometryScores: `picture`, "plane", "layers" or "heads".
            Trace: `picture`, "all", "layers" (maps) or "entries" (bars); `position` of the token whose entries are
            shown, -1 for the last one; their `count`.

    Raises:
        TypeError: the result has no picture; the message lists what can be drawn.
        ValueError: an option does not fit the result, such as a layer that it does not have.
        MissingExtra: the picture is a chart, and matplotlib is not installed.

    >>> import attnflow as af
    >>> af.report.figure(af.masks.causal(3))
    Svg(Mask causal(n=3): 66.7\xa0% of (3, 3) pairs allowed: 2 KiB)
    """
    draw = kind_of(result).figure
    if draw is None:
        names = sorted(kind.__name__ for kind, how in KINDS.items() if how.figure is not None)
        raise TypeError(
            f"{type(result).__name__} has no picture, report.page shows it; there are pictures of {', '.join(names)}"
        )
    drawn = draw(result, *others, **options)
    return standalone(drawn) if isinstance(drawn, str) else drawn


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
        ValueError: there is nothing to show, or the number of labels differs from the number of positions.

    Cost: a few seconds for masks of up to 16,384 positions; the document stays below 2 MB at any size.

    >>> import attnflow as af
    >>> [section.name for section in af.report.page(af.masks.causal(8)).sections]
    ['mask', 'order', 'growth', 'blocks']
    """
    problems = dict(problems or {})
    for result in results:
        problems |= result.unscored if isinstance(result, Survey) else {}
    if not results and not problems:
        raise ValueError("expected at least one result, got none: nothing to show")
    subjects = [subject for result in results for subject in _subjects(result)]
    first = next((subject for subject in subjects if isinstance(subject, Mask | Flow)), None)
    size = None if first is None else first.size if isinstance(first, Flow) else first.num_queries
    if labels is not None and size is not None and len(labels) != size:
        raise ValueError(f"expected a label for each of {size} positions, got {len(labels)}")
    flow = first if isinstance(first, Flow) else None
    context = Context(flow, None if labels is None else tuple(labels))
    parts: list[Part] = []
    gathered: set[Kind] = set()
    for subject in subjects:
        if isinstance(subject, Section):
            parts.append(Part(subject.title, [subject]))
            continue
        kind = kind_of(subject)
        if not kind.together:
            other = isinstance(subject, Mask | Flow) and subject is not first
            parts.append(kind.part(subject, replace(context, labels=None) if other else context))
        elif kind not in gathered:
            gathered.add(kind)
            alike = [one for one in subjects if not isinstance(one, Section) and kind_of(one) is kind]
            parts.append(kind.part(alike, context))
    return build(parts, title, dict(details or {}), problems)


def _subjects(result: object) -> list[object]:
    """Returns what a page shows for a result: a mask's order, a task's order and proof, a survey's models."""
    if isinstance(result, Mask):
        return [flow_of(result)[0] or result]
    if isinstance(result, Task):
        return [result.flow, check(result)]
    if isinstance(result, Survey):
        return list(result.models)
    return [result]


def model_page(
    model: nn.Module | Loaded,
    inputs: str | Sequence[int] | Tensor | Mapping[str, Any],
    *,
    title: str | None = None,
    details: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Page:
    """Write a page about a model: its declared order, audit, bias if any, geometry, and the entries that fired.

    Args:
        model: any model, or a result of `af.load_model`.
        inputs: a text, token ids, or the model's inputs by name.
        title: heading (default: the model's name).
        details: more rows for the provenance.
        progress: called as progress(done, total, what) before each step.

    Returns:
        The page. Parts that do not work for this model are listed as problems with the reason; the rest is shown.

    Cost: an audit of the model, one pass over its queries and keys, and about four forward passes.
    """
    module, tokenizer = split(model)
    name = title or model_name(module)
    named = model_inputs(module, inputs, tokenizer, 0)
    results: list[object] = []

    def audited() -> AuditReport:
        flow = next((result for result in results if isinstance(result, Flow)), None)
        alone = len(named["input_ids"]) == 1  # sequences of a batch may differ in their orders
        return audit.check(module, named, flow if alone else None)

    steps: list[tuple[str, Callable[[], object]]] = [
        ("Order", lambda: audit.declared_order(module, named)),
        ("Audit", audited),
        ("Geometry", lambda: replace(geometry.score(module), model=name)),
        ("Knowledge", lambda: replace(knowledge.trace(module, named, tokenizer=tokenizer), model=name)),
    ]
    if any(layer_biases(module)):
        first = {key: value[:1] for key, value in named.items()}
        steps.insert(2, ("Bias", lambda: replace(bias.capture(module, first, tokenizer=tokenizer), model=name)))
    problems: dict[str, str] = {}
    for done, (step, find) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), step.lower())
        try:
            results.append(find())
        except _ERRORS as error:
            problems[step] = str(error)
    labels = None
    if tokenizer is not None:  # an encoder's tokens before the decoder's, as in its order
        rows = [ids[0].tolist() for key, ids in named.items() if key in ("input_ids", "decoder_input_ids")]
        labels = [text for row in rows for text in token_texts(row, tokenizer)]
    return page(*results, title=name, labels=labels, details=details, problems=problems)


def encode(result: object, suffix: str) -> bytes:
    """Encodes a result as .html, .svg, .png or .pdf: the content that `result.save` writes."""
    return page(result).html.encode() if suffix == ".html" else svg.encode(figure(result), suffix)


def notebook(result: object) -> str:
    """Returns the notebook view of a result: its picture, or its part of a page."""
    kind = kind_of(result)
    title = type(result).__name__
    if kind.figure is not None:
        try:
            picture = figure(result)
            shown = picture.markup if isinstance(picture, Svg) else svg_of(picture, title)
            return f'<div style="background:#fff;color:#1c2024">{shown}</div>'
        except (MissingExtra, ValueError):  # no matplotlib, or nothing to draw
            pass
    part = kind.part([result] if kind.together else result, Context())
    return html.tag("div", html.paragraph(*part.reading), *(section.body for section in part.sections)).markup
