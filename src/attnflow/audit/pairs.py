"""Masks of pairs: which pairs of positions they allow."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnflow.audit.packing import as_tensor


def allowed_pairs(mask: object, batch: int, n: int) -> Tensor | None:
    """bool [batch or 1, n, n], the pairs that a mask allows in any head; None of a mask of positions.

    Args:
        mask: a `BlockMask`, a tensor of 0 and 1 or bool, or an additive one with 0 for allowed.
        batch: number of sequences.
        n: number of positions.

    Raises:
        ValueError: a mask of another size.
    """
    if isinstance(mask, BlockMask):
        mask = computed_pairs(mask)
    pairs = as_tensor(mask)
    if pairs.ndim < 3:
        return None
    if pairs.shape[-2:] != (n, n) or pairs.shape[0] not in (1, batch):
        raise ValueError(f"attention_mask must be [{batch}, heads, {n}, {n}], got {list(pairs.shape)}")
    zero_one = not pairs.is_floating_point() or bool(((pairs == 0) | (pairs == 1)).all() and (pairs == 1).any())
    allow = pairs != 0 if zero_one else pairs == 0
    return allow.any(1) if allow.ndim == 4 else allow


def computed_pairs(blocks: BlockMask) -> Tensor:
    """bool [batch, heads, queries, keys]: full blocks whole, partial ones under `mask_mod`, the others not at all.

    Cost: the dense mask in memory.
    """
    num_queries, num_keys = blocks.seq_lengths
    batch, heads = blocks.shape[:2]
    tall, wide = blocks.BLOCK_SIZE
    device = blocks.kv_indices.device
    q, k = torch.arange(num_queries, device=device)[:, None], torch.arange(num_keys, device=device)[None, :]
    allow = torch.zeros(batch, heads, num_queries, num_keys, dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        place = torch.tensor(b, device=device), torch.tensor(h, device=device)
        inside = blocks.mask_mod(*place, q, k).cpu().expand(num_queries, num_keys)
        lists = [(blocks.kv_num_blocks, blocks.kv_indices, inside)]
        if blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None:
            lists.append((blocks.full_kv_num_blocks, blocks.full_kv_indices, torch.ones_like(inside)))
        for counts, indices, pairs in lists:
            for row, count in enumerate(counts[b, h].tolist()):
                for column in indices[b, h, row, :count].tolist():
                    part = slice(row * tall, (row + 1) * tall), slice(column * wide, (column + 1) * wide)
                    allow[b, h][part] |= pairs[part]
    return allow
