"""Argument checks with messages that say what was expected, what came and what to do."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray = npt.NDArray[np.int64]
Indices = Sequence[int] | npt.NDArray[np.integer] | Tensor  # what a caller may give where positions are listed


def integer(name: str, value: object, minimum: int = 0, maximum: int | None = None) -> int:
    """`value` as an int within [minimum, maximum]; numpy and 0-d torch integers are welcome, bools and floats not."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    try:
        result = operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None
    if result < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {result}")
    if maximum is not None and result > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {result}")
    return result


def index_array(name: str, values: object, limit: int | None = None) -> IntArray:
    """`values` (a sequence, array or tensor of integers) as int64[n]; with `limit`, each must lie in [0, limit)."""
    array = np.asarray(values if isinstance(values, Sequence) else _as_plain(name, values))
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    array = array.astype(np.int64)
    if limit is not None and (array.min() < 0 or array.max() >= limit):
        bad = int(array[(array < 0) | (array >= limit)][0])
        raise ValueError(f"{name} must hold positions in [0, {limit}), got {bad}")
    return array


def permutation(name: str, values: object, size: int | None = None) -> IntArray:
    """`values` as a permutation of range(n)."""
    array = index_array(name, values)
    n = len(array) if size is None else size
    if len(array) != n or not np.array_equal(np.sort(array), np.arange(n)):
        raise ValueError(f"{name} must be a permutation of range({n}), got {preview(array)}")
    return array


def preview(values: Iterable[object], limit: int = 12) -> str:
    """The first few of many values, for a message."""
    items = [str(v) for _, v in zip(range(limit + 1), values, strict=False)]
    return "[" + ", ".join(items[:limit]) + (", ...]" if len(items) > limit else "]")


def _as_plain(name: str, values: object) -> object:
    tolist = getattr(values, "tolist", None)  # numpy arrays and torch tensors of any device
    if callable(tolist):
        return tolist()
    if isinstance(values, Iterable):
        return list(cast(Iterable[object], values))
    raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}")
