"""What a page says of a result: a paragraph, key numbers, sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from attnflow.order.flow import Flow
from attnflow.report.html import Content, Html
from attnflow.report.mask_facts import CostModel


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it.

    Attributes:
        name: anchor within the page.
        title: heading.
        body: everything below the heading.
    """

    name: str
    title: str
    body: Html


@dataclass(frozen=True)
class Part:
    """All that a page says of one result.

    Attributes:
        title: what the result is, as a heading.
        sections: in order.
        reading: the result in a sentence or two.
        numbers: the few that head the page, by name.
        source: rows of the provenance.
        failed: whether a judgement went against it; such a part comes first.
    """

    title: str
    sections: Sequence[Section]
    reading: Sequence[Content] = ()
    numbers: Sequence[tuple[str, Content]] = ()
    source: Sequence[tuple[str, Content]] = ()
    failed: bool = False


@dataclass(frozen=True)
class Context:
    """What a page knows besides a result.

    Attributes:
        flow: the order that the page is about, on which leaks are drawn; None without one.
        labels: a text for each position.
        cost: the model whose attention is priced.
    """

    flow: Flow | None = None
    labels: tuple[str, ...] | None = None
    cost: CostModel = field(default_factory=CostModel)
