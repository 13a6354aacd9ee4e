"""`mask_report`, `model_report` and the reports of each concept: results in, one self-contained HTML page out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnflow._core.files import write_atomically
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow
from attnflow.report.facts import CostModel
from attnflow.report.page import render
from attnflow.report.sections import BIAS_SECTIONS, GEOMETRY_SECTIONS, MODEL_SECTIONS, SECTIONS, TRACE_SECTIONS
from attnflow.report.subject import Section, SectionFunction, Subject, order_of

if TYPE_CHECKING:
    from attnflow.audit import AuditReport
    from attnflow.bias import BiasMap
    from attnflow.geometry import GeometryScores
    from attnflow.knowledge.provenance import Trace
    from attnflow.tasks import Report as TaskReport
    from attnflow.tasks import Task, Verification


@dataclass(frozen=True)
class Report:
    """A finished report.

    Attributes:
        title: heading of the page.
        sections: what it shows, in order.
        html: the document; it fetches nothing and needs nothing beside it.
    """

    title: str
    sections: tuple[Section, ...]
    html: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the document to `path`, all of it or nothing, and returns the path.

        Raises:
            FileNotFoundError: the folder of `path` does not exist.
        """
        with write_atomically(path) as file:
            file.write(self.html.encode("utf-8"))
        return Path(path)

    def __repr__(self) -> str:
        names = ", ".join(section.name for section in self.sections)
        return f"Report({self.title!r}: {names}; {len(self.html.encode()) / 1024:.0f} KiB)"


def mask_report(
    mask: Mask | Flow | Sequence[Mask],
    *,
    task: Task | None = None,
    check: TaskReport | None = None,
    verification: Verification | None = None,
    audit: AuditReport | None = None,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    cost: CostModel | None = None,
    details: Mapping[str, str] | None = None,
    sections: Sequence[SectionFunction] = SECTIONS,
) -> Report:
    """A report on a mask: picture, order, Hasse diagram, growth, leaks, dead positions, blocks, cost, audit.

    Args:
        mask: a mask, its flow if that is computed already, or one mask per layer.
        task: a task with this mask; it is checked, unless `check` is given.
        check: the result of `af.tasks.check`.
        verification: the result of `af.tasks.verify`.
        audit: the result of `af.audit.check`, if a model was run under this mask.
        title: heading; by default the mask's repr.
        labels: a text for each position, such as its token.
        cost: the model whose attention is priced; by default one layer of one head with 64 channels.
        details: more rows for the provenance, such as a command line or a seed.
        sections: what to show; each function makes one section of a `Subject`, or None.

    Raises:
        ValueError: `task` has another mask, or labels are not as many as positions.

    Cost: a few seconds up to 16,384 positions; the document stays far below 2 MB at any size.

    >>> import attnflow as af
    >>> report = mask_report(af.masks.causal(8))
    >>> [section.name for section in report.sections]
    ['mask', 'order', 'growth', 'blocks', 'cost']
    """
    flow, masks, stacked = _masks_of(mask)
    if task is not None:
        if len(masks) != 1 or task.mask != masks[0]:
            raise ValueError(f"expected a task with the mask {masks[0]!r}, got one with {task.mask!r}")
        if check is None:
            from attnflow.tasks import check as check_task

            check = check_task(task)
    if labels is not None and len(labels) != masks[0].num_queries:
        raise ValueError(f"expected a label for each of {masks[0].num_queries} positions, got {len(labels)}")
    reason = ""
    if flow is None:
        flow, reason = order_of(masks, stacked)
    subject = Subject(
        title=title if title is not None else repr(masks[0]) if len(masks) == 1 else f"{len(masks)} layers of masks",
        masks=masks,
        flow=flow,
        no_order=reason,
        check=check,
        verification=verification,
        audit=audit,
        labels=None if labels is None else tuple(labels),
        cost=CostModel() if cost is None else cost,
        details=dict(details or {}),
    )
    return build(subject, sections)


def model_report(
    name: str,
    audit: AuditReport | None,
    *,
    flow: Flow | Mask | Sequence[Mask] | None = None,
    bias: BiasMap | None = None,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    cost: CostModel | None = None,
    details: Mapping[str, str] | None = None,
    sections: Sequence[SectionFunction] = MODEL_SECTIONS,
) -> Report:
    """A report on a model: what its audit found, the order that it declares or that was measured, its bias.

    Args:
        name: of the model.
        audit: the result of `af.audit.check`; None to show the order alone.
        flow: the order: declared masks (one, or one per layer), or the result of `af.audit.measure`.
        bias: the result of `af.bias.capture`, if it has a bias.
        title: heading; by default the name.
        labels: a text for each position, such as its token.
        cost: the model whose attention is priced.
        details: more rows for the provenance.
        sections: what to show.
    """
    order, masks, stacked = (None, (), False) if flow is None else _masks_of(flow)
    reason = ""
    if order is None:
        order, reason = order_of(masks, stacked)
    if labels is not None and masks and len(labels) != masks[0].num_queries:
        raise ValueError(f"expected a label for each of {masks[0].num_queries} positions, got {len(labels)}")
    subject = Subject(
        title=title if title is not None else name,
        masks=masks,
        flow=order,
        no_order=reason,
        audit=audit,
        model=name,
        bias=bias,
        labels=None if labels is None else tuple(labels),
        cost=CostModel(num_layers=len(masks) if stacked else 1) if cost is None else cost,
        details=dict(details or {}),
    )
    return build(subject, sections)


def geometry_report(
    models: Sequence[GeometryScores],
    *,
    unscored: Mapping[str, str] | None = None,
    title: str | None = None,
    details: Mapping[str, str] | None = None,
    sections: Sequence[SectionFunction] = GEOMETRY_SECTIONS,
) -> Report:
    """A report on the geometry of models: symmetry and directionality in one plane, by layer, by head.

    Args:
        models: results of `af.geometry.score`.
        unscored: models that could not be scored, with the reason.
        title: heading; by default the model, or how many there are.
        details: more rows for the provenance.
        sections: what to show.

    Raises:
        ValueError: there is neither a scored nor an unscored model.
    """
    if not models and not unscored:
        raise ValueError("expected at least one model, got none: nothing to report")
    name = models[0].model if len(models) == 1 else f"Geometry of {len(models)} models"
    subject = Subject(
        title=title if title is not None else name,
        model=models[0].model if len(models) == 1 else None,
        geometry=tuple(models),
        unscored=dict(unscored or {}),
        details=dict(details or {}),
    )
    return build(subject, sections)


def bias_report(
    bias_map: BiasMap,
    *,
    title: str | None = None,
    details: Mapping[str, str] | None = None,
    sections: Sequence[SectionFunction] = BIAS_SECTIONS,
) -> Report:
    """A report on the bias of a model on one text: by layer, as maps, what it does to the weights, its graph.

    Args:
        bias_map: the result of `af.bias.capture`.
        title: heading; by default the model.
        details: more rows for the provenance, such as the folder of the bias.
        sections: what to show.
    """
    subject = Subject(
        title=title if title is not None else f"Attention bias of {bias_map.model}",
        model=bias_map.model,
        bias=bias_map,
        details=dict(details or {}),
    )
    return build(subject, sections)


def trace_report(
    trace: Trace,
    *,
    title: str | None = None,
    details: Mapping[str, str] | None = None,
    sections: Sequence[SectionFunction] = TRACE_SECTIONS,
) -> Report:
    """A report on the entries that fired for a text: those of the last token, what each layer did, layer by layer.

    Args:
        trace: the result of `af.knowledge.trace`.
        title: heading; by default the model.
        details: more rows for the provenance, such as the store.
        sections: what to show.
    """
    subject = Subject(
        title=title if title is not None else f"Entries that fired in {trace.model}",
        model=trace.model,
        trace=trace,
        details=dict(details or {}),
    )
    return build(subject, sections)


def build(subject: Subject, sections: Sequence[SectionFunction] = SECTIONS) -> Report:
    """The report of any subject: what `mask_report` and `model_report` come down to."""
    made = tuple(section for function in sections if (section := function(subject)) is not None)
    names = [section.name for section in made]
    if len(set(names)) < len(names):
        raise ValueError(f"sections must have different names, got {names}")
    return Report(subject.title, made, render(subject, made))


def _masks_of(given: Mask | Flow | Sequence[Mask]) -> tuple[Flow | None, tuple[Mask, ...], bool]:
    if isinstance(given, Flow):
        return given, given.masks, given.num_layers is not None
    if isinstance(given, Mask):
        return None, (given,), False
    masks = tuple(given)
    if not masks:
        raise ValueError("expected a mask or at least one mask per layer, got an empty sequence")
    for mask in masks:
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"expected a Mask, got {type(mask).__name__}; wrap a tensor with af.masks.from_dense")
    return None, masks, True
