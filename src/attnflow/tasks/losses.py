"""Labels as tensors of a batch, and the `loss` on them.

In a batch labels travel as one int64 tensor [batch, n, 4, 1 + width]. `[..., 0, 1:]` holds target ids, the rows below
the bits of their float64 weights, advantages and log-probabilities: NaN where a label has none. All are filled with
-100, and the first column is always -100. That shape survives what `Trainer` does with labels: it counts entries other
than -100, over `labels[..., 1:]` for causal models and over all of `labels` for others (both count a label once for
each row, which `loss` knows; accumulated batches may differ in what their labels have, so all have four rows), moves
them between devices, and casts floats, not integers. Nothing is shifted: a label stands at the position that predicts
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from attnflow.tasks.embedding import NO_ID
from attnflow.tasks.task import Task

_NUMBERS: Final = ("weight", "advantage", "old_logprob")  # of a label, in the order of the rows
_ROWS: Final = 1 + len(_NUMBERS)


@dataclass(frozen=True, eq=False)
class LabelTensors:
    """What the positions of a batch predict, as tensors [batch, n, width]: up to `width` labels for each position.

    Attributes:
        targets: target ids, int64, -100 where there is no label.
        weights: float64, 0 where there is no label.
        advantages: float64, 0 where there is no label; None if no label of the batch has one, NaN for a label that has
            none beside some that do.
        old_logprobs: log-probabilities in nats under the policy that sampled, float64; otherwise as `advantages`.
    """

    targets: Int[Tensor, "*batch n width"]
    weights: Float[Tensor, "*batch n width"]
    advantages: Float[Tensor, "*batch n width"] | None
    old_logprobs: Float[Tensor, "*batch n width"] | None

    @classmethod
    def of(cls, labels: object) -> LabelTensors:
        """The "labels" of a `Collator` batch, or of the batch itself; see `Collator.label_tensors`."""
        tensor = cast(Mapping[str, object], labels).get("labels") if isinstance(labels, Mapping) else labels
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected the labels of an af.tasks.Collator batch, got {type(tensor).__name__}")
        if tensor.ndim < 3 or tensor.shape[-2] != _ROWS or tensor.shape[-1] < 2:
            raise ValueError(
                f"expected the labels of an af.tasks.Collator batch, [batch, n, {_ROWS}, 1 + width], got "
                f"{tuple(tensor.shape)}: make the batch with af.tasks.Collator(family_fn), which says what each "
                "position predicts; a plain tensor of token ids does not"
            )
        targets = tensor[..., 0, 1:]
        numbers: list[Tensor | None] = []
        for row in range(1, _ROWS):
            values = torch.where(targets == NO_ID, 0.0, tensor[..., row, 1:].contiguous().view(torch.float64))
            numbers.append(None if row > 1 and bool((values.isnan() | (targets == NO_ID)).all()) else values)
        return cls(targets, cast(Tensor, numbers[0]), *numbers[1:])


def packed(task: Task) -> Int[Tensor, "n rows width"]:
    """The labels of a task, filled with -100: target ids, and the bits of each number, NaN for one that is missing."""
    labels, position = task.targets, task.targets.column("position")
    count = np.bincount(position, minlength=task.size)
    order = np.argsort(position, kind="stable")
    place = position[order]
    slot = np.arange(len(order)) - (np.cumsum(count) - count)[place]  # among the labels of its position
    names = ("target_id", *_NUMBERS)
    table = torch.full((task.size, len(names), max(int(count.max(initial=0)), 1)), NO_ID, dtype=torch.int64)
    for row, name in enumerate(names):
        table[place, row, slot] = torch.from_numpy(labels.column(name)[order].view(np.int64))
    return table


def batched(labels: Sequence[Tensor], n: int) -> Int[Tensor, "batch n rows columns"]:
    """The packed labels of several tasks, padded to n positions."""
    width = max(each.shape[2] for each in labels)
    table = torch.full((len(labels), n, _ROWS, 1 + width), NO_ID, dtype=torch.int64)
    for row, each in enumerate(labels):
        table[row, : len(each), :, 1 : 1 + each.shape[2]] = each
    return table


def loss(
    outputs: object, labels: object, num_items_in_batch: Tensor | int | None = None, reduction: str = "mean"
) -> Float[Tensor, "*rows"]:
    """Weighted cross-entropy of all labels of a batch: `Trainer(compute_loss_func=af.tasks.loss)`.

    Sum over labels of weight x cross-entropy, divided by the number of labels. HF's own loss would shift labels by
    one position and take one label each: never pass these labels to a model. Weights may be negative.

    Args:
        outputs: logits [batch, n, vocabulary], or a model's output with `.logits`.
        labels: the "labels" of a `Collator` batch, or the batch itself.
        num_items_in_batch: what `Trainer` counts over accumulated batches; it counts each label once for each row.
        reduction: "mean" over labels, "sum", or "none": weight x cross-entropy of each label, [batch, n, width], 0
            where there is none; `Collator.label_tensors` has the rest, in the same places. With weights of
            1 it is the negative log-probability of the target.

    Returns:
        A scalar; 0 for a batch without labels. With "none" a tensor [batch, n, width].

    Raises:
        ValueError: the labels carry advantages, which "mean" and "sum" would leave out.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    logits, tensors = _logits(outputs), LabelTensors.of(labels)
    targets, weights = tensors.targets, tensors.weights
    if logits.shape[:-1] != targets.shape[:-1]:
        raise ValueError(
            f"expected logits {[*targets.shape[:-1]]} + [vocabulary], one row for each position of the batch's labels, "
            f"got {[*logits.shape]}: pass the outputs of the model on the same batch, with logits of every position"
        )
    if tensors.advantages is not None and reduction != "none":
        raise ValueError(
            'these labels carry advantages, which this loss does not use: take loss(..., reduction="none") and '
            "af.tasks.Collator.label_tensors(batch) for a policy loss of your own, or give them to rollouts as weights="
        )
    places = (targets != NO_ID).nonzero(as_tuple=True)
    chosen = logits[places[:-1]]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    terms = F.cross_entropy(chosen, targets[places], reduction="none") * weights[places].to(chosen.dtype)
    if reduction == "none":
        return terms.new_zeros(targets.shape).index_put(places, terms)
    total = terms.sum()
    if reduction == "sum":
        return total
    count = len(places[0]) if num_items_in_batch is None else num_items_in_batch / _ROWS
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def _logits(outputs: object) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"expected logits or a model output that has them, got {type(outputs).__name__}")
    return logits
