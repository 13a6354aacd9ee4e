"""Packed documents behind a shared prefix, as a FlexAttention block mask that was never an n x n table."""

import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention

import attnflow as af

warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # slow is fine here

documents = [700, 300, 1048]
n = sum(documents)
mask = af.masks.document(documents) | af.masks.from_intervals([[(0, 64)]] * n)  # all read the first 64 tokens
block_mask = mask.block_mask(block_size=64)
print(mask)
print(f"{mask.density:.1%} of all pairs, {100 - block_mask.sparsity():.1f}% of all blocks")

q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
flexible = flex_attention(q, k, v, block_mask=block_mask)
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense())
print(f"largest difference from attention under the dense mask: {(flexible - dense).abs().max():.1e}")
