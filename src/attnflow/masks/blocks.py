"""Masks from torch's `BlockMask`: what its tables and its `mask_mod` say together, or where they contradict it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow.masks.batches import MaskGrid
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_SKIPPED, _PARTIAL, _FULL, _TWICE = range(4)
_SHOWN: Final = 5  # contradictory blocks that an error names


def from_block_mask(block_mask: BlockMask) -> Mask | MaskGrid:
    """The relation that FlexAttention computes under a `BlockMask`: full blocks, and `mask_mod` inside partial ones.

    Args:
        block_mask: of any block size, sequences and heads.

    Returns:
        The `Mask`; where sequences or heads differ, the `MaskGrid` of all of them, as `masks.batch` makes it.

    Raises:
        TypeError: no `BlockMask`.
        ValueError: blocks contradict `mask_mod`: one is skipped, but pairs in it are allowed; one counts as full, but
            pairs in it are forbidden; or one is listed twice. The error names blocks and a pair of each. (Tables made
            for other lengths, offsets or documents than the `mask_mod` do that, and FlexAttention does not notice.)

    Cost: `mask_mod` is evaluated for every pair of each sequence and head, by rows of blocks.

    >>> from attnflow import masks
    >>> from_block_mask(masks.sliding_window(300, 40).block_mask()) == masks.sliding_window(300, 40)
    True
    """
    from torch.nn.attention.flex_attention import BlockMask, noop_mask  # takes 0.3 s

    if not isinstance(block_mask, BlockMask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise not_a_mask(block_mask)
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError("expected a whole BlockMask, got a slice, whose mask_mod torch takes away")
    states = _states(block_mask)
    free = block_mask.mask_mod is noop_mask  # the tables alone are the mask
    wrong: list[str] = []
    masks: list[Mask] = []
    for b, h in np.ndindex(*states.shape[:2]):
        rows, faults = _relation(block_mask, states[b, h], (b, h), free)
        wrong += [fault + (f" (sequence {b}, head {h})" if states[:, :, 0, 0].size > 1 else "") for fault in faults]
        masks.append(Mask(rows, "from_block_mask"))
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        noun = "block contradicts" if len(wrong) == 1 else "blocks contradict"
        raise ValueError(f"{len(wrong)} {noun} the mask_mod: {'; '.join(wrong[:_SHOWN])}{more}")
    if all(mask == masks[0] for mask in masks):
        return masks[0]
    heads = states.shape[1]
    rows = [tuple(masks[first : first + heads]) for first in range(0, len(masks), heads)]
    return MaskGrid(tuple(rows), *masks[0].shape)


def _states(block_mask: BlockMask) -> npt.NDArray[np.int64]:
    """Whether each block is skipped, partial or full, int64[sequences, heads, query blocks, key blocks]."""
    columns = block_mask.kv_indices.shape[-1]
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return np.where(partial > 1, _TWICE, partial)
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    return np.where(partial + full > 1, _TWICE, np.where(full > 0, _FULL, partial))


def _listed(counts: Tensor, indices: Tensor, columns: int) -> npt.NDArray[np.int64]:
    """How often each block is listed."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros((*counts.shape, columns), dtype=torch.int64, device=indices.device)
    return table.scatter_add_(-1, indices.long(), valid.long()).cpu().numpy()


def _relation(
    block_mask: BlockMask, states: npt.NDArray[np.int64], place: tuple[int, int], free: bool
) -> tuple[IntervalRows, list[str]]:
    """The pairs that are computed for one sequence and head, and what contradicts them."""
    num_queries, num_keys = block_mask.seq_lengths
    q_block, k_block = block_mask.BLOCK_SIZE
    device = block_mask.kv_indices.device
    b, h = (torch.tensor(index, device=device) for index in place)
    key = torch.arange(num_keys, device=device)[None, :]
    parts: list[IntervalRows] = []
    wrong: list[str] = []
    for row, start in enumerate(range(0, num_queries, q_block)):
        query = torch.arange(start, min(start + q_block, num_queries), device=device)[:, None]
        allowed = block_mask.mask_mod(b, h, query, key).expand(len(query), num_keys).cpu().numpy()
        here = np.repeat(states[row], k_block)[:num_keys]
        table = (here == _FULL) | (allowed & (here == _PARTIAL))
        clash = allowed != table
        if free:
            clash &= here == _TWICE
        for block in np.unique(np.flatnonzero((clash | (here == _TWICE)).any(axis=0)) // k_block):
            columns = slice(block * k_block, (block + 1) * k_block)
            i, j = (int(at) for at in np.argwhere(clash[:, columns] | (here[columns] == _TWICE))[0])
            says = "allows" if allowed[i, columns][j] else "forbids"
            kind = {_SKIPPED: "skipped", _FULL: "full", _TWICE: "listed twice"}[int(here[columns][0])]
            last = [min(at, size) - 1 for at, size in ((start + q_block, num_queries), (columns.stop, num_keys))]
            wrong.append(
                f"block ({row}, {block}) of queries {start}-{last[0]} and keys {columns.start}-{last[1]} is {kind}, "
                f"and mask_mod {says} query {start + i}, key {columns.start + j}"
            )
        parts.append(IntervalRows.from_bool(table))
    return IntervalRows.stack(parts, num_keys), wrong
