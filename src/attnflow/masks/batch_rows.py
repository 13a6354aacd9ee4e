"""The masks of a batch as one plain tensor, its *row intervals*, and what attention kernels take, made on its device.

Row intervals are int32 [batch or 1, heads or 1, 2 x width, queries]: query q attends to the keys in
`[rows[..., 2 t, q], rows[..., 2 t + 1, q])` for t in 0..width - 1, of which unused ones are (0, 0). With an odd number
of rows the last one numbers the keys anew: key k stands in for `rows[..., -1, k]` (masks whose keys lie scattered, such
as a permuted order, stay few intervals then; their queries are as many as their keys). The number of rows is never the
number of queries, so that a kernel that takes the tensor for a mask of pairs fails.

Being a plain tensor of a batch, it is copied, sliced, pinned, sent and gathered as any other; everything else is built
from it where the model is, in shapes that depend on its shape alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, no_type_check

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from attnflow.masks.flex import MAX_UNROLLED, MaskMod, block_mask_of_counts, mask_mod_of_bits

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BITS: Final = 8


def is_row_intervals(value: object) -> bool:
    """Whether a value has the form of row intervals, whatever is in it."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.dtype == torch.int32


def split_rows(
    rows: Int32[Tensor, "batch heads rows queries"],
) -> tuple[Int32[Tensor, "batch heads width queries"], Int32[Tensor, "batch heads width queries"], Tensor | None]:
    """(starts, ends, number of each key or None): views."""
    even = rows.shape[2] // 2 * 2
    return rows[:, :, 0:even:2], rows[:, :, 1:even:2], rows[:, :, -1] if rows.shape[2] > even else None


def allowed_of_rows(
    rows: Int32[Tensor, "batch heads rows queries"], num_keys: int
) -> Bool[Tensor, "batch heads queries keys"]:
    """The relation as bool. Cost: two bytes a pair while it is made."""
    starts, ends, rank = split_rows(rows)
    batch, heads, _, queries = rows.shape
    step = torch.zeros(batch, heads, queries, num_keys + 1, dtype=torch.int8, device=rows.device)
    for at, change in ((starts, 1), (ends, -1)):  # an unused interval starts and ends at 0
        step.scatter_add_(
            -1, at.transpose(-1, -2).long(), torch.full_like(at.transpose(-1, -2), change, dtype=step.dtype)
        )
    allowed = step.cumsum(-1, dtype=torch.int8)[..., :num_keys].bool()
    return allowed if rank is None else allowed.gather(-1, rank[:, :, None].long().expand_as(allowed))


def mask_mod_of_rows(rows: Int32[Tensor, "batch heads rows queries"], num_keys: int) -> MaskMod:
    """`mask_mod(b, h, q, k)`, vectorised; it captures one tensor, so masks of one shape share one kernel."""
    if rows.shape[2] > 2 * MAX_UNROLLED + 1:
        allowed = torch.nn.functional.pad(allowed_of_rows(rows, num_keys), (0, -num_keys % _BITS))
        weight = 1 << torch.arange(_BITS, device=rows.device, dtype=torch.uint8)
        return mask_mod_of_bits((allowed.unflatten(-1, (-1, _BITS)) * weight).sum(-1, dtype=torch.uint8))
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
    """The `BlockMask` of row intervals, on their device: full blocks are those of which every pair is allowed.

    Identical to `create_block_mask`, which also leaves a block that sticks out of the sequence partial.
    Cost: O(rows x width + blocks); where keys are numbered anew, also a number for each key in each block of queries.
    """
    counts = block_counts_of_rows(rows, num_keys, blocks)
    return block_mask_of_counts(counts, blocks, mask_mod_of_rows(rows, num_keys), (rows.shape[-1], num_keys))


def block_counts_of_rows(
    rows: Int32[Tensor, "batch heads rows queries"], num_keys: int, blocks: tuple[int, int] = (128, 128)
) -> Int[Tensor, "batch heads query_blocks key_blocks"]:
    """Allowed pairs in each block."""
    starts, ends, rank = split_rows(rows)
    batch, heads, _, queries = rows.shape
    grid = -(-queries // blocks[0]), -(-num_keys // blocks[1])
    tall = torch.arange(queries, device=rows.device) // blocks[0]
    if rank is not None:
        parts = [
            _renumbered_counts(starts[b, h], ends[b, h], rank[b, h], tall, grid, blocks[1])
            for b in range(batch)
            for h in range(heads)
        ]
        return torch.stack(parts).view(batch, heads, *grid)
    wide, columns = blocks[1], grid[1] + 1
    first, last = starts // wide, (ends - 1).clamp(min=0) // wide
    inside = first == last
    base = tall * columns

    def total(*groups: tuple[Tensor, Tensor]) -> Tensor:
        sums = torch.zeros(batch, heads, grid[0] * columns, dtype=torch.int32, device=rows.device)
        for block, pairs in groups:
            sums.scatter_add_(-1, (base + block).flatten(2), pairs.to(torch.int32).flatten(2))
        return sums.view(batch, heads, grid[0], columns)

    # The ends of an interval are counted directly, its whole blocks by a difference array.
    whole = torch.where(inside, 0, wide)
    direct = total(
        (first, torch.where(inside, ends, (first + 1) * wide) - starts),
        (last, torch.where(inside, 0, ends - last * wide)),
    )
    between = total((first + ~inside, whole), (last, -whole)).cumsum(-1, dtype=torch.int32)
    return (direct + between)[..., :-1]


def _renumbered_counts(
    starts: Tensor, ends: Tensor, rank: Tensor, tall: Tensor, grid: tuple[int, int], wide: int
) -> Tensor:
    """Allowed pairs per block of one sequence and head: rows of a block of queries are added up, then renumbered."""
    num_keys = len(rank)
    cover = torch.zeros(grid[0], num_keys + 1, dtype=torch.int32, device=rank.device)
    for at, change in ((starts, 1), (ends, -1)):
        index = tall * (num_keys + 1) + at.long()
        cover.view(-1).scatter_add_(0, index.flatten(), torch.full_like(at, change, dtype=torch.int32).flatten())
    cover = cover.cumsum(-1, dtype=torch.int32)[:, rank.long()]
    return torch.nn.functional.pad(cover, (0, grid[1] * wide - num_keys)).view(*grid, wide).sum(-1, dtype=torch.int32)
