"""FlexAttention under a mask of ours against a hand-written mask_mod and against SDPA with a dense mask.

The question is what the general form (bounds of row intervals read from tensors) costs over a closed form compiled
into the kernel. On a GPU: LLaMA-2-7B shapes, bfloat16, forward and backward. On the CPU, where FlexAttention has no
backward: small shapes, float32, forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attnflow import masks
from attnflow.masks.flex import MaskMod
from benchmarks.harness import Case, main

WINDOW, BLOCK = 256, 64


def catalogue(name: str, n: int) -> masks.Mask:
    if name == "causal":
        return masks.causal(n)
    if name == "sliding_window":
        return masks.sliding_window(n, WINDOW)
    return masks.block_two_stream(n // (2 * BLOCK) + 1, BLOCK)


def closed_form(name: str, n: int, device: str) -> MaskMod:
    if name == "causal":
        return lambda b, h, q, k: q >= k
    if name == "sliding_window":
        return lambda b, h, q, k: (q >= k) & (q - k < WINDOW)
    content = torch.tensor(n // 2, device=device)

    def block_two_stream(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        query, key = (q % content) // BLOCK, (k % content) // BLOCK
        return ((k < content) & (query >= key)) | ((q >= content) & (k >= content) & (query == key))

    return block_two_stream


def attention(provider: str, name: str, n: int, device: str, backward: bool) -> Callable[[], object]:
    heads, head_dim = (32, 128) if device == "cuda" else (4, 64)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, heads, n, head_dim, device=device, dtype=dtype, requires_grad=backward) for _ in range(3))
    attend = _forward(provider, name, n, device)
    if n <= 4096:  # no speed of a wrong result
        expected = _forward("sdpa", name, n, device)(q.detach(), k.detach(), v.detach())
        torch.testing.assert_close(
            attend(q, k, v).detach(), expected, atol=2e-2 if device == "cuda" else 1e-5, rtol=1e-2
        )
    upstream = torch.randn_like(q)

    def run() -> object:
        out = attend(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), upstream) if backward else ()
        if device == "cuda":
            torch.cuda.synchronize()
        return out, grads

    run()  # compiles
    return run


def _forward(provider: str, name: str, n: int, device: str) -> Callable[..., torch.Tensor]:
    if provider == "sdpa":
        dense = catalogue(name, n).dense(device)
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=dense)
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = catalogue(name, n).block_mask(device=device)
    if provider == "closed form":
        block_mask = create_block_mask(closed_form(name, n, device), None, None, n, n, device=device)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def cases(device: str) -> list[Case]:
    sizes, directions = ((4096, 16384), (False, True)) if device == "cuda" else ((1024, 2048), (False,))
    return [
        Case(
            f"attention under {name}, {'forward + backward' if backward else 'forward'}",
            provider,
            n,
            "benchmarks.bench_flex",
            "attention",
            (key, name, n, device, backward),
            repeats=30 if device == "cuda" else 7,
        )
        for name in ("causal", "sliding_window", "block_two_stream")
        for n in sizes
        for backward in directions
        for provider, key in (
            ("attnflow", "attnflow"),
            ("FlexAttention, closed-form mask_mod", "closed form"),
            ("SDPA, dense mask", "sdpa"),
        )
    ]


if __name__ == "__main__":
    main(cases, ["torch", "numpy"], time_limit=180)
