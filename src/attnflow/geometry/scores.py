"""Symmetry and directionality, first defined on full matrices, then computed directly from the weights.

The scores of M = W_q^T W_k follow from much smaller products. With r rows of weights (the channels of one head, or of
all heads) and width d, the identities

    A = W_q W_q^T,  B = W_k W_k^T,  C = W_k W_q^T      (r x r)
    ||M||^2 = <A, B>,  tr(M M) = tr(C C),  |row i|^2 = q_i^T B q_i,  |column j|^2 = k_j^T A k_j

take about 5 d r^2 multiplications where forming M takes d^2 r. If r is not much smaller than d, M is computed tile by
tile, each used at once with its mirror image. So neither M nor its symmetric and skew parts are ever stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

Mode = Literal["excess", "norm"]

_WIDTH_PER_ROW: Final = 4  # factored where r <= d / 4, tiled above; measured in benchmarks/bench_geometry.py
_TILE: Final = 1024


def symmetry(matrix: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Compute the symmetry of a matrix: 1 if M = M^T, -1 if M = -M^T, about 0 if it is neither.

    `S = tr(M M) / ||M||_F^2 = (||M_s||^2 - ||M_n||^2) / ||M||^2` with the symmetric and skew-symmetric parts M_s, M_n
    (geometry, def. 3.1 and prop. S1.17; no further factor of 2). Differentiable.

    Args:
        matrix: [..., d, d]; half precision is computed in float32.

    Returns:
        [...], in [-1, 1]; 0 where the matrix is zero.

    Raises:
        TypeError: the matrix does not hold floating-point numbers.
        ValueError: it is not square, or holds NaN or Inf.

    Cost: O(d^2) time and memory; see `head_scores` for products of weights, which need not be formed.

    >>> symmetry(torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [-1.0, 0.0]]]))
    tensor([ 1., -1.])
    """
    _check_matrix(matrix, square=True)
    scaled, _ = unit(_at_least_float32(matrix))
    return ratio((scaled * scaled.mT).sum((-2, -1)), scaled.square().sum((-2, -1)))


def directionality(
    matrix: Float[Tensor, "*batch rows columns"], gamma: float = 2.0, mode: Mode = "excess"
) -> Float[Tensor, "*batch"]:
    """Compute whether the rows (towards 1) or the columns (towards -1) of a matrix have outstanding norms.

    `D = (R - C) / (R + C)` (geometry, def. 3.2) with R from the rows whose norm exceeds the mean of all row norms by
    more than `gamma` standard deviations (unbiased), and C from the columns in the same way. For W_q^T W_k, rows are
    directions of the query's token and columns those of the key's.

    Args:
        matrix: [..., rows, columns]; half precision is computed in float32. It need not be square.
        gamma: how many standard deviations above the mean make a norm outstanding.
        mode: what R and C sum: "excess", by how much the outstanding norms exceed their threshold (as in the published
            numbers), or "norm", the norms themselves (the wording of def. 3.2).

    Returns:
        [...], in [-1, 1]; 0 where no norm is outstanding, as in every matrix of at most 5 rows and columns.

    Raises:
        TypeError: the matrix does not hold floating-point numbers.
        ValueError: it holds NaN or Inf, gamma is not finite, or the mode is unknown.

    Cost: O(rows x columns) time and memory.

    >>> matrix = torch.ones(100, 100)
    >>> matrix[:, 7] = 5.0
    >>> directionality(matrix), directionality(matrix.T)
    (tensor(-1.), tensor(1.))
    """
    check_reading(gamma, mode)
    _check_matrix(matrix, square=False)
    scaled, _ = unit(_at_least_float32(matrix))
    rows, columns = scaled.square().sum(-1).sqrt(), scaled.square().sum(-2).sqrt()
    return from_norms(rows, columns, gamma, mode)


def from_norms(
    rows: Float[Tensor, "*batch rows"], columns: Float[Tensor, "*batch columns"], gamma: float, mode: Mode
) -> Float[Tensor, "*batch"]:
    sums: list[Tensor] = []
    for norms in (rows, columns):
        chosen, threshold = outstanding(norms, gamma)
        sums.append(torch.where(chosen, norms - threshold if mode == "excess" else norms, 0.0).sum(-1))
    row_sum, column_sum = sums
    return ratio(row_sum - column_sum, row_sum + column_sum)


def outstanding(norms: Float[Tensor, "*batch n"], gamma: float) -> tuple[Tensor, Tensor]:
    """Which norms exceed mean + gamma * std, bool[..., n], and this threshold, [..., 1]; equal norms never do."""
    mean = norms.mean(-1, keepdim=True)
    squares = (norms - mean).square().sum(-1, keepdim=True)
    threshold = mean + gamma * (squares / max(norms.shape[-1] - 1, 1)).sqrt()
    # Where all norms are equal, rounding alone would put some of them above their mean.
    rounding = 64 * torch.finfo(norms.dtype).eps * norms.amax(-1, keepdim=True)
    return norms > threshold + rounding, threshold


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Their quotient within [-1, 1], and 0, with gradient 0, where the denominator is 0."""
    positive = denominator > 0
    quotient = torch.where(positive, numerator, 0.0) / torch.where(positive, denominator, 1.0)
    # Rounding may pass the bounds by a little; clamping the value alone keeps the gradient there.
    return quotient + (quotient.clamp(-1.0, 1.0) - quotient).detach()


def unit(matrix: Float[Tensor, "*batch rows columns"]) -> tuple[Tensor, Tensor]:
    """The matrix with its largest entry scaled to 1, and the scale, [..., 1, 1]: squares of squares stay in range."""
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    return matrix / scale, scale


def check_reading(gamma: float, mode: str) -> None:
    """Raise `ValueError` for a wrong gamma or mode of directionality."""
    if not math.isfinite(gamma):
        raise ValueError(f"gamma must be finite, got {gamma}; the paper uses 2.0")
    if mode not in get_args(Mode):
        raise ValueError(f'mode must be "excess" or "norm", got {mode!r}')


def _check_matrix(matrix: Tensor, square: bool) -> None:
    if not matrix.is_floating_point():
        raise TypeError(f"expected a matrix of floating-point numbers, got {matrix.dtype}: convert it with .float()")
    if matrix.ndim < 2 or 0 in matrix.shape[-2:] or (square and matrix.shape[-1] != matrix.shape[-2]):
        what = "a square matrix [..., d, d]" if square else "a matrix [..., rows, columns]"
        raise ValueError(f"expected {what} with d > 0, got shape {list(matrix.shape)}")
    if not bool(matrix.isfinite().all()):
        raise ValueError("the matrix must be finite to be scored, but holds NaN or Inf")


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class FormScores:
    """The scores of one matrix, or of the matrix of each head.

    Attributes:
        symmetry: in [-1, 1]; 0 where the matrix is zero, NaN where it is not square (cross-attention between different
            widths), for which symmetry has no meaning.
        directionality: in [-1, 1]; negative where columns (the key's side) dominate.
        norm: Frobenius norm ||M||.
        outlier_rows: number of rows with a norm above the threshold of directionality.
        outlier_columns: number of such columns.
    """

    symmetry: Float[Tensor, "*heads"]
    directionality: Float[Tensor, "*heads"]
    norm: Float[Tensor, "*heads"]
    outlier_rows: Int[Tensor, "*heads"]
    outlier_columns: Int[Tensor, "*heads"]


def head_scores(
    query: Float[Tensor, "query_rows d_query"],
    key: Float[Tensor, "key_rows d_key"],
    num_heads: int,
    num_kv_heads: int,
    gamma: float = 2.0,
    mode: Mode = "excess",
) -> FormScores:
    """Score every head's M_h = W_q,h^T W_k,g(h), whose sum is the full matrix.

    Args:
        query: weights as `nn.Linear` stores them, [num_heads * head_dim, d_query]; half precision counts in float32.
        key: weights in the same layout, [num_kv_heads * head_dim, d_key].
        num_heads: number of query heads.
        num_kv_heads: number of key heads; query head h reads key head `h // (num_heads // num_kv_heads)`.
        gamma: threshold of `directionality`, in standard deviations.
        mode: as in `directionality`.

    Returns:
        `FormScores` with tensors of shape [num_heads].

    Raises:
        ValueError: the weights hold NaN or Inf.

    Cost: about 5 * head_dim^2 * d multiplications a head; no more memory than the weights of one head again.
    """
    check_reading(gamma, mode)
    query_heads, key_heads = _split(query, key, num_heads, num_kv_heads)
    group = num_heads // num_kv_heads
    each = [_scores(query_heads[h], key_heads[h // group], gamma, mode) for h in range(num_heads)]
    result = FormScores(
        *(torch.stack([getattr(scores, field.name) for scores in each]) for field in fields(FormScores))
    )
    return _finite(result, query, key)


def full_scores(
    query: Float[Tensor, "query_rows d_query"],
    key: Float[Tensor, "key_rows d_key"],
    num_heads: int,
    num_kv_heads: int,
    gamma: float = 2.0,
    mode: Mode = "excess",
) -> FormScores:
    """Score all heads together: M = W_q^T W_k = sum of M_h over the heads.

    Query heads that share a key head are added up first, since `sum_h W_q,h^T W_k,g = (sum_h W_q,h)^T W_k,g`. Arguments
    and errors are those of `head_scores`; the tensors of the result are 0-d.

    Cost: with r = num_kv_heads * head_dim, about 5 d r^2 multiplications up to r = d / 4, and d^2 r above; the weights
    again in memory, and tiles of 1,024 x 1,024.
    """
    check_reading(gamma, mode)
    query_sum, key_rows = summed(query, key, num_heads, num_kv_heads)
    return _finite(_scores(query_sum, key_rows, gamma, mode), query, key)


def head_symmetry(
    query: Float[Tensor, "query_rows d"], key: Float[Tensor, "key_rows d"], num_heads: int, num_kv_heads: int
) -> Float[Tensor, "heads"]:
    """The symmetry of every head's matrix as in `head_scores`, differentiable; 0 with gradient 0 for a zero matrix.

    Cost: 3 * head_dim^2 * d multiplications a head, and num_heads * head_dim^2 numbers for the backward pass.
    """
    query_heads, key_heads = _split(query, key, num_heads, num_kv_heads)
    return _factored_symmetry(query_heads, key_heads.repeat_interleave(num_heads // num_kv_heads, dim=0))


def full_symmetry(
    query: Float[Tensor, "query_rows d"], key: Float[Tensor, "key_rows d"], num_heads: int, num_kv_heads: int
) -> Float[Tensor, ""]:
    """The symmetry of the full matrix as in `full_scores`, 0-d and differentiable.

    Cost: with r = num_kv_heads * head_dim, 3 d r^2 multiplications up to r = d / 3, and d^2 r above.
    """
    query_sum, key_rows = summed(query, key, num_heads, num_kv_heads)
    if 3 * len(key_rows) <= key_rows.shape[1]:
        return _factored_symmetry(query_sum, key_rows)
    return symmetry(query_sum.T @ key_rows)


def _split(query: Tensor, key: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Split both weights into heads, [heads, head_dim, width], in float32 or better."""
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    return (query.to(dtype).unflatten(0, (num_heads, -1)), key.to(dtype).unflatten(0, (num_kv_heads, -1)))


def summed(query: Tensor, key: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return weights [num_kv_heads * head_dim, width] whose product is the full matrix."""
    query_heads, key_heads = _split(query, key, num_heads, num_kv_heads)
    groups = query_heads.unflatten(0, (num_kv_heads, -1))
    summed = groups.squeeze(1) if groups.shape[1] == 1 else groups.sum(1)
    return summed.flatten(0, 1), key_heads.flatten(0, 1)


def _factored(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tr(M M) (NaN if not square) and squared norms of rows and columns, from [r, d_query] and [r, d_key]."""
    a, b = query @ query.T, key @ key.T
    rows = (b @ query).mul_(query).sum(0).clamp_(min=0)
    columns = (a @ key).mul_(key).sum(0).clamp_(min=0)
    if query.shape[1] != key.shape[1]:
        return a.new_full((), torch.nan), rows, columns
    c = key @ query.T
    return (c * c.T).sum(), rows, columns


def _tiled(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = query.new_zeros(query.shape[1]), key.new_zeros(key.shape[1])
    square = len(rows) == len(columns)
    trace = query.new_full((), 0.0 if square else torch.nan)

    def tile(i: slice, j: slice) -> Tensor:
        block = query[:, i].T @ key[:, j]
        rows[i] += block.square().sum(1)
        columns[j] += block.square().sum(0)
        return block

    starts = [slice(at, at + _TILE) for at in range(0, max(len(rows), len(columns)), _TILE)]
    for n, i in enumerate(starts):
        diagonal = tile(i, i)
        if square:
            trace += (diagonal * diagonal.T).sum()
        for j in starts[:n]:
            below, above = tile(i, j), tile(j, i)
            if square:
                trace += 2 * (below * above.T).sum()
    return trace, rows, columns


def _scores(query: Tensor, key: Tensor, gamma: float, mode: Mode) -> FormScores:
    (query, query_scale), (key, key_scale) = unit(query), unit(key)
    small = _WIDTH_PER_ROW * len(query) <= min(query.shape[1], key.shape[1])
    trace, row_squares, column_squares = (_factored if small else _tiled)(query, key)
    rows, columns, total = row_squares.sqrt(), column_squares.sqrt(), row_squares.sum()
    return FormScores(
        symmetry=ratio(trace, total) if query.shape[1] == key.shape[1] else trace,
        directionality=from_norms(rows, columns, gamma, mode),
        norm=(total.sqrt() * query_scale * key_scale).squeeze(),
        outlier_rows=outstanding(rows, gamma)[0].sum(),
        outlier_columns=outstanding(columns, gamma)[0].sum(),
    )


def _factored_symmetry(query: Tensor, key: Tensor) -> Tensor:
    """Return tr(C C) / <A, B> for weights [..., r, d]."""
    (query, _), (key, _) = unit(query), unit(key)
    a, b, c = query @ query.mT, key @ key.mT, key @ query.mT
    return ratio((c * c.mT).sum((-2, -1)), (a * b).sum((-2, -1)))


def _finite(scores: FormScores, query: Tensor, key: Tensor) -> FormScores:
    if bool(scores.norm.isfinite().all()):
        return scores
    for name, weight in (("query", query), ("key", key)):
        bad = int((~weight.isfinite()).sum())
        if bad:
            raise ValueError(f"the {name} weights must be finite, but {bad} of {weight.numel()} are NaN or Inf")
    raise ValueError("the weights are so large that the norm of their product overflows: divide them by a constant")
