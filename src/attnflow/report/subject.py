"""What a report is about: the results that its sections read, and nothing that they would have to compute twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow, analyze
from attnflow.report.facts import CostModel
from attnflow.report.html import Html

if TYPE_CHECKING:
    from attnflow.audit import AuditReport
    from attnflow.bias import BiasMap
    from attnflow.geometry import GeometryScores
    from attnflow.knowledge.provenance import Trace
    from attnflow.tasks import Report as TaskReport
    from attnflow.tasks import Verification

LARGEST_ORDER: Final = 32_768  # positions above which the closure would take gigabytes


@dataclass(frozen=True)
class Subject:
    """The results that a report shows; a section leaves out what is None.

    Attributes:
        title: heading of the page.
        masks: one mask for all layers, or the mask of each layer; empty if only an audit is reported.
        flow: the order of these masks; None where there is none (see `no_order`).
        no_order: why there is no order.
        check: what `af.tasks.check` found.
        verification: what `af.tasks.verify` found.
        audit: the result of `af.audit.check`.
        model: name of the audited model.
        labels: a text for each position.
        cost: the model whose attention is priced.
        geometry: scores of models.
        unscored: models that could not be scored, with the reason.
        bias: what `af.bias.capture` found.
        trace: what `af.knowledge.trace` found.
        details: more rows for the provenance.
    """

    title: str
    masks: tuple[Mask, ...] = ()
    flow: Flow | None = None
    no_order: str = ""
    check: TaskReport | None = None
    verification: Verification | None = None
    audit: AuditReport | None = None
    model: str | None = None
    labels: tuple[str, ...] | None = None
    cost: CostModel = field(default_factory=CostModel)
    geometry: tuple[GeometryScores, ...] = ()
    unscored: Mapping[str, str] = field(default_factory=dict[str, str])
    bias: BiasMap | None = None
    trace: Trace | None = None
    details: Mapping[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def layers_of(self) -> list[tuple[Mask, list[int]]]:
        """Each distinct mask with the layers (from 1) that use it, in order of first use."""
        found: list[tuple[Mask, list[int]]] = []
        for layer, mask in enumerate(self.masks, 1):
            known = next((layers for other, layers in found if other is mask or other == mask), None)
            if known is None:
                found.append((mask, [layer]))
            else:
                known.append(layer)
        return found


@dataclass(frozen=True)
class Section:
    """One part of a report.

    Attributes:
        name: anchor within the page, unique.
        title: heading.
        body: everything below the heading.
    """

    name: str
    title: str
    body: Html


SectionFunction = Callable[[Subject], Section | None]


def order_of(masks: Sequence[Mask], stacked: bool) -> tuple[Flow | None, str]:
    """The flow of the masks, or None and the reason."""
    if not masks:
        return None, "no mask was given"
    queries, keys = masks[0].shape
    if queries != keys:
        return None, f"queries and keys are different sequences ({queries} and {keys}): information does not return"
    if queries > LARGEST_ORDER:
        return None, f"the order is not computed above {LARGEST_ORDER} positions"
    return analyze(list(masks) if stacked else masks[0]), ""
