"""Which pairs FlexAttention computes under a BlockMask."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


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
