"""The masks of a batch as one plain tensor, its *row intervals*, and the kernel forms made from it on its device.

Row intervals are int32 [batch or 1, heads or 1, 2 x width, queries]: query q attends to the keys in
`[rows[..., 2 t, q], rows[..., 2 t + 1, q])` for each t < width; unused intervals are (0, 0). An odd last row renumbers
the keys: key k stands for `rows[..., -1, k]`, which keeps scattered masks small (queries are then as many as keys).
The number of rows never equals the number of queries, so a kernel that reads the tensor as pairs fails. With a mask
for each layer, row intervals are int64 [batch, layers, rows, queries]. Forms depend in shape on its shape alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, no_type_check

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from attnflow.masks.flex import (
    MAX_UNROLLED,
    MaskMod,
    block_mask_of_counts,
    mask_mod_of_bits,
    packed,
    pairs_in_blocks,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

LAYERED: Final = torch.int64  # of row intervals


def is_row_intervals(value: object) -> bool:
    """Whether a value has the dtype and number of axes of row intervals."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.dtype == torch.int32


def split_rows(
    rows: Int32[Tensor, "batch heads rows queries"],
) -> tuple[Int32[Tensor, "batch heads bounds queries"], Int32[Tensor, "batch heads queries"] | None]:
    """Views: (interval bounds, number of each key or None)."""
    even = rows.shape[2] // 2 * 2
    return rows[:, :, :even], rows[:, :, -1] if rows.shape[2] > even else None


def allowed_of_rows(
    rows: Int32[Tensor, "batch heads rows queries"], num_keys: int
) -> Bool[Tensor, "batch heads queries keys"]:
    """The relation as bool; takes two bytes per pair while it is made."""
    bounds, rank = split_rows(rows)
    batch, heads, _, queries = rows.shape
    step = torch.zeros(batch, heads, queries, num_keys + 1, dtype=torch.int8, device=rows.device)
    for first, change in ((0, 1), (1, -1)):  # an unused interval starts and ends at 0
        at = bounds[:, :, first::2].transpose(-1, -2)
        step.scatter_add_(-1, at.long(), torch.full_like(at, change, dtype=step.dtype))
    allowed = step.cumsum(-1, dtype=torch.int8)[..., :num_keys].bool()
    return allowed if rank is None else allowed.gather(-1, rank[:, :, None].long().expand_as(allowed))


def mask_mod_of_rows(rows: Int32[Tensor, "batch heads rows queries"], num_keys: int) -> MaskMod:
    """`mask_mod(b, h, q, k)` that captures one tensor, so masks of one shape share one kernel."""
    if rows.shape[2] > 2 * MAX_UNROLLED + 1:
        allowed = torch.nn.functional.pad(allowed_of_rows(rows, num_keys), (0, -num_keys % 8))
        return mask_mod_of_bits(packed(allowed))
    several, heads, renumbered = rows.shape[0] > 1, rows.shape[1] > 1, rows.shape[2] % 2 == 1
    intervals = rows.shape[2] // 2

    @no_type_check
    def compare(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = b if several else b * 0, h if heads else h * 0
        k = rows[b, h, 2 * intervals, k] if renumbered else k
        allowed = (k >= rows[b, h, 0, q]) & (k < rows[b, h, 1, q])
        for t in range(1, intervals):
            allowed = allowed | ((k >= rows[b, h, 2 * t, q]) & (k < rows[b, h, 2 * t + 1, q]))
        return allowed

    return compare


def block_mask_of_rows(
    rows: Int32[Tensor, "batch heads rows queries"], num_keys: int, blocks: tuple[int, int] = (128, 128)
) -> BlockMask:
    """The `BlockMask` of row intervals, on their device."""
    counts = block_counts_of_rows(rows, num_keys, blocks)
    return block_mask_of_counts(counts, blocks, mask_mod_of_rows(rows, num_keys), (rows.shape[-1], num_keys))


def block_counts_of_rows(
    rows: Int32[Tensor, "batch heads rows queries"], num_keys: int, blocks: tuple[int, int] = (128, 128)
) -> Int[Tensor, "batch heads query_blocks key_blocks"]:
    """Allowed pairs in each block."""
    (bounds, rank), (batch, heads, _, queries) = split_rows(rows), rows.shape
    starts, ends = bounds[:, :, ::2].long(), bounds[:, :, 1::2].long()
    height, width = -(-queries // blocks[0]), -(-num_keys // blocks[1])
    row = torch.arange(queries, device=rows.device) // blocks[0]
    if rank is None:
        place = torch.arange(batch * heads, device=rows.device).view(batch, heads, 1, 1) * height
        grid = batch * heads * height, width
        return pairs_in_blocks((place + row).expand_as(starts), starts, ends, grid, blocks[1]).unflatten(
            0, (batch, heads, height)
        )
    parts = [
        pairs_in_blocks(row.expand_as(starts[b, h]), starts[b, h], ends[b, h], (height, width), blocks[1], rank[b, h])
        for b in range(batch)
        for h in range(heads)
    ]
    return torch.stack(parts).unflatten(0, (batch, heads))


def num_layers_of(mask: object) -> int | None:
    """The number of layers in per-layer row intervals; None for anything else."""
    return mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == LAYERED else None


def rows_of_layer(rows: Tensor, layer: int) -> Tensor:
    """The row intervals of one layer, in the form without layers."""
    return rows[:, layer : layer + 1].to(torch.int32)


def first_alike(rows: Tensor) -> list[int]:
    """For each layer the first with the same mask; compares each layer with every different mask."""
    views, first = rows.unbind(1), list[int]()
    for layer, view in enumerate(views):
        first.append(next((other for other in dict.fromkeys(first) if torch.equal(views[other], view)), layer))
    return first
