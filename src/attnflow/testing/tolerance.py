"""One rule for numeric tolerances: a result may be as wrong as twice a plain low-precision computation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def tolerance(low: Float[Tensor, "..."], exact: Float[Tensor, "..."]) -> float:
    """The largest error to accept: 2 x (error of `low` against `exact` + one rounding of `low`'s dtype).

    Args:
        low: the reference implementation run in the precision under test.
        exact: the reference implementation run in float64.

    Returns:
        An absolute tolerance. It follows from the data, so that no test carries a hand-tuned number.

    >>> tolerance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64)) == 2 * 2 * 2.0**-23
    True
    """
    if exact.dtype != torch.float64:
        raise TypeError(f"exact must be float64, got {exact.dtype}; run the reference in double precision")
    if low.shape != exact.shape:
        raise ValueError(f"low and exact must have one shape, got {tuple(low.shape)} and {tuple(exact.shape)}")
    if exact.numel() == 0:
        return 0.0
    rounding = float(exact.abs().max()) * torch.finfo(low.dtype).eps
    return 2.0 * (float((low.double() - exact).abs().max()) + rounding)


def assert_as_accurate(actual: Float[Tensor, "..."], low: Float[Tensor, "..."], exact: Float[Tensor, "..."]) -> None:
    """Assert that `actual` is within `tolerance(low, exact)` of `exact`, and finite.

    Raises:
        AssertionError: it is not; the message gives both errors.

    >>> exact = torch.tensor([1.0], dtype=torch.float64)
    >>> assert_as_accurate(exact.float(), exact.float(), exact)
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    limit = tolerance(low, exact)
    error = float((actual.double() - exact).abs().max()) if exact.numel() else 0.0
    if not error <= limit:  # NaN fails too
        raise AssertionError(f"error {error:.3g} against float64 is above the tolerance {limit:.3g}")
