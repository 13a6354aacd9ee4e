"""`widget`: the studio in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow
from attnflow.report.live.design import Design
from attnflow.tasks.merging import MergedTask
from attnflow.tasks.task import Task

if TYPE_CHECKING:
    from attnflow.report.live.comm import Widget

Subject = Mask | Sequence[Mask] | Flow | Task | MergedTask


def widget(subject: Subject, *, labels: Sequence[str] | None = None) -> Widget:
    """The studio in a notebook: the page of `attnflow studio`, in Jupyter, marimo and VS Code.

    What a reader picks and paints is computed by the kernel, which takes structured operations and never code, with
    the limits of the studio but for time: what takes long is stopped by interrupting the kernel. Afterwards `.mask` is
    what was drawn, and `.task` has the labels that were set; assigning `.mask` shows another one.

    Args:
        subject: a mask, a mask per layer, first layer first, a flow, a task or a merged family.
        labels: a text for each position, such as its token.

    Returns:
        The widget, which a notebook shows as the last value of a cell: its traits are those of ipywidgets, and
        `revision`, the number of changes so far, which can be observed.

    Raises:
        MissingExtra: anywidget is not installed: pip install 'attnflow[widget]'.
        ValueError: more than 131,072 positions or 64 layers, a mask that is not square, or labels are not as many as
            positions.

    Cost: O(intervals); each answer costs what the same function costs, such as `af.order.analyze`.

    >>> import attnflow as af
    >>> drawn = af.report.widget(af.masks.sliding_window(16, 4))
    >>> drawn.mask == af.masks.sliding_window(16, 4)
    True
    """
    try:
        from attnflow.report.live.comm import Widget
    except ImportError as error:
        raise MissingExtra("anywidget", "widget", "the studio in a notebook") from error
    return Widget(design_for(subject, labels))


def design_for(subject: Subject, labels: Sequence[str] | None = None) -> Design:
    """Returns the initial design of a subject; raises as `widget`, and TypeError for other subjects."""
    if isinstance(subject, Task | MergedTask):
        design = Design.of_task(subject if isinstance(subject, Task) else subject.task)
    elif isinstance(subject, Flow):
        design = _of_masks(subject.masks, subject.num_layers is not None)
    elif isinstance(subject, Mask):
        design = _of_masks([subject], stacked=False)
    elif isinstance(subject, Sequence) and all(isinstance(each, Mask) for each in subject):  # pyright: ignore[reportUnnecessaryIsInstance]
        design = _of_masks(subject, stacked=True)
    else:
        raise TypeError(f"expected a mask, a mask per layer, a flow or a task, got {type(subject).__name__}")
    if labels is None:
        return design
    if len(labels) != design.size:
        raise ValueError(f"expected a label for each of {design.size} positions, got {len(labels)}")
    return Design.from_dict({**design.to_dict(), "tokens": [str(label) for label in labels]})


def _of_masks(masks: Sequence[Mask], stacked: bool) -> Design:
    return Design.from_dict({"layers": [{"mask": mask.to_dict()} for mask in masks], "stacked": stacked}, "the masks")
