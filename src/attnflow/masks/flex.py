"""Compilation of a mask for torch's FlexAttention: `mask_mod` and `BlockMask` straight from row intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core import checks
from attnflow._core.checks import IntArray

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from attnflow.masks.mask import Mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_MAX_UNROLLED: Final = 16  # intervals per row up to which a mask_mod compares; above, it looks up a dense table


def mask_mod(mask: Mask, device: torch.device) -> MaskMod:
    """`mask_mod(b, h, q, k)` that compares k with the bounds of row q's intervals, tensors on `device`."""
    rows = mask._rows
    width = int(np.diff(rows.indptr).max(initial=0))
    if width > _MAX_UNROLLED:
        table = mask.dense(device)

        def look_up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return table[q, k]

        return look_up
    bounds = np.zeros((2, rows.num_rows, max(width, 1)), dtype=np.int32)
    row = rows.row_index()
    slot = np.arange(len(row)) - rows.indptr[row]
    bounds[0, row, slot], bounds[1, row, slot] = rows.starts, rows.ends
    starts, ends = torch.from_numpy(bounds[0]).to(device), torch.from_numpy(bounds[1]).to(device)
    query_rank, key_rank = (_tensor(rank, device) for rank in (mask._query_rank, mask._key_rank))

    def compare(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q if query_rank is None else query_rank[q]
        k = k if key_rank is None else key_rank[k]
        allowed = (k >= starts[q, 0]) & (k < ends[q, 0])
        for t in range(1, starts.shape[1]):
            allowed = allowed | ((k >= starts[q, t]) & (k < ends[q, t]))
        return allowed

    return compare


def block_mask(mask: Mask, block_size: int | tuple[int, int], device: torch.device) -> BlockMask:
    """The mask's `BlockMask`: a block is full if all its pairs are allowed, partial if some are.

    Identical to `create_block_mask`, which also leaves a block that sticks out of the sequence partial.
    """
    from torch.nn.attention.flex_attention import BlockMask  # takes 0.3 s: not paid by `import attnflow`

    pair = (block_size, block_size) if isinstance(block_size, int) else block_size
    q_block, k_block = (checks.integer("block_size", size, 1) for size in pair)
    if 0 in mask.shape:
        raise ValueError(f"a BlockMask needs at least one query and one key, got shape {mask.shape}")
    pieces = mask.pieces()
    if pieces is None:
        counts = _count_chunks(mask, q_block, k_block)
    else:
        counts = _count_pieces(*pieces, mask.shape, q_block, k_block)
    full = counts == q_block * k_block
    partial = (counts > 0) & ~full
    tables = [torch.from_numpy(t).to(device)[None, None] for part in (partial, full) for t in _block_rows(part)]
    return BlockMask.from_kv_blocks(
        *tables,
        BLOCK_SIZE=(q_block, k_block),
        mask_mod=mask.mask_mod_on(device),
        seq_lengths=mask.shape,
    )


def _tensor(rank: IntArray | None, device: torch.device) -> Tensor | None:
    return None if rank is None else torch.tensor(rank, dtype=torch.int32, device=device)


def _count_pieces(
    query: IntArray, starts: IntArray, ends: IntArray, shape: tuple[int, int], q_block: int, k_block: int
) -> IntArray:
    """Allowed pairs per block: the ends of each interval directly, its whole blocks by a difference array."""
    grid = (-(-shape[0] // q_block), -(-shape[1] // k_block) + 1)

    def total(block: IntArray, pairs: IntArray) -> IntArray:
        sums = np.bincount(base + block, pairs.astype(np.float64), grid[0] * grid[1])  # exact below 2**53
        return sums.astype(np.int64).reshape(grid)

    first, last = starts // k_block, (ends - 1) // k_block
    base = query // q_block * grid[1]
    inside = first == last
    direct = total(first, np.where(inside, ends, (first + 1) * k_block) - starts)
    if not inside.all():
        direct += total(last, np.where(inside, 0, ends - last * k_block))
        whole = np.where(inside, 0, k_block)
        direct += np.cumsum(total(first + ~inside, whole) - total(last, whole), axis=1)
    return direct[:, :-1]


def _count_chunks(mask: Mask, q_block: int, k_block: int) -> IntArray:
    """Allowed pairs per block of a relabelled mask, one block row of the dense relation at a time."""
    blocks = np.arange(0, mask.num_keys, k_block)
    parts = [np.add.reduceat(part.sum(axis=0, dtype=np.int64), blocks) for _, part in mask.dense_chunks(chunk=q_block)]
    return np.stack(parts)


def _block_rows(blocks: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(number of blocks per row, block columns with the present ones first), as torch lays them out."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(axis=1, dtype=np.int32), order.astype(np.int32)
