"""A batch of different masks: what the form that a kernel takes costs to make, and attention under it.

Timed are the ways from the same eight masks to FlexAttention's `BlockMask` (from row intervals; by torch from a
`mask_mod`) and to a dense bool mask, and a forward pass of attention under each: on the CPU FlexAttention has no
backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attnflow import masks
from attnflow.masks.batches import MaskGrid
from attnflow.masks.flex import block_mask_of_rows

HEADS, WIDTH = 4, 64


def grid(n: int) -> MaskGrid:
    """Eight sequences of up to n positions: packed documents, windows, merged layouts, plain text."""
    block = n // 16
    return masks.batch(
        [
            masks.document([block] * 16),
            masks.document([n // 3, n - n // 3]),
            masks.sliding_window(n, 256),
            masks.block_two_stream(9, block),
            masks.prefix_lm(n - block, block),
            masks.attention_sink(n, 4, 256),
            masks.causal(n),
            masks.causal(n // 2),
        ],
        size=n,
    )


def build(provider: str, n: int) -> Callable[[], object]:
    """From the tensor of a batch to what a kernel takes."""
    each = grid(n)
    rows, mask_mod = each.row_intervals(), each.mask_mod
    ways: dict[str, Callable[[], object]] = {
        "attnflow": lambda: block_mask_of_rows(rows, n),
        "torch create_block_mask": lambda: create_block_mask(mask_mod, 8, 1, n, n, device="cpu"),
        "dense": each.dense,
    }
    return ways[provider]


def attend(provider: str, n: int) -> Callable[[], object]:
    """A forward pass of attention over the batch, its result compared with dense attention first at small sizes."""
    q, k, v = (torch.randn(8, HEADS, n, WIDTH) for _ in range(3))
    each = grid(n)
    if provider == "sdpa, dense":
        allow = each.dense()
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=allow)
    compiled, block_mask = torch.compile(flex_attention), each.block_mask()
    if n <= 2048:  # no speed of a wrong result
        expected = scaled_dot_product_attention(q, k, v, attn_mask=each.dense())
        torch.testing.assert_close(compiled(q, k, v, block_mask=block_mask), expected, atol=1e-5, rtol=1e-5)
    return lambda: compiled(q, k, v, block_mask=block_mask)
