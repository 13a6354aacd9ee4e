"""`verify`: compares one pass of a real model over the merged task with a pass over every subtask alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnflow._core.checks import boolean
from attnflow._core.checks import number as finite
from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.models.passes.evaluation import evaluating, precision
from attnflow.models.subject import Loaded, Subject
from attnflow.tasks.embedding import require_runnable, require_targets, run
from attnflow.tasks.merging import MergedTask, one_mask
from attnflow.tasks.task import Task
from attnflow.tasks.tokens import TokenSequence

_FLOOR: Final = 1e-3  # of the largest gradient of the model: below it, a parameter's own gradient is rounding
_Sums = dict[tuple[int, int], float]  # what the labels of each (subtask, merged position) add to the loss


@dataclass(frozen=True)
class TaskDifference:
    """The difference between one subtask run alone and its part of the merged task.

    Attributes:
        task: its place in the family.
        output_difference: the largest difference of the logits at its labelled positions, relative to the largest.
        loss: its summed weighted cross-entropy.
        loss_difference: the largest difference of a position's loss, relative to the largest loss; a label that one of
            the two lacks counts as a loss of 0.
    """

    task: int
    output_difference: float
    loss: float
    loss_difference: float


@dataclass(frozen=True)
class Verification(Result):
    """How far a merged task is from its subtasks on one model.

    Attributes:
        output_difference: the largest of all subtasks.
        gradient_difference: the largest difference between the gradient of the merged loss and the sum of the
            subtasks' gradients, relative to the parameter's largest gradient. A thousandth of the model's largest
            gradient counts if it is larger, as some gradients (of key biases) are only rounding. None if not compared.
        loss_difference: the largest of all subtasks; infinite if the merged task labels a subtask that has no labels.
        merged_loss: summed weighted cross-entropy of the merged task.
        tasks: the subtasks that have labels; their losses add up to the merged loss.
        tolerance: the relative difference that rounding may cause.
    """

    output_difference: float
    gradient_difference: float | None
    loss_difference: float
    merged_loss: float
    tasks: tuple[TaskDifference, ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether outputs, losses and, if compared, gradients agree within the tolerance (NaN never does)."""
        gradients = 0.0 if self.gradient_difference is None else self.gradient_difference
        return all(value <= self.tolerance for value in (self.output_difference, self.loss_difference, gradients))

    def rows(self) -> list[dict[str, object]]:
        """One row for each subtask."""
        return [vars(each).copy() for each in self.tasks]

    def __str__(self) -> str:
        gradients = "not compared" if self.gradient_difference is None else f"{self.gradient_difference:.1e}"
        return (
            f"merged task against {plural(len(self.tasks), 'subtask')} run alone: largest relative difference of "
            f"outputs {self.output_difference:.1e}, of losses {self.loss_difference:.1e}, of gradients {gradients}"
        )


def verify(
    family: Sequence[Task],
    merged: MergedTask,
    model: nn.Module | Loaded,
    gradients: bool = True,
    tolerance: float | None = None,
) -> Verification:
    """Run a model once on the merged task and on every subtask alone, and compare the results.

    Every run gets input embeddings (so that averaged tokens work), explicit position ids and a 4D additive mask. The
    model runs in evaluation mode; afterwards its mode and gradients are restored. A float64 model runs in float64
    throughout, even where its code converts to float32.

    Args:
        family: the subtasks.
        merged: their merged task. To test another mask, pass `dataclasses.replace(merged, task=Task(..., mask))`.
        model: a Hugging Face model with logits, eager or SDPA attention; or what `af.load_model` returned.
        gradients: also compare gradients, which takes a backward pass per subtask, and memory for the sum.
        tolerance: relative difference up to which the result is `ok`; by default the square root of the precision's
            unit, 1.5e-8 in float64 and 3.5e-4 in float32. A correct merge gives at most 1e-12 in float64, a wrong one
            0.1 or more.

    Raises:
        UnsupportedArchitecture: the model cannot take embeddings, position ids and a 4D mask.
        ValueError: `merged` is not of this family, nothing is labelled, a row of a mask allows no key, a token id is
            outside of the vocabulary, or no parameter requires a gradient.
    """
    subject, tasks, whole = Subject.of(model), list(map(one_mask, family)), one_mask(merged.task)
    model = subject.model
    gradients = boolean("gradients", gradients)
    tolerance = None if tolerance is None else finite("tolerance", tolerance, 0.0)
    _require_same_family(tasks, merged)
    for task in (*tasks, whole):
        if task.size and int(task.mask.row_counts().min()) == 0:
            raise ValueError("a position may attend to nothing: its softmax is undefined; allow it to attend to itself")
    if not any(len(task.targets) for task in tasks):
        raise ValueError("verify compares labelled positions, but no task of the family has a label")
    require_runnable(subject)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad] if gradients else []
    if gradients and not parameters:
        raise ValueError("no parameter of the model requires a gradient; pass gradients=False to compare outputs only")
    double = all(parameter.dtype == torch.float64 for parameter in model.parameters())
    with evaluating(model), torch.set_grad_enabled(gradients), precision(model, torch.float64 if double else None):
        logits = run(subject, whole, merged.log_multiplicity())
        terms = _terms(logits, merged.task)
        merged_loss, merged_sums = float(terms.sum().detach()), _sums(merged.task, terms)
        merged_gradients = _gradients(terms.sum(), parameters)
        logits = logits.detach()
        details: list[TaskDifference] = []
        summed = [torch.zeros_like(parameter) for parameter in parameters]
        for number, (task, place) in enumerate(zip(tasks, merged.positions, strict=True)):
            if not len(task.targets):
                continue
            alone = run(subject, task)
            terms = _terms(alone, task)
            for total, gradient in zip(summed, _gradients(terms.sum(), parameters), strict=True):
                total += gradient
            labelled = np.unique(task.targets.table["position"])
            outputs = _relative(logits[place[labelled]], alone.detach()[labelled])
            own = dict[tuple[int, int], float]()  # labels of one task may share a merged position
            for (_, label), term in _sums(task, terms).items():
                key = number, int(place[label])
                own[key] = own.get(key, 0.0) + term
            theirs = {key: term for key, term in merged_sums.items() if key[0] == number}
            details.append(TaskDifference(number, outputs, float(terms.sum().detach()), _apart(theirs, own)))
    strangers = {key[0] for key in merged_sums} - {each.task for each in details}
    return Verification(
        _largest([each.output_difference for each in details]),
        _gradient_difference(merged_gradients, summed) if gradients else None,
        _largest([*(each.loss_difference for each in details), *(float("inf") for _ in strangers)]),
        merged_loss,
        tuple(details),
        torch.finfo(logits.dtype).eps ** 0.5 if tolerance is None else tolerance,
    )


def _require_same_family(tasks: list[Task], merged: MergedTask) -> None:
    sequence = merged.task.sequence
    same = len(tasks) == len(merged.positions) and all(
        len(place) == task.size and TokenSequence(sequence.table, sequence.index[place]).equals(task.sequence)
        for task, place in zip(tasks, merged.positions, strict=True)
    )
    if not same:
        raise ValueError("merged was not made from this family: pass af.tasks.merge(family) of the same tasks")


def _terms(logits: Tensor, task: Task) -> Tensor:
    if not len(task.targets):
        return logits.reshape(-1)[:1] * 0  # of a merged task that lost its labels: gradients differ, nothing fails
    positions, targets, weights = (
        torch.tensor(task.targets.table[name], device=logits.device) for name in ("position", "target_id", "weight")
    )
    require_targets(targets, logits)
    precise = logits[positions].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, targets, reduction="none") * weights.to(precise.dtype)


def _sums(task: Task, terms: Tensor) -> _Sums:
    sums: _Sums = {}
    keys = zip(task.targets.table["task"].tolist(), task.targets.table["position"].tolist(), strict=True)
    for key, term in zip(keys, terms.detach().tolist(), strict=False):
        sums[key] = sums.get(key, 0.0) + term
    return sums


def _apart(values: _Sums, reference: _Sums) -> float:
    """The largest difference, relative to the largest reference; a missing value counts as 0."""
    keys = sorted(values.keys() | reference.keys())
    one, two = (torch.tensor([part.get(key, 0.0) for key in keys], dtype=torch.float64) for part in (values, reference))
    return _relative(one, two)


def _gradients(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    if not parameters:
        return []
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def _gradient_difference(merged: list[Tensor], summed: list[Tensor]) -> float:
    scale = [float(gradient.abs().max()) if gradient.numel() else 0.0 for gradient in summed]
    floor = _FLOOR * max(scale)
    return _largest([_relative(m, s, max(own, floor)) for m, s, own in zip(merged, summed, scale, strict=True)])


def _relative(value: Tensor, reference: Tensor, scale: float | None = None) -> float:
    if not value.numel():
        return 0.0
    difference = float((value - reference).abs().max())
    size = float(reference.abs().max()) if scale is None else scale
    return difference / size if size > 0 else (0.0 if difference == 0 else float("inf"))


def _largest(values: list[float]) -> float:
    """The maximum, NaN if any is NaN."""
    return float(torch.tensor(values, dtype=torch.float64).max())
