"""Scores as their definitions say, in float64, from the matrix in full."""

import numpy as np


def symmetry(matrix):
    m = np.asarray(matrix, dtype=np.float64)
    symmetric, skew = (m + m.T) / 2, (m - m.T) / 2
    total = (m**2).sum()
    return ((symmetric**2).sum() - (skew**2).sum()) / total if total else 0.0


def directionality(matrix, gamma=2.0, mode="excess"):
    m = np.asarray(matrix, dtype=np.float64)
    sums = []
    for axis in (1, 0):
        norms = np.linalg.norm(m, axis=axis)
        threshold = norms.mean() + gamma * (norms.std(ddof=1) if len(norms) > 1 else 0.0)
        # the same slack as ours for norms that are equal but for rounding, which is far below any real spread
        chosen = norms[norms > threshold + 1e-9 * norms.max(initial=0)]
        sums.append((chosen - threshold).sum() if mode == "excess" else chosen.sum())
    rows, columns = sums
    return (rows - columns) / (rows + columns) if rows + columns else 0.0


def head_matrices(query, key, num_heads, num_kv_heads):
    """W_q,h^T W_k,g for every query head h."""
    q, k = np.asarray(query, dtype=np.float64), np.asarray(key, dtype=np.float64)
    size, group = len(q) // num_heads, num_heads // num_kv_heads
    return [q[h * size : (h + 1) * size].T @ k[(h // group) * size : (h // group + 1) * size] for h in range(num_heads)]
