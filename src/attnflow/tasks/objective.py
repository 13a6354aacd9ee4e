"""The loss of a batch of tasks: weighted cross-entropy over any number of labels per position.

Labels travel as one int64 tensor [batch, n, 2, 1 + width]: `[..., 0, 1:]` holds target ids and `[..., 1, 1:]` the bits
of their float64 weights, both filled with -100. The first column is always -100. That shape survives what `Trainer`
does with labels: it counts entries other than -100, over `labels[..., 1:]` for causal models and over all of `labels`
for others (both count every label twice, which `loss` knows), moves them between devices, and casts floats, not
integers. Nothing is shifted: a label stands at the position that predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from attnflow.tasks.embedding import NO_ID


def pack_labels(
    targets: Int[Tensor, "*batch n width"], weights: Float[Tensor, "*batch n width"]
) -> Int[Tensor, "*batch n two columns"]:
    """Targets (filled with -100) and their weights as one int64 tensor."""
    there = targets != NO_ID
    bits = torch.where(there, weights.to(torch.float64).contiguous().view(torch.int64), NO_ID)
    return F.pad(torch.stack([targets, bits], dim=-2), (1, 0), value=NO_ID)


def unpack_labels(
    labels: Int[Tensor, "*batch n two columns"],
) -> tuple[Int[Tensor, "*batch n width"], Float[Tensor, "*batch n width"]]:
    """(targets filled with -100, float64 weights that are 0 there) of packed labels.

    Raises:
        ValueError: not the labels of a `Collator`.
    """
    if labels.ndim < 3 or labels.shape[-2] != 2 or labels.shape[-1] < 2:
        raise ValueError(
            f"expected the labels of an af.tasks.Collator batch, [batch, n, 2, 1 + width], got {tuple(labels.shape)}: "
            "make the batch with af.tasks.Collator(family_fn), which says what each position predicts; a plain tensor "
            "of token ids does not"
        )
    targets, bits = labels[..., 0, 1:], labels[..., 1, 1:]
    return targets, torch.where(targets == NO_ID, 0.0, bits.contiguous().view(torch.float64))


def loss(
    outputs: object, labels: object, num_items_in_batch: Tensor | int | None = None, reduction: str = "mean"
) -> Float[Tensor, ""]:
    """Weighted cross-entropy of all labels of a batch: `Trainer(compute_loss_func=af.tasks.loss)`.

    Sum over labels of weight x cross-entropy, divided by the number of labels. HF's own loss would shift labels by
    one position and take one label each: never pass these labels to a model.

    Args:
        outputs: logits [batch, n, vocabulary], or a model's output with `.logits`.
        labels: the "labels" of a `Collator` batch, or the batch itself.
        num_items_in_batch: what `Trainer` counts over accumulated batches; it counts each label twice.
        reduction: "mean" over labels, or "sum".

    Returns:
        A scalar; 0 for a batch without labels.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    logits, packed = _logits(outputs), _labels(labels)
    targets, weights = unpack_labels(packed)
    if logits.shape[:-1] != packed.shape[:-2]:
        raise ValueError(
            f"expected logits {[*packed.shape[:-2]]} + [vocabulary], one row for each position of the batch's labels, "
            f"got {[*logits.shape]}: pass the outputs of the model on the same batch, with logits of every position"
        )
    places = (targets != NO_ID).nonzero(as_tuple=True)
    chosen = logits[places[:-1]]
    entropy = F.cross_entropy(
        chosen.to(torch.promote_types(chosen.dtype, torch.float32)), targets[places], reduction="none"
    )
    total = (entropy * weights[places].to(entropy.dtype)).sum()
    if reduction == "sum":
        return total
    count = len(places[0]) if num_items_in_batch is None else num_items_in_batch / 2
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def _logits(outputs: object) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"expected logits or a model output that has them, got {type(outputs).__name__}")
    return logits


def _labels(labels: object) -> Tensor:
    packed = cast(Mapping[str, object], labels).get("labels") if isinstance(labels, Mapping) else labels
    if not isinstance(packed, Tensor):
        raise TypeError(f"expected the labels of an af.tasks.Collator batch, got {type(packed).__name__}")
    return packed
