"""`Collator` makes padded batches of merged tasks; `loss` trains on them, in a `Trainer` or in a loop of your own.

Labels travel as one int64 tensor [batch, n, 2, 1 + width], filled with -100: row 0 holds target ids, row 1 the bits of
float64 weights. The first column is always -100. `Trainer` may move that tensor, cast floats, and count entries other
than -100, with or without the first column. Nothing is shifted: a label stands at the position that predicts it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeAlias, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import get_worker_info

from attnflow._core.checks import LARGEST_SIZE, boolean, index_array, integer
from attnflow._core.plain import only_keys
from attnflow.masks.batches import batch as masks_of
from attnflow.masks.batches import block_diagonal
from attnflow.masks.mask import Mask
from attnflow.tasks.derivation import of_length_alone
from attnflow.tasks.embedding import NO_ID, additive, averaging, id_table
from attnflow.tasks.merging import merge_with
from attnflow.tasks.rollout_groups import rollouts
from attnflow.tasks.task import Task

_log: Final = logging.getLogger("attnflow.tasks")
_ROWS: Final = 2  # of the labels: target ids and weights
_DROPPED: Final = "; a Trainer drops entries that the model's forward does not name: set remove_unused_columns=False"
_UNKNOWN: Final = 1 << 40  # in the merged task of a length, id _UNKNOWN + i stands for data token i

Tasks = Task | Sequence[Task]
MaskForm = Literal["dense", "intervals"]


def _refuse(*_: object) -> NoReturn:
    raise ValueError(
        "family_fn reads the values of tokens, so its tasks do not depend on the length alone: "
        "use Collator(..., by_length=False)"
    )


_OPERATIONS: Final = "eq ne lt le gt ge hash bool add sub mul mod floordiv and rshift"
# A token id that a `Token` may hold but that no function may compare or compute with: its value is not yet known.
_UnknownId: Final = type("_UnknownId", (int,), {f"__{name}__": _refuse for name in _OPERATIONS.split()})


@dataclass(frozen=True, eq=False)
class _Template:
    """A merged task as tensors, with numbers in place of data tokens; samples of one structure share it."""

    ids: Tensor  # [n, width]
    position_ids: Tensor  # [n]
    labels: Tensor  # [n, rows, labels]
    mask: Mask
    bias: Tensor  # [n, n] of the scores, or empty

    @classmethod
    def of(cls, tasks: Tasks, masks: str) -> _Template:
        task, bias = tasks, torch.zeros(0, 0)
        if not isinstance(task, Task):
            merged = merge_with(task, sparse_bias=masks == "dense", dense_bias=False)
            task = merged.task
            bias = merged.log_multiplicity() if len(merged.multiplicity) else bias
        return cls(id_table(task), task.position_ids, _packed(task), task.mask, bias)

    def filled(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ids, targets = (
            torch.where(table >= _UNKNOWN, tokens[(table - _UNKNOWN).clamp(min=0)], table)
            for table in (self.ids, self.labels[:, 0])
        )
        labels = torch.cat([targets[:, None], self.labels[:, 1:]], dim=1)
        last = torch.iinfo(torch.int64).max  # ids of a token are sorted, the empty places last
        ids = torch.where(ids == NO_ID, last, ids).sort(dim=-1).values
        return torch.where(ids == last, NO_ID, ids), labels

    def says(self, other: _Template, tokens: Sequence[int]) -> bool:
        data = torch.tensor([*tokens, 0])
        pairs = [*zip(self.filled(data), other.filled(data), strict=True), (self.position_ids, other.position_ids)]
        pairs.append((self.bias, other.bias))
        return all(torch.equal(mine, others) for mine, others in pairs) and self.mask == other.mask


_Sample: TypeAlias = tuple[_Template, Tensor, Tensor]  # with the sample's own ids [n, width] and labels


def _length(row: list[_Sample]) -> int:
    return sum(len(ids) for _, ids, _ in row)


class Collator:
    """Turns samples into a batch of merged tasks, so that one forward pass trains every sample's whole family.

    A batch holds
    - `input_ids` int64 [batch, n]; with averaged tokens [batch, n, width], filled up with -100; the model
      then needs `af.tasks.average_embeddings(model)`;
    - `attention_mask` in the form that `masks` names. "dense" is additive, [batch, 1, n, n] of `dtype`; any model takes
      it. Families that are not dense merge with `key_bias` here, and the logarithms are added to the mask.
      "intervals" is int32 [batch, 1, rows, n], the row intervals of `af.masks.batch`, for a model under
      `af.masks.attach(model, "batch")` with any backend;
    - `position_ids` int64 [batch, n];
    - `labels` for `af.tasks.loss`, which takes several weighted labels per position and shifts nothing.

    Shorter sequences are padded at the end: padding attends only to itself, and nothing attends to it. With `pack_to`,
    a row holds several samples side by side, each with its own mask and position ids, so that none sees another. All
    entries are plain tensors with the batch dimension first, so worker processes, pinning and `accelerate` handle them.

        Trainer(model, args, train_dataset=samples, data_collator=af.tasks.Collator(af.tasks.causal_lm),
                compute_loss_func=af.tasks.loss)

    Args:
        family_fn: a function from a sample's token ids to its tasks, which are merged, or to one task, which is used
            unchanged, whatever its mask. `functools.partial` binds further arguments. It may also be
            `af.tasks.rollouts`, whose samples are groups (with `Trainer`: `remove_unused_columns=False`).
        by_length: whether the structure of the tasks depends on the number of tokens alone, so that one merge serves
            all samples of a length. By default True for the families of `af.tasks` (also under `partial`) and False for
            any other function. True is checked: the function must not compare tokens or compute with them, and for the
            first sample of each length its tasks must equal those of the shared structure.
        dtype: of the mask; it must be the model's.
        pad_to_multiple_of: pads the merged length up to a multiple of this, so that batches can share a compiled model.
        masks: the form of `attention_mask`.
        min_width: with "intervals", the least number of intervals per query to make room for, rounded up to 2^k.
        pack_to: most positions of a row, in which samples are packed: each goes into the first row with room for it.
            By default every sample has a row of its own.
    """

    def __init__(
        self,
        family_fn: Callable[..., Tasks],
        by_length: bool | None = None,
        dtype: torch.dtype = torch.float32,
        pad_to_multiple_of: int = 1,
        masks: MaskForm = "dense",
        min_width: int = 1,
        pack_to: int | None = None,
    ) -> None:
        if not callable(family_fn):
            raise TypeError(f"family_fn must be a function of token ids, got {type(family_fn).__name__}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be the model's floating-point type, got {dtype}")
        if masks not in get_args(MaskForm):
            raise ValueError(f"masks must be one of {', '.join(map(repr, get_args(MaskForm)))}, got {masks!r}")
        library = of_length_alone(family_fn)
        self.family_fn = family_fn
        self.by_length = library if by_length is None else boolean("by_length", by_length)
        self.dtype = dtype
        self.pad_to_multiple_of = integer("pad_to_multiple_of", pad_to_multiple_of, 1, LARGEST_SIZE)
        self.masks = masks
        self.min_width = integer("min_width", min_width, 1, LARGEST_SIZE)
        self.pack_to = None if pack_to is None else integer("pack_to", pack_to, 1, LARGEST_SIZE)
        self._test_first, self._told = not library, False
        self._templates: dict[int, _Template] = {}
        self._of_groups = getattr(family_fn, "func", family_fn) is rollouts  # under `partial`

    def __call__(self, features: Sequence[object]) -> dict[str, Tensor]:
        """Make a batch of samples, each a sequence of token ids or a mapping with "input_ids".

        Tokens where a mapping's "attention_mask" is 0 are left out; its other entries are not used. For
        `af.tasks.rollouts` a sample is a mapping with the function's arguments: "prompts", "responses", and others.

        Raises:
            ValueError: no samples, a sample without "input_ids", or one that `family_fn` refuses or that is longer than
                `pack_to`; the message names it.
        """
        if not len(features):
            raise ValueError("a batch needs at least one sample, got none")
        rows: list[list[_Sample]] = []
        for number, feature in enumerate(features):
            try:
                if self._of_groups:
                    tokens, template = [], _Template.of(self.tasks_of(feature), self.masks)
                else:
                    tokens = _tokens(feature)
                    template = self._template(tokens)
            except (ValueError, TypeError) as error:
                raise type(error)(f"sample {number} of the batch: {error}") from error
            self._place((template, *template.filled(torch.tensor([*tokens, 0]))), number, rows)
        return self._padded(rows)

    def _place(self, sample: _Sample, number: int, rows: list[list[_Sample]]) -> None:
        """Into the first row with room, or a new one."""
        size, most = len(sample[1]), self.pack_to
        if most is not None and size > most:
            raise ValueError(f"sample {number} of the batch takes {size} positions, more than pack_to={most}")
        row = next((row for row in rows if most is not None and _length(row) + size <= most), None)
        if row is None:
            rows.append(row := [])
        row.append(sample)

    def tasks_of(self, feature: object) -> Tasks:
        """The tasks that `family_fn` gives for a sample."""
        if not self._of_groups:
            return self.family_fn(_tokens(feature))
        if not isinstance(feature, Mapping):
            raise TypeError(
                f"a group of rollouts must be a mapping with prompts and responses, not {type(feature).__name__}"
            )
        values = cast(Mapping[str, object], feature)
        if not values:
            raise ValueError(f"expected a group of rollouts, with prompts and responses, got no entry{_DROPPED}")
        only_keys(values, "a group of rollouts", ("prompts", "responses"), ("weights",))
        return self.family_fn(**{name: value for name, value in values.items() if value is not None})

    def _template(self, tokens: list[int]) -> _Template:
        if not self.by_length:
            return _Template.of(self.family_fn(tokens), self.masks)
        if len(tokens) not in self._templates:
            unknown = [_UnknownId(_UNKNOWN + index) for index in range(len(tokens))]
            template = _Template.of(self.family_fn(unknown), self.masks)
            if self._test_first and not template.says(_Template.of(self.family_fn(tokens), self.masks), tokens):
                raise ValueError("family_fn's tasks depend on the tokens, not on their number: use by_length=False")
            self._templates[len(tokens)] = template
        return self._templates[len(tokens)]

    def _padded(self, rows: list[list[_Sample]]) -> dict[str, Tensor]:
        longest = max(map(_length, rows))
        n = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch, width = len(rows), max(ids.shape[1] for row in rows for _, ids, _ in row)
        if width > 1 and not self._told and get_worker_info() is None and not averaging():
            self._told = True
            _log.warning(
                "these samples have averaged tokens, so input_ids are [batch, n, %d]: call "
                "af.tasks.average_embeddings(model) before the model sees them",
                width,
            )
        input_ids = torch.full((batch, n, width), NO_ID, dtype=torch.int64)
        input_ids[:, :, 0] = 0  # at padded positions, which nothing reads
        position_ids = torch.zeros((batch, n), dtype=torch.int64)
        most = max(own.shape[2] for row in rows for _, _, own in row)
        labels = torch.full((batch, n, _ROWS, 1 + most), NO_ID, dtype=torch.int64)
        grid = masks_of([block_diagonal([template.mask for template, _, _ in row]) for row in rows], n)
        mask = additive(grid.dense(), self.dtype) if self.masks == "dense" else grid.row_intervals(self.min_width)
        for number, row in enumerate(rows):
            start = 0
            for template, ids, own in row:
                place = slice(start, start + len(ids))
                labels[number, place, :, 1 : 1 + own.shape[2]] = own
                input_ids[number, place, : ids.shape[1]] = ids
                position_ids[number, place] = template.position_ids
                if len(template.bias):
                    mask[number, :, place, place] += template.bias.to(self.dtype)
                start += len(ids)
        return {
            "input_ids": input_ids.squeeze(-1) if width == 1 else input_ids,
            "attention_mask": mask,
            "position_ids": position_ids,
            "labels": labels,
        }


def loss(
    outputs: object, labels: object, num_items_in_batch: Tensor | int | None = None, reduction: str = "mean"
) -> Float[Tensor, "*rows"]:
    """Weighted cross-entropy of all labels of a batch: `Trainer(compute_loss_func=af.tasks.loss)`.

    Sum over labels of weight x cross-entropy, divided by the number of labels. HF's own loss would shift labels by
    one position and take one label each: never pass these labels to a model. Weights may be negative.

    Args:
        outputs: logits [batch, n, vocabulary], or a model's output with `.logits`.
        labels: the "labels" of a `Collator` batch, or the batch itself.
        num_items_in_batch: `Trainer`'s count over accumulated batches, which counts each label once for each row.
        reduction: "mean" over labels, "sum", or "none": the weighted cross-entropy of each label, [batch, n, width],
            with 0 where a position has fewer labels. With weights of 1 it is the target's negative log-probability.

    Returns:
        A scalar; 0 for a batch without labels. With "none" a tensor [batch, n, width].

    Raises:
        ValueError: the labels do not come from a `Collator`, or the logits belong to other positions.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"expected logits, or a model output with .logits, got {type(outputs).__name__}")
    targets, weights = _unpacked(labels)
    if logits.shape[:-1] != targets.shape[:-1]:
        raise ValueError(
            f"expected logits {[*targets.shape[:-1]]} + [vocabulary], one row for each position of the batch's labels, "
            f"got {[*logits.shape]}: pass the outputs of the model on the same batch, with logits of every position"
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


def _unpacked(batch: object) -> tuple[Int[Tensor, "*batch n width"], Float[Tensor, "*batch n width"]]:
    """(target ids, float64 weights) of a batch or its labels; -100 and 0 where a slot has no label."""
    tensor = cast(Mapping[str, object], batch).get("labels") if isinstance(batch, Mapping) else batch
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected the labels of an af.tasks.Collator batch, got {type(tensor).__name__}")
    if tensor.ndim < 3 or tensor.shape[-2] != _ROWS or tensor.shape[-1] < 2:
        raise ValueError(
            f"expected the labels of an af.tasks.Collator batch, [batch, n, {_ROWS}, 1 + width], got "
            f"{tuple(tensor.shape)}: make the batch with af.tasks.Collator(family_fn), which says what each "
            "position predicts; a plain tensor of token ids does not"
        )
    targets, weights = tensor[..., 1:].unbind(-2)
    return targets, torch.where(targets == NO_ID, 0.0, weights.contiguous().view(torch.float64))


def _packed(task: Task) -> Int[Tensor, "n rows width"]:
    """The labels of a task, filled with -100: target ids, then the bits of the weights."""
    labels, position = task.targets, task.targets.table["position"]
    count = np.bincount(position, minlength=task.size)
    order = np.argsort(position, kind="stable")
    place = position[order]
    slot = np.arange(len(order)) - (np.cumsum(count) - count)[place]  # among the labels of its position
    table = torch.full((task.size, _ROWS, max(int(count.max(initial=0)), 1)), NO_ID, dtype=torch.int64)
    for row, name in enumerate(("target_id", "weight")):
        table[place, row, slot] = torch.from_numpy(labels.table[name][order].view(np.int64))
    return table


def _tokens(feature: object) -> list[int]:
    if not isinstance(feature, Mapping):
        return index_array("tokens", feature).tolist()
    sample = cast(Mapping[str, Any], feature)
    if "input_ids" not in sample:
        raise ValueError(f'expected token ids or a mapping with "input_ids", got the keys {sorted(sample)}{_DROPPED}')
    tokens = index_array("input_ids", sample["input_ids"])
    if sample.get("attention_mask") is None:
        return tokens.tolist()
    real = index_array("attention_mask", sample["attention_mask"])
    if len(real) != len(tokens):
        raise ValueError(f"input_ids and attention_mask differ in length: {len(tokens)} and {len(real)}")
    return tokens[real != 0].tolist()
