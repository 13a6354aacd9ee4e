"""Which function shows which kind of result: as a picture, on a page, in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnflow._core.errors import MissingExtra
from attnflow._core.results import Result
from attnflow.audit.findings import AuditReport
from attnflow.bias.graph import BiasGraph
from attnflow.bias.map import BiasMap
from attnflow.bias.trained import Trained
from attnflow.geometry.score import Survey
from attnflow.geometry.table import GeometryScores
from attnflow.knowledge.provenance import Trace
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow
from attnflow.order.hasse import Hasse
from attnflow.report import html, svg
from attnflow.report.audit_chart import audit_chart
from attnflow.report.bias_chart import map_chart
from attnflow.report.charts import svg_of
from attnflow.report.graph_svg import graph_svg
from attnflow.report.growth_chart import growth_chart
from attnflow.report.hasse_svg import hasse_svg
from attnflow.report.mask_facts import CostModel
from attnflow.report.mask_svg import mask_svg
from attnflow.report.mask_text import mask_text
from attnflow.report.page import Page, build
from attnflow.report.part import Context, Part, Section
from attnflow.report.score_chart import score_chart
from attnflow.report.score_text import overview
from attnflow.report.sections.audit import audit_part
from attnflow.report.sections.bias import bias_part, graph_part, training_part
from attnflow.report.sections.geometry import scores_part
from attnflow.report.sections.knowledge import trace_part
from attnflow.report.sections.leaks import leak_part, verification_part
from attnflow.report.sections.mask import flow_of, mask_part
from attnflow.report.sections.order import hasse_part
from attnflow.report.svg import Svg
from attnflow.report.trace_chart import trace_chart
from attnflow.report.training_chart import training_chart
from attnflow.tasks.derivation import Derivation
from attnflow.tasks.leaks import LeakReport, check
from attnflow.tasks.task import Task
from attnflow.tasks.verification import Verification

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _flow_figure(flow: Flow, *, picture: str = "hasse", **options: Any) -> Svg | Figure:
    """The order of a mask: "hasse", its diagram, or "growth", its receptive fields by layer."""
    if picture not in ("hasse", "growth"):
        raise ValueError(f'picture must be "hasse" or "growth", got {picture!r}')
    return Svg(hasse_svg(flow.hasse, **options)) if picture == "hasse" else growth_chart(flow, **options)


def _table_part(result: Result, _: Context) -> Part:
    """A result without a drawing: its rows."""
    rows = result.rows()
    name = type(result).__name__
    head = list(rows[0]) if rows else []
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    body = html.table(head, cells, text_columns=len(head)) if rows else html.paragraph("No rows.")
    return Part(name, [Section("table", name, body)], failed=not getattr(result, "ok", True))


def _as_svg(draw: Callable[..., str]) -> Callable[..., Svg]:
    def drawing(result: Any, **options: Any) -> Svg:
        return Svg(draw(result, **options))

    return drawing


def _survey_figure(survey: Survey, **options: Any) -> Figure:
    return score_chart(*survey.models, **options)


def _survey_text(survey: Survey, width: int = 110) -> str:
    return overview(survey.models, width)


def _score_text(scores: GeometryScores, width: int = 110) -> str:
    return overview([scores], width)


def _plain_text(result: object, **_: object) -> str:
    return str(result)


@dataclass(frozen=True)
class Kind:
    """How one kind of result is shown.

    Attributes:
        part: what a page says of it; of all such results together if `together`.
        figure: makes its picture; None if it has a table only.
        text: what a terminal shows.
        together: whether several results of this kind share one part of a page and one picture.
    """

    part: Callable[[Any, Context], Part] = _table_part
    figure: Callable[..., Svg | Figure] | None = None
    text: Callable[..., str] = _plain_text
    together: bool = False


TABLE: Final = Kind()
KINDS: Final[dict[type, Kind]] = {
    Mask: Kind(mask_part, _as_svg(mask_svg), mask_text),
    Flow: Kind(mask_part, _flow_figure),
    Hasse: Kind(hasse_part, _as_svg(hasse_svg)),
    LeakReport: Kind(leak_part),
    Verification: Kind(verification_part),
    AuditReport: Kind(audit_part, audit_chart),
    BiasMap: Kind(bias_part, map_chart),
    BiasGraph: Kind(graph_part, _as_svg(graph_svg)),
    GeometryScores: Kind(scores_part, score_chart, _score_text, together=True),
    Survey: Kind(figure=_survey_figure, text=_survey_text),
    Trace: Kind(trace_part, trace_chart),
    Trained: Kind(training_part, training_chart),
}
# Results without a picture of their own, whose rows say it all.
TABLES: Final = frozenset(
    {
        "ActivityReport",
        "Conditions",
        "Drift",
        "Duplicates",
        "Inspection",
        "LayerMap",
        "LayerQuery",
        "MaskSummary",
        "Matches",
        "QueryBias",
        "Reembedded",
        "Sparse",
        "StoreStats",
        "Strength",
        "Written",
    }
)
EXPANDED: Final = (Task, Derivation)  # a page shows their parts, see `_subjects`


def kind_of(result: object) -> Kind:
    """How a result is shown.

    Raises:
        TypeError: it is none; the message lists what can be shown.
    """
    for base in type(result).__mro__:
        if base in KINDS:
            return KINDS[base]
    if isinstance(result, Result):
        return TABLE
    names = ", ".join(sorted(kind.__name__ for kind in KINDS))
    raise TypeError(f"expected a result ({names}), got {type(result).__name__}")


def figure(result: object, *others: object, **options: Any) -> Svg | Figure:
    """A result as a picture: a matplotlib figure of a chart, or our own SVG of a mask or a diagram.

    Both are saved by `savefig(path)` as .svg, .png or .pdf, and notebooks show them.

    Args:
        result: a mask, or any result that has a picture.
        others: more results of the same kind, where one picture shows several: scores, maps to compare.
        options: of the drawing. Of all charts: `title`. Mask: `labels`, `size`. Flow: `picture` ("hasse", "growth").
            Hasse, and a flow's: `labels`, `highlight`, `max_nodes`. BiasMap: `picture` ("bias", "weights", "compare"),
            `layer`, `query`, `head`, `names`. BiasGraph: `max_edges`. GeometryScores: `picture` ("plane", "layers",
            "heads"). Trace: `picture` ("all", "layers", "entries"), `position`, `count`.

    Raises:
        TypeError: there is no picture of it; the message lists what can be drawn.
        MissingExtra: a chart without matplotlib.

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
    return draw(result, *others, **options)


def page(
    *results: object,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    cost: CostModel | None = None,
    details: Mapping[str, str] | None = None,
    problems: Mapping[str, str] | None = None,
) -> Page:
    """Any results on one self-contained HTML page; what failed comes first.

    A mask is shown with its order. Leaks are drawn on the order of the first mask or flow on the page. A `Section` of
    one's own (`attnflow.report.part`) stands where it is given.

    Args:
        results: masks, flows, and results of all rooms.
        title: heading; by default what the first result is.
        labels: a text for each position of the first mask, such as its token.
        cost: the model whose attention is priced; by default one layer of one head with 64 channels.
        details: more rows for the provenance, such as a command line or a seed.
        problems: what could not be shown, with the reason.

    Raises:
        TypeError: something that cannot be shown; the message lists what can.
        ValueError: nothing to show, or labels are not as many as positions.

    Cost: a few seconds for masks of up to 16,384 positions; the document stays below 2 MB at any size.

    >>> import attnflow as af
    >>> [section.name for section in af.report.page(af.masks.causal(8)).sections]
    ['mask', 'order', 'growth', 'blocks', 'cost']
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
    given = Context(flow, None if labels is None else tuple(labels), cost or CostModel())
    parts: list[Part] = []
    gathered: set[Kind] = set()
    for subject in subjects:
        if isinstance(subject, Section):
            parts.append(Part(subject.title, [subject]))
            continue
        kind = kind_of(subject)
        other = isinstance(subject, Mask | Flow) and subject is not first
        context = Context(flow, None, given.cost) if other else given
        if not kind.together:
            parts.append(kind.part(subject, context))
        elif kind not in gathered:
            gathered.add(kind)
            alike = [one for one in subjects if not isinstance(one, Section) and kind_of(one) is kind]
            parts.append(kind.part(alike, context))
    return build(parts, title, dict(details or {}), problems)


def _subjects(result: object) -> list[object]:
    """What a page says of a result, one after the other: of a mask its order, of a task its proof as well."""
    if isinstance(result, Mask):
        return [flow_of(result)[0] or result]
    if isinstance(result, Task):
        return [result.flow, check(result)]
    if isinstance(result, Derivation):
        return [result.merged.task.flow, result.report]
    if isinstance(result, Survey):
        return list(result.models)
    return [result]


def text(result: object, **options: Any) -> str:
    """A result as a terminal shows it.

    Args:
        result: a mask or any result.
        options: Mask: `width` in columns and `ascii_only`; GeometryScores: `width`.

    >>> import attnflow as af
    >>> print(af.report.text(af.masks.causal(3), width=40, ascii_only=True))
    causal(n=3)
    3 queries x 3 keys, 66.7 % allowed
    <BLANKLINE>
       0 1 2
    0  # . .
    1  # # .
    2  # # #
    <BLANKLINE>
    # allowed   . not
    """
    return kind_of(result).text(result, **options)


def encode(result: object, suffix: str) -> bytes:
    """A result as the content of an .html, .svg, .png or .pdf file: what `result.save` writes."""
    return page(result).html.encode() if suffix == ".html" else svg.encode(figure(result), suffix)


def notebook(result: object) -> str:
    """A result as a notebook shows it: its picture, or what a page says of it."""
    kind = kind_of(result)
    title = type(result).__name__
    if kind.figure is not None:
        try:
            picture = kind.figure(result)
            shown = picture.markup if isinstance(picture, Svg) else svg_of(picture, title)
            return f'<div style="background:#fff;color:#1c2024">{shown}</div>'
        except (MissingExtra, ValueError):  # no matplotlib, or nothing to draw
            pass
    part = kind.part([result] if kind.together else result, Context())
    return html.tag("div", html.paragraph(*part.reading), *(section.body for section in part.sections)).markup
