"""The gradient of a map that all heads share, in one Triton kernel: a candidate beside the memory-efficient operator's.

dB_ij = sum over heads of P (dO . v - delta), causal. A program owns a tile of pairs and goes through the heads, so that
nothing of the size heads * n * n is written. FlexAttention with a map that does not learn needs it, and it would serve
the efficient operator too.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 64, 64  # 157 registers, 131,072 bytes of shared memory at heads of 128


@triton.jit
@no_type_check
def kernel(
    q, k, v, upstream, lse, delta, bias, out, n, scale,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """q, k, v, upstream: [heads, n, D]; lse, delta: [heads, n]; bias, out: [n, n]."""
    i, j = tl.program_id(0), tl.program_id(1)
    if j * COLUMNS < (i + 1) * ROWS:
        row, col, d = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, D)
        pairs = (row[:, None] < n) & (col[None, :] <= row[:, None])
        b = tl.load(bias + row[:, None] * n + col[None, :], pairs, 0.0).to(tl.float32)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        rows, cols = row[:, None] * D + d[None, :], col[:, None] * D + d[None, :]
        for h in range(HEADS):
            qt = tl.load(q + h * n * D + rows, row[:, None] < n, 0.0)
            kt = tl.load(k + h * n * D + cols, col[:, None] < n, 0.0)
            score = tl.dot(qt, tl.trans(kt)) * scale + b - tl.load(lse + h * n + row, row < n, 0.0)[:, None]
            up = tl.load(upstream + h * n * D + rows, row[:, None] < n, 0.0)
            vt = tl.load(v + h * n * D + cols, col[:, None] < n, 0.0)
            slope = tl.dot(up, tl.trans(vt)) - tl.load(delta + h * n + row, row < n, 0.0)[:, None]
            total += tl.exp2(score * 1.4426950408889634) * slope
        tl.store(out + row[:, None] * n + col[None, :], total, pairs)


def map_gradient(q, k, v, upstream, lse, delta, bias, scale):
    """dB in float32, [n, n], 0 above the diagonal."""
    heads, n, width = q.shape
    out = torch.zeros(n, n, device=q.device)
    grid = -(-n // ROWS), -(-n // COLUMNS)
    kernel[grid](
        q, k, v, upstream, lse, delta, bias, out, n, scale, heads, width, ROWS, COLUMNS, num_warps=8, num_stages=2
    )
    return out
