"""Numbers that callers give to an index or a store, checked before anything happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core.checks import integer
from attnflow.knowledge.index.exact import Floats

Vectors = Tensor | npt.NDArray[Any] | Sequence[Any]  # numbers, or rows of numbers

_LARGEST: Final = 1e16  # of larger numbers scores overflow float32, and infinity less infinity is none
_BLOCK: Final = 1 << 16  # rows checked at once


def matrix(name: str, values: Vectors, width: int, rows: int | None = None) -> Floats:
    """Check `values` and return them as finite float32 [rows, width], copied only if needed."""
    array = _floats(name, values)
    if array.ndim != 2 or array.shape[1] != width or (rows is not None and len(array) != rows):
        expected = f"[{'n' if rows is None else rows}, {width}]"
        raise ValueError(f"{name} must have shape {expected}, got {list(array.shape)}")
    for start in range(0, len(array), _BLOCK):
        fits = (np.abs(array[start : start + _BLOCK]) <= _LARGEST).all(axis=1)  # not so for NaN
        if not fits.all():
            raise ValueError(
                f"row {int((~fits).argmax()) + start} of {name} holds NaN or infinity (as float32), or numbers above "
                f"{_LARGEST:.0e} (an entry is kept out of a column by a large finite penalty, such as -1e9)"
            )
    return np.ascontiguousarray(array)


def queries(values: Vectors, width: int) -> Tensor:
    """Check queries and return them as float32 [..., width]."""
    array = _floats("query", values)
    if not array.ndim or array.shape[-1] != width:
        raise ValueError(f"query must have shape [{width}] or [..., {width}], got {list(array.shape)}")
    return torch.from_numpy(matrix("query", array.reshape(-1, width), width)).view(array.shape)


def column(value: int | None, num_thresholds: int) -> int | None:
    """Check a threshold column, or None."""
    if value is None:
        return None
    if not num_thresholds:
        raise ValueError(f"threshold_column is {value}, but there are no threshold columns: leave it out")
    return integer("threshold_column", value, maximum=num_thresholds - 1)


def _floats(name: str, values: Vectors) -> npt.NDArray[Any]:
    if isinstance(values, Tensor):
        if values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must hold real numbers, got dtype {values.dtype}")
        return values.detach().to("cpu", torch.float32).numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be rows of one length") from None
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # what does not fit float32 becomes infinity, which is refused with its row
        return array.astype(np.float32, copy=False)
