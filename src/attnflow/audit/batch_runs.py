"""Runs a batch through its model: its loss is read off itself, its rows and documents run alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from attnflow._core.errors import AttnflowError
from attnflow.audit.alone import bound, compare_alone
from attnflow.audit.batch_labels import Findings, Mistake
from attnflow.audit.batch_reading import ANSWERS, Reading
from attnflow.audit.gradients import Targets
from attnflow.audit.loss import SeenLoss, in_columns
from attnflow.audit.packing import as_tensor
from attnflow.audit.targets import LossUnread, read_targets
from attnflow.models.evaluation import REFUSALS, refusal
from attnflow.models.subject import Subject


def loss_of_model(model: nn.Module, batch: Mapping[str, Any], reading: Reading, seen: Findings) -> SeenLoss | None:
    """Run the model's own loss and match it with the batch; what hinders it leaves the verdict open."""
    if reading.labels is None and reading.targets is None:
        return None
    try:
        targets = read_targets(partial(run_model, model), batch, least_width(batch), model)
    except LossUnread as error:
        why = f"{error}; pass the function that computes it to check_loss"
        seen.untested.append((f"the loss of {type(model).__name__}", why))
    except REFUSALS as error:
        seen.untested.append(
            (f"the loss of {type(model).__name__}", f"it does not run on this batch: {refusal(error)}")
        )
    else:
        return matched(targets, reading, seen)
    return None


def matched(targets: Targets, reading: Reading, seen: Findings) -> SeenLoss | None:
    """The loss in the batch's columns; where they do not fit, the verdict is left open."""
    loss = in_columns(targets, reading)
    if loss is None:
        shape = f"its logits have rows {list(targets.token.shape)}, the batch {list(reading.shape)}"
        seen.untested.append(("which positions the loss trains", shape))
    return loss


def rows_alone(model: nn.Module, batch: Mapping[str, Any], reading: Reading, seen: Findings) -> bool:
    """Run each row and document alone; whether all documents were seen to stay apart."""
    if reading.targets is not None:
        seen.unchecked.append(("rows alone", "positions of merged tasks do not begin at 0 alone"))
        return False
    places = None
    if reading.starts or reading.single:
        numbers = zip(reading.documents, reading.real, strict=True)
        parts = [(row, (d == n) & real) for row, (d, real) in enumerate(numbers) for n in d[real].unique().tolist()]
        places = [(row, part.nonzero()[:, 0]) for row, part in parts]
    try:
        call, labels, _ = bound(model, _call(model, batch))
        report = compare_alone(model, call, losses=labels, places=places)
    except (AttnflowError, *REFUSALS) as error:
        seen.untested.append(("rows alone", refusal(error)))
        return False
    for gap in report.differences:
        what = f"document {gap.document}" if reading.starts else "the row"
        size = f"{gap.difference:.3g} of {gap.scale:.3g}"
        message = f"outputs of {what} ({gap.output}) are others alone, by {size}: {gap.cause}"
        seen.mistakes.append(Mistake("alone", gap.row, gap.column or 0, 1, message))
    told = {*reading.starts, *(() if reading.counts is None else reading.counts[:1])}  # read as documents and labels
    left = [(f"alone: {what}", why) for what, why in report.uncompared if what not in told]
    seen.untested += left
    same = report.compared == report.documents and not report.differences and not left
    if same and report.compared:
        seen.checked.append(f"alone: {report.compared} rows or documents have the same outputs as in the batch")
    return same


def _call(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a model takes of a batch: what its forward names, and other entries that reach its layers or its loss."""
    parameters = inspect.signature(model.forward).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    call = {n: v for n, v in batch.items() if n in parameters or (anything and n not in ANSWERS)}
    if hasattr(model, "config") and Subject(model).takes_use_cache:
        call.setdefault("use_cache", False)  # as in training: a cache switches off packing by positions
    return call


def run_model(model: nn.Module, batch: Mapping[str, Any]) -> object:
    return model(**_call(model, batch))


def least_width(batch: Mapping[str, Any]) -> int:
    """The width from which a tensor may hold logits: all ids and labels of the batch are below it."""
    largest = [1]
    for name, value in batch.items():
        if name.endswith(("input_ids", "labels")) and value is not None and (tensor := as_tensor(value)).numel():
            largest.append(int(tensor.max()))
    return max(largest) + 1
