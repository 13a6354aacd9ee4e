"""Each format read pair by pair from its published definition; shares no code with the package."""

from __future__ import annotations

import numpy as np


def varlen(cu_seqlens_q, cu_seqlens_k, causal, window_size):
    """flash-attn 2.1's docstring: bottom right alignment; window_size (left, right) inclusive, -1 for no limit."""
    left, right = window_size
    if causal:
        right = 0
    table = np.zeros((cu_seqlens_q[-1], cu_seqlens_k[-1]), np.bool_)
    for document in range(len(cu_seqlens_q) - 1):
        q0, q1, k0, k1 = *cu_seqlens_q[document : document + 2], *cu_seqlens_k[document : document + 2]
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                centre = i + (k1 - k0) - (q1 - q0)
                table[q0 + i, k0 + j] = (left < 0 or j >= centre - left) and (right < 0 or j <= centre + right)
    return table


def magi(q_ranges, k_ranges, attn_type_map, shape):
    """MagiAttention's kernels: each slice adds its pairs, so a pair counted twice is an error."""
    count = np.zeros(shape, np.int64)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, attn_type_map, strict=True):
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                causal, inverse = j <= i + (k1 - k0) - (q1 - q0), j >= i
                count[q0 + i, k0 + j] += [True, causal, inverse, causal and inverse][kind]
    assert count.max(initial=0) <= 1
    return count == 1


def flashmask(bounds, causal, num_queries):
    """The dense mask that PaddlePaddle's documentation of `flashmask_attention` gives for its bounds."""
    table = np.ones((num_queries, len(bounds)), np.bool_)
    for key, values in enumerate(bounds):
        with_end = len(values) == (2 if causal else 4)
        table[values[0] : values[1] if with_end else None, key] = False
        if causal:
            table[:key, key] = False
        elif with_end:
            table[values[2] : values[3], key] = False
        else:
            table[: values[1], key] = False
    return table


def compositions(n):
    """All ways to cut n positions into documents."""
    if n == 0:
        yield ()
    for first in range(1, n + 1):
        for rest in compositions(n - first):
            yield (first, *rest)
