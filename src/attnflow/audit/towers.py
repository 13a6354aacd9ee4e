"""Models of two inputs: do the rows of one output move with other rows of the other input?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnflow.audit.passes import Runner
from attnflow.audit.report import Violation
from attnflow.audit.rounding import other_precision, recurs, row_change
from attnflow.audit.rows import as_numbers
from attnflow.models.passes.evaluation import REFUSALS, precision


def rows_beside(runner: Runner, name: str) -> list[Violation]:
    """The first output whose other rows, on either of its first axes, move with row 0 of another tower's input."""
    count, dtype = len(runner.inputs.kwargs[name]), runner.dtype
    value = runner.inputs.kwargs[name].clone()
    value[0] = value[0].flip(-1) + (value.std() if value.is_floating_point() else 0)
    inputs = replace(runner.inputs, kwargs={**runner.inputs.kwargs, name: value})
    calls = runner.inputs, inputs
    recordings = [runner.record(call.base) for call in calls]
    other, confirmed = other_precision(dtype), True
    try:
        with precision(runner.model, other):
            recordings += [runner.record(call.in_precision(other).base) for call in calls]
    except REFUSALS:  # what moved stands, unconfirmed
        recordings, confirmed = recordings[:2] * 2, None
    for key in recordings[0]:
        if key.module or any(key not in recording for recording in recordings):
            continue
        tensors = [as_numbers(recording[key].raw) for recording in recordings]
        if not tensors[0].ndim or len({tensor.shape for tensor in tensors}) > 1:
            continue
        turned = [tensor.transpose(0, 1) for tensor in tensors if tensor.ndim > 1]  # columns, or stacked layers
        readings = [reading for reading in (tensors, turned) if reading]
        changes: list[Tensor] = []
        for before, after, *others in ([tensor.flatten(1)[:, None] for tensor in read] for read in readings):
            change = row_change(after, before)[:, 0]
            leak = recurs(change[:, None], before, others[0], others[1], dtype)[:, 0]
            changes += [torch.where(leak, change, 0.0)[1:]] if len(change) == count else []
        if changes and all(change.any() for change in changes):
            change, label = changes[0], f"{type(runner.model).__name__}{key.leaf}"
            place = "batch", None, label, None, 0, float(change.max()), 0, 1 + int(change.argmax())
            return [Violation(*place, confirmed=confirmed, why=f"row 0 of {name}")]
    return []
