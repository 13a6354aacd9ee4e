"""The backward pass of a call: pieces that fit, and the gradients of the terms put together from what kernels leave."""

# A launch takes its grid, warps and stages beside the kernel's own arguments.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from attnflow.bias.impl.blocks import BLOCK
from attnflow.bias.impl.triton import launch, pairs, tuning
from attnflow.bias.impl.triton.inputs import OPERANDS, Inputs, Piece
from attnflow.bias.impl.triton.launch import Centred, Upstream

_MANY: Final = 512  # buckets, from which on the gradient of the table is made from the one of all pairs


class Gradients:
    """What is asked for, and where it goes."""

    def __init__(self, inputs: Inputs, needs: Sequence[bool]) -> None:
        """`needs` says for each operand whether its gradient is asked for; those of one source come together."""
        self.inputs = inputs
        asked = {OPERANDS[name].gradient for name, need in zip(inputs.tensors, needs, strict=True) if need}
        self.sources = asked - {""}

    def results(self) -> list[Tensor]:
        """A gradient for each operand, not filled in; of no numbers for those that are not asked for."""
        results: list[Tensor] = []
        for name, tensor in self.inputs.tensors.items():
            layout = torch.preserve_format if name in ("query", "key", "value") else torch.contiguous_format
            wanted = OPERANDS[name].gradient in self.sources
            results.append(torch.empty_like(tensor, memory_format=layout) if wanted else tensor.new_empty((0,)))
        return results

    def compute(self, output: Tensor, logsum: Tensor, kept: Tensor, gradient: Tensor) -> list[Tensor]:
        """`results`, filled in; `kept` is the bias of pairs if it was kept, else of no numbers."""
        inputs, results = self.inputs, dict(zip(self.inputs.tensors, self.results(), strict=True))
        wanted = {name: result for name, result in results.items() if OPERANDS[name].gradient in self.sources}
        for name, result in wanted.items():
            shared = "batch" not in OPERANDS[name].axes or result.shape[0] < len(output)
            if shared or name == "columns":  # what several pieces add to
                wanted[name] = torch.zeros_like(result, dtype=torch.float32)
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        again = inputs.must_build and not kept.numel()
        for piece in inputs.pieces(tuning.PAIR_BYTES, inputs.pair_bytes() if again else 0):
            part = inputs.part(piece)
            into = {name: piece.cut(result, OPERANDS[name].axes) for name, result in wanted.items()}
            both = launch.centred(part) if again or "guidance" in self.sources else None
            table = launch.build_pairs(part, both) if again else kept if kept.numel() else part.get("dense")
            query = into["query"] if "query" in into else torch.empty_like(part["query"])
            out, upstream, sums = map(piece.cut, (output, gradient, logsum))
            up = launch.query_gradient(part, table, out, upstream, sums, query)
            if "attention" in self.sources:
                columns = launch.key_gradients(part, table, up, into["key"], into["value"])
                if columns is not None:
                    into["columns"] += columns.unflatten(1, (into["columns"].shape[1], -1)).sum(dim=2)
            if "sinks" in into:
                # A sink takes the weight exp(sink - log-sum-exp) and gives nothing.
                into["sinks"].copy_(-torch.exp(part["sinks"] - up.logsum) * up.delta)
            if table is not None and self.sources & {"guidance", "product", "offset", "dense"}:
                self._pairs(part, table, up, both, into)
        return [wanted[name].to(result.dtype) if name in wanted else result for name, result in results.items()]

    def _pairs(
        self, inputs: Inputs, table: Tensor, up: Upstream, both: Centred | None, into: dict[str, Tensor]
    ) -> None:
        """Gradients of the tensors behind the bias of pairs; parameters are summed over the batch."""
        (batch, _, queries, _), groups = inputs["query"].shape, inputs.groups
        rows, cols = inputs.relation.pair_rows.others.shape[2:]
        hidden = inputs.hidden if "rows" in into else 0
        buckets = into["table"].shape[1] if "table" in into else 0
        many = buckets > _MANY
        row_size, col_size = 2 * hidden * BLOCK + 2 * hidden, 2 * hidden * BLOCK
        numbers = up.delta.new_empty
        row_sums, col_sums = numbers((batch, groups, rows, row_size)), numbers((batch, groups, cols, col_size))
        dense, change = into.get("dense"), None
        one_for_all = dense is not None and len(dense) < batch and "left" not in into and not many
        if one_for_all:
            change = dense
        elif dense is not None or "left" in into or many:
            change = up.delta.new_zeros((batch, groups, queries, inputs["key"].shape[2]))
        # Batch elements are launched together, but each alone where all of them add to one gradient.
        step = 1 if one_for_all else batch
        for piece in (Piece(slice(start, start + step), slice(0, groups), groups) for start in range(0, batch, step)):
            part, part_up = inputs.part(piece), Upstream(*map(piece.cut, up))
            part_both = None if both is None or not hidden else Centred(*map(piece.cut, both))
            maps, lists = len(part_up.delta) * groups, part.relation
            each = 4 * maps * cols * (row_size + col_size + (0 if many else buckets) + 1)
            count = max(1, min(rows, tuning.PART_BYTES // each))
            for first in range(0, rows, count):
                last = min(first + count, rows)
                shape = maps, last - first, cols
                row_parts = numbers((*shape, row_size)) if hidden else None
                col_parts = numbers((*shape, col_size)) if hidden else None
                table_parts = up.delta.new_zeros((*shape, buckets)) if buckets and not many else None
                pairs.pairs_gradient_kernel[((last - first) * cols, groups, len(part_up.delta))](
                    launch.attention(part, piece.cut(table)), launch.terms(part, part_both),
                    launch.relation(part, lists.pair_rows), *map(launch.view, part_up),
                    row_parts, col_parts, table_parts, launch.view(None if change is None else piece.cut(change)),
                    first, last - first, cols, buckets, ADD=one_for_all, MASK_PER_HEAD=lists.words.shape[1] > 1,
                    **(launch.network(part) | launch.widths(part)), num_warps=inputs.tiles.pair_warps, num_stages=1,
                )  # fmt: skip
                if row_parts is not None and col_parts is not None:
                    launch.gather(row_parts, piece.cut(row_sums), lists.pair_rows, first, 0, add=False)
                    columns = col_parts.transpose(1, 2)
                    launch.gather(columns, piece.cut(col_sums), lists.pair_columns, 0, first, add=first > 0)
                if table_parts is not None:
                    into["table"] += table_parts.sum(dim=(1, 2)).unflatten(0, (-1, groups)).sum(dim=0)
        if hidden and both is not None:
            _guidance(inputs, both, row_sums, col_sums, into)
        if change is not None and many:
            into["table"] += _table_of_pairs(inputs, change)
        if change is not None and "left" in into:
            into["left"].copy_(change @ inputs["right"].float())
            into["right"].copy_(change.mT @ inputs["left"].float())
        if change is not None and dense is not None and not one_for_all:
            if len(dense) < batch:
                dense += change.sum(dim=0, keepdim=True)
            else:
                dense.copy_(change)


def _guidance(inputs: Inputs, both: Centred, row_sums: Tensor, col_sums: Tensor, into: dict[str, Tensor]) -> None:
    """da = centre(gamma R) - norm part, dc likewise; d gamma = sum a R + sum c C; d shift and d weight by sums."""
    hidden = inputs.hidden
    size, gain = 2 * hidden * BLOCK, inputs["gain"][:, :, None]
    for name, sums, centred in (("rows", row_sums[..., :size], both.rows), ("cols", col_sums, both.cols)):
        # [batch, groups, blocks, 2, hidden, 64] -> two of [batch, groups, hidden, padded tokens]
        flow, norm = sums.unflatten(3, (2, hidden, BLOCK)).permute(3, 0, 1, 4, 2, 5).flatten(4)
        into["gain"] += (centred * flow).sum(dim=(0, 3))
        flow = flow * gain
        gradient = flow - flow.mean(dim=2, keepdim=True) - norm
        into[name].copy_(gradient[..., : into[name].shape[2]].mT)
    to_weight, to_shift = row_sums[..., size:].sum(dim=(0, 2)).unflatten(1, (2, hidden)).unbind(1)
    into["weight"] += to_weight
    into["shift"] += to_shift


def _table_of_pairs(inputs: Inputs, change: Tensor) -> Tensor:
    """Gradient of a long table from that of all pairs, in the order of the pairs: `index_put_` sorts on a GPU."""
    table, bucket_of = inputs["table"], inputs["bucket_of"]
    rows, columns = (inputs[name].expand(len(change), -1) for name in ("row_positions", "column_positions"))
    gradients = change.new_zeros(table.T.shape)
    for row, column, one in zip(rows, columns, change, strict=True):
        distance = (column[None, :] - row[:, None] + inputs.origin).clamp(0, len(bucket_of) - 1)
        gradients.index_put_((bucket_of[distance].long(),), one.permute(1, 2, 0), accumulate=True)
    return gradients.T
