"""Gradients of the terms, put together from what the kernels leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from attnflow.bias.impl.triton import launch, tuning
from attnflow.bias.impl.triton.blocks import BLOCK
from attnflow.bias.impl.triton.inputs import Inputs
from attnflow.bias.impl.triton.launch import Centred, PairParts, Upstream

_MANY: Final = 512  # buckets, from which on the gradient of the table is made from the one of all pairs


@dataclass(frozen=True)
class Needs:
    """What is asked for."""

    attention: bool
    guidance: bool
    product: bool
    offset: bool
    dense: bool

    @classmethod
    def of(cls, inputs: Inputs, asked: Sequence[bool]) -> Needs:
        """What is asked for, of what there is."""
        there = (inputs.query, inputs.rows, inputs.left, inputs.table, inputs.dense)
        return cls(*(wanted and tensor is not None for wanted, tensor in zip(asked, there, strict=True)))

    @property
    def pairs(self) -> bool:
        """Whether dB is needed at all."""
        return self.guidance or self.product or self.offset or self.dense


def term_gradients(
    inputs: Inputs, table: Tensor, up: Upstream, both: Centred | None, needs: Needs
) -> dict[str, Tensor]:
    """Gradients of the tensors behind the bias of pairs, by the names of `Inputs`; parameters summed over the batch."""
    batch, queries, groups = inputs.query.shape[0], inputs.query.shape[2], inputs.groups
    lists = inputs.relation.pair_rows
    rows, cols = lists.total.shape[2], lists.others.shape[3]
    hidden = inputs.rows.shape[3] if needs.guidance and inputs.rows is not None else 0
    many = inputs.table is not None and inputs.table.shape[1] > _MANY
    buckets = inputs.table.shape[1] if needs.offset and not many and inputs.table is not None else 0
    row_size, col_size = 2 * hidden * BLOCK + 2 * hidden, 2 * hidden * BLOCK
    every_pair = needs.product or (needs.offset and many)
    one_for_all = inputs.dense is not None and inputs.dense.shape[0] == 1 < batch and not every_pair
    change = None
    if every_pair or needs.dense:
        shape = (1 if one_for_all else batch, groups, queries, inputs.key.shape[2])
        change = up.delta.new_zeros(shape)
    row_sums = up.delta.new_empty((batch, groups, rows, row_size))
    col_sums = up.delta.new_empty((batch, groups, cols, col_size))
    found_buckets = up.delta.new_zeros((groups, buckets))
    for elements in _elements(batch, one_for_all):
        part = inputs.part(elements, slice(0, max(1, groups)))
        part_both = None if both is None else Centred(both.rows[elements], both.cols[elements])
        part_up = Upstream(up.gradient[elements], up.logsum[elements], up.delta[elements])
        part_table = table if table.shape[0] == 1 else table[elements]
        part_change = change if one_for_all or change is None else change[elements]
        maps = (elements.stop - elements.start) * groups
        step = max(1, min(rows, tuning.PART_BYTES // (4 * maps * cols * (row_size + col_size + buckets + 1))))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            parts = PairParts(
                up.delta.new_empty((maps, count, cols, row_size)) if hidden else None,
                up.delta.new_empty((maps, count, cols, col_size)) if hidden else None,
                up.delta.new_zeros((maps, count, cols, buckets)) if buckets else None,
            )
            launch.pairs_gradient(part, part_table, part_up, part_both, parts, part_change, first, count, one_for_all)
            if parts.rows is not None and parts.cols is not None:
                row_lists, col_lists = part.relation.pair_rows, part.relation.pair_columns
                launch.gather_rows(parts.rows, row_sums[elements], row_lists, first, count)
                launch.gather_columns(parts.cols, col_sums[elements], col_lists, first, count)
            if parts.buckets is not None:
                found_buckets += parts.buckets.sum(dim=(1, 2)).unflatten(0, (-1, groups)).sum(dim=0)
    gradients: dict[str, Tensor] = {}
    if needs.guidance and both is not None:
        gradients |= _guidance(inputs, both, row_sums, col_sums)
    if needs.offset:
        gradients["table"] = _table_of_pairs(inputs, change) if many and change is not None else found_buckets
    if needs.product and change is not None and inputs.left is not None and inputs.right is not None:
        gradients |= {"left": change @ inputs.right.float(), "right": change.mT @ inputs.left.float()}
    if needs.dense and change is not None and inputs.dense is not None:
        gradients["dense"] = change.sum(dim=0, keepdim=True) if inputs.dense.shape[0] < change.shape[0] else change
    return gradients


def _elements(batch: int, one_by_one: bool) -> Iterator[slice]:
    """Batch elements that are launched together: each alone where all of them add to one gradient."""
    step = 1 if one_by_one else batch
    for start in range(0, batch, step):
        yield slice(start, start + step)


def _guidance(inputs: Inputs, both: Centred, row_sums: Tensor, col_sums: Tensor) -> dict[str, Tensor]:
    """da = centre(gamma R) - norm part, dc likewise; d gamma = sum a R + sum c C; d shift and d weight by sums."""
    assert inputs.rows is not None
    assert inputs.cols is not None
    assert inputs.gain is not None
    hidden = inputs.rows.shape[3]
    size = 2 * hidden * BLOCK
    gain = inputs.gain[:, :, None]
    gradients: dict[str, Tensor] = {}
    gain_gradient = torch.zeros_like(inputs.gain)
    for name, sums, vectors, centred in (
        ("rows", row_sums[..., :size], inputs.rows, both.rows),
        ("cols", col_sums, inputs.cols, both.cols),
    ):
        # [batch, groups, blocks, 2, hidden, 64] -> two of [batch, groups, hidden, padded tokens]
        flow, norm = sums.unflatten(3, (2, hidden, BLOCK)).permute(3, 0, 1, 4, 2, 5).flatten(4)
        gain_gradient += (centred * flow).sum(dim=(0, 3))
        flow = flow * gain
        gradient = flow - flow.mean(dim=2, keepdim=True) - norm
        gradients[name] = gradient[..., : vectors.shape[2]].mT.to(vectors.dtype).contiguous()
    totals = row_sums[..., size:].sum(dim=(0, 2)).unflatten(1, (2, hidden))
    return gradients | {"gain": gain_gradient, "weight": totals[:, 0], "shift": totals[:, 1]}


def _table_of_pairs(inputs: Inputs, change: Tensor) -> Tensor:
    """Gradient of a long table from that of all pairs, in the order of the pairs: `index_put_` sorts on a GPU."""
    assert inputs.table is not None
    assert inputs.bucket_of is not None
    assert inputs.row_positions is not None
    assert inputs.column_positions is not None
    gradients = change.new_zeros((inputs.table.shape[1], inputs.table.shape[0]))
    last = inputs.bucket_of.shape[0] - 1
    for element in range(change.shape[0]):
        row = inputs.row_positions[min(element, inputs.row_positions.shape[0] - 1)]
        column = inputs.column_positions[min(element, inputs.column_positions.shape[0] - 1)]
        distance = (column[None, :] - row[:, None] + inputs.origin).clamp(0, last)
        gradients.index_put_((inputs.bucket_of[distance].long(),), change[element].permute(1, 2, 0), accumulate=True)
    return gradients.T.contiguous()
