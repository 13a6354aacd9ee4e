"""Other inputs than the audited positions, such as images: do their rows reach the answers to other rows?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attnflow.audit import rounding
from attnflow.audit.fields import batch_sets
from attnflow.audit.inputs import Inputs, where_chosen
from attnflow.audit.passes import Key, Recording, Runner
from attnflow.audit.report import Violation
from attnflow.audit.rows import OutputLayout, as_numbers
from attnflow.models.passes.evaluation import REFUSALS, precision, refusal


def mixed_beside(
    runner: Runner, base: Recording, layouts: Mapping[str, OutputLayout]
) -> tuple[list[Violation], list[str]]:
    """(what moves with another row of an input with rows of its own, notes on the inputs that were not tested)."""
    violations, notes, inputs = list[Violation](), list[str](), runner.inputs
    related = [layout for layout in layouts.values() if layout.related and layout.form != "pairs"]
    own = inputs.batch // inputs.group
    rows = {layout.shape[layout.form == "related"] for layout in related} | {own}
    for name, value in inputs.beside.items() if inputs.batched else ():
        if len(value) in rows:
            found = rows_beside(runner, base, name)
        else:
            found = f"there are {len(value)} for {own} sequences" if own > 1 else None
        if isinstance(found, Violation):
            violations.append(found)
        elif found is not None:
            notes.append(f"not tested: whether rows of {name} reach others; {found}")
    return violations, notes


def rows_beside(runner: Runner, base: Recording, name: str) -> Violation | str | None:
    """The first output with a row that moves with another row of the input `name`; why it was not tested, if so.

    Cost: 2 ceil(log2(rows)) passes; where something moves, up to four for each row, in two precisions.
    """
    count, read = len(runner.inputs.kwargs[name]), False
    for chosen in (rows[:, 0] for rows in batch_sets(count, 1)):
        try:
            after = runner.record(with_other_rows(runner.inputs, name, chosen).base)
        except REFUSALS as error:
            return f"the model does not run when they change ({refusal(error)})"
        outputs = [
            _readings([base, after], key, runner.inputs, count) for key in base if not key.module and key in after
        ]
        read |= any(outputs)
        if any(all(not torch.equal(b[~chosen], a[~chosen]) for b, a in each) for each in outputs if each):
            for rows in (*torch.eye(count, dtype=torch.bool)[chosen], chosen):
                found = _mixed(runner, name, rows)
                if found is not None:
                    return found
    return None if read or count == 1 else "no output has a row for each of them"


def with_other_rows(inputs: Inputs, name: str, rows: Tensor) -> Inputs:
    value = inputs.kwargs[name]
    moved = value.flip(-1) + (value.std() if value.is_floating_point() else 0)
    whole = value == value.round()  # among other numbers these are places, such as the row of a patch
    places = whole & where_chosen(whole.flatten(1).all(1)[:, None], torch.zeros_like(whole), whole)
    changed = where_chosen(rows[:, None], torch.where(places, value, moved), value)
    return replace(inputs, kwargs={**inputs.kwargs, name: changed})


def _readings(recordings: list[Recording], key: Key, inputs: Inputs, count: int) -> list[list[Tensor]]:
    """An output of each recording, [rows, 1, features], with its first or second axis as rows if that is as long."""
    tensors = [as_numbers(recording[key].raw) for recording in recordings]
    if not tensors[0].ndim or len({tensor.shape for tensor in tensors}) > 1:
        return []
    if inputs.group > 1 and len(tensors[0]) == inputs.batch == inputs.group * count:  # several sequences for a row
        return [[tensor.reshape(count, 1, -1) for tensor in tensors]]
    turned = [tensor.transpose(0, 1) for tensor in tensors if tensor.ndim > 1]  # columns, or stacked layers
    readings = [reading for reading in (tensors, turned) if reading and len(reading[0]) == count]
    return [[tensor[..., None].flatten(1)[:, None] for tensor in reading] for reading in readings]


def _mixed(runner: Runner, name: str, rows: Tensor) -> Violation | None:
    calls = runner.inputs, with_other_rows(runner.inputs, name, rows)
    recordings = [runner.record(call.base) for call in calls]
    other, confirmed = rounding.other_precision(runner.dtype), True
    try:
        with precision(runner.model, other):
            recordings += [runner.record(call.in_precision(other).base) for call in calls]
    except REFUSALS:  # what moved stands, unconfirmed
        recordings, confirmed = recordings * 2, None
    for key in recordings[0]:
        if key.module or any(key not in recording for recording in recordings):
            continue
        changes: list[Tensor] = []
        for before, after, *others in _readings(recordings, key, runner.inputs, len(rows)):
            change = rounding.row_change(after, before)
            leak = rounding.recurs(change, before, others[0], others[1], runner.dtype)
            changes.append(torch.where(leak[:, 0] & ~rows, change[:, 0], 0.0))
        if changes and all(change.any() for change in changes):
            change, label, source = changes[0], f"{type(runner.model).__name__}{key.leaf}", int(rows.long().argmax())
            place = "batch", None, label, None, 0, float(change.max()), source, int(change.argmax())
            return Violation(*place, confirmed=confirmed, why=f"row {source} of {name}")
    return None
