"""Symmetry and directionality of a square matrix: the definitions, on matrices that are there in full."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Mode = Literal["excess", "norm"]


def symmetry(matrix: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """How symmetric a matrix is: 1 if M = M^T, -1 if M = -M^T, about 0 if it is neither.

    `S = tr(M M) / ||M||_F^2 = (||M_s||^2 - ||M_n||^2) / ||M||^2` with the symmetric and skew-symmetric parts M_s, M_n
    (geometry, def. 3.1 and prop. S1.17; no further factor of 2). Differentiable.

    Args:
        matrix: [..., d, d]; half precision is computed in float32.

    Returns:
        [...], in [-1, 1]; 0 where the matrix is zero.

    Raises:
        TypeError: the matrix does not hold floating-point numbers.
        ValueError: it is not square, or holds NaN or Inf.

    Cost: O(d^2) time and memory; see `attnflow.geometry.factored` for products of weights, which need not be formed.

    >>> symmetry(torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [-1.0, 0.0]]]))
    tensor([ 1., -1.])
    """
    _check_matrix(matrix, square=True)
    scaled, _ = unit(_at_least_float32(matrix))
    return ratio((scaled * scaled.mT).sum((-2, -1)), scaled.square().sum((-2, -1)))


def directionality(
    matrix: Float[Tensor, "*batch rows columns"], gamma: float = 2.0, mode: Mode = "excess"
) -> Float[Tensor, "*batch"]:
    """Whether the rows (1) or the columns (-1) of a matrix have the outstanding norms.

    `D = (R - C) / (R + C)` (geometry, def. 3.2) with R taken from the rows whose norm exceeds the mean of all row norms
    by more than `gamma` standard deviations (unbiased), and C from the columns likewise. For W_q^T W_k, rows are
    directions of the query's token and columns those of the key's.

    Args:
        matrix: [..., rows, columns]; half precision is computed in float32. It need not be square.
        gamma: how many standard deviations above the mean a norm is outstanding.
        mode: what R and C sum up: "excess", by how much the outstanding norms exceed their threshold (the published
            numbers were made so), or "norm", these norms themselves (the wording of def. 3.2).

    Returns:
        [...], in [-1, 1]; 0 where no norm is outstanding, as in every matrix of at most 5 rows and columns.

    Raises:
        TypeError: the matrix does not hold floating-point numbers.
        ValueError: it holds NaN or Inf, gamma is not finite, or there is no such mode.

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
    """Directionality of a matrix of which only the norms of its rows and columns are known."""
    row_sum, column_sum = (_outstanding_sum(norms, gamma, mode) for norms in (rows, columns))
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
    """Raise unless there is such a reading of directionality."""
    if not math.isfinite(gamma):
        raise ValueError(f"gamma must be finite, got {gamma}; the paper uses 2.0")
    if mode not in get_args(Mode):
        raise ValueError(f'mode must be "excess" or "norm", got {mode!r}')


def _outstanding_sum(norms: Tensor, gamma: float, mode: Mode) -> Tensor:
    chosen, threshold = outstanding(norms, gamma)
    return torch.where(chosen, norms - threshold if mode == "excess" else norms, 0.0).sum(-1)


def _check_matrix(matrix: Tensor, square: bool) -> None:
    if not matrix.is_floating_point():
        raise TypeError(f"expected a matrix of floating-point numbers, got {matrix.dtype}; convert it with .float()")
    if matrix.ndim < 2 or 0 in matrix.shape[-2:] or (square and matrix.shape[-1] != matrix.shape[-2]):
        what = "a square matrix [..., d, d]" if square else "a matrix [..., rows, columns]"
        raise ValueError(f"expected {what} with d > 0, got shape {list(matrix.shape)}")
    if not bool(matrix.isfinite().all()):
        raise ValueError("the matrix holds NaN or Inf: there are no scores of it")


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
