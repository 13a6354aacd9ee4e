"""Argument checks with messages that say what was expected, what came and what to do."""

from __future__ import annotations

import math
import operator
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, SupportsFloat, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
Indices = Sequence[int] | npt.NDArray[np.integer] | Tensor  # what a caller may give where positions are listed

LARGEST_SIZE: Final = 1 << 24
"""Most positions of a sequence: a mask of this size takes 2 GB while it is built, and no model reads more."""

_SIZE: Final = ContextVar("positions that `size` lets through", default=LARGEST_SIZE)
_LARGEST: Final = (1 << 63) - 1  # of int64, in which everything is computed


def integer(
    name: str, value: object, minimum: int = 0, maximum: int | None = None, unit: str = "", why: str = ""
) -> int:
    """Return `value`, which may be a 0-d array or tensor, as an int within [minimum, maximum or 2**63 - 1]."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if isinstance(value, bool) or dtype in (torch.bool, np.bool_):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    if shape != ():
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} of shape {tuple(shape)}")
    try:
        result = operator.index(cast(SupportsIndex, value))
    except (TypeError, RuntimeError):  # RuntimeError: a tensor on the meta device
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None
    if result < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {result}")
    maximum = _LARGEST if maximum is None else maximum
    if result > maximum:
        raise ValueError(f"{name} must be at most {maximum}{unit}, got {result}{why}")
    return result


def size(name: str, value: object) -> int:
    """Return `value` as a number of positions: an int in [0, `LARGEST_SIZE`], or less inside `sizes_up_to`."""
    return integer(name, value, 0, _SIZE.get(), " positions", ": a mask so long does not fit into memory")


@contextmanager
def sizes_up_to(positions: int) -> Generator[None]:
    token = _SIZE.set(positions)
    try:
        yield
    finally:
        _SIZE.reset(token)


def boolean(name: str, value: object) -> bool:
    """Return `value` as a bool; accepts 0-d bools of numpy and torch, refuses numbers and texts."""
    if isinstance(value, bool):
        return value
    if getattr(value, "dtype", None) in (torch.bool, np.bool_) and getattr(value, "shape", None) == ():
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def number(name: str, value: object, minimum: float | None = None) -> float:
    """Return `value` as a finite float of at least `minimum`; refuses bools and texts."""
    try:
        if isinstance(value, bool | str | bytes) or getattr(value, "dtype", None) in (torch.bool, np.bool_):
            raise TypeError
        result = float(cast(SupportsFloat, value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}") from None
    if not math.isfinite(result) or (minimum is not None and result < minimum):
        least = "" if minimum is None else f" and at least {minimum:g}"
        raise ValueError(f"{name} must be finite{least}, got {result}")
    return result


def index_array(name: str, values: object, limit: int | None = None) -> IntArray:
    """Return integers as int64[n]; with `limit`, each must lie in [0, limit)."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} must be a sequence of integers, got the text {values!r:.40}")
    if isinstance(values, Tensor) and values.is_meta:
        raise ValueError(f"{name} must hold values, got a tensor on the meta device")
    plain = values.tolist() if isinstance(values, Tensor | np.ndarray | np.generic) else values
    if plain is values and not isinstance(values, Sequence):
        if not isinstance(values, Iterable):
            raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}")
        plain = list(cast(Iterable[object], values))
    if isinstance(plain, Sequence):
        kinds = {type(item) for item in cast(Sequence[object], plain)}
        if kinds & {bool, np.bool_}:
            raise TypeError(f"{name} must hold integers, got dtype bool")
        if any(issubclass(kind, Tensor) for kind in kinds):
            plain = [integer(f"each of {name}", item, -_LARGEST) for item in cast(Sequence[object], plain)]
    try:
        array = np.asarray(plain)
    except ValueError:  # lists of several lengths
        raise ValueError(f"{name} must be one-dimensional, got lists of several lengths") from None
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        wide = [item for item in array.tolist() if isinstance(item, int) and abs(item) > _LARGEST]
        wanted = f" of at most 64 bits, got {wide[0]}" if wide else f", got dtype {array.dtype}"
        raise TypeError(f"{name} must hold integers{wanted}")
    if array.dtype == np.uint64 and array.max() > _LARGEST:
        raise ValueError(f"{name} must hold integers of at most {_LARGEST}, got {array.max()}")
    array = array.astype(np.int64)
    if limit is not None and (array.min() < 0 or array.max() >= limit):
        bad = int(array[(array < 0) | (array >= limit)][0])
        raise ValueError(f"{name} must hold positions in [0, {limit}), got {bad}")
    return array


def permutation(name: str, values: object, size: int | None = None) -> IntArray:
    array = index_array(name, values)
    n = len(array) if size is None else size
    if len(array) != n or not np.array_equal(np.sort(array), np.arange(n)):
        raise ValueError(f"{name} must be a permutation of range({n}), got {preview(array)}")
    return array


def preview(values: Iterable[object], limit: int = 12) -> str:
    items = [str(v) for _, v in zip(range(limit + 1), values, strict=False)]
    return "[" + ", ".join(items[:limit]) + (", ...]" if len(items) > limit else "]")


def divides(name: str, n: int, block: int) -> int:
    """The number of blocks in n; raises if n is not a multiple of the block size."""
    block = integer("block", block, 1)
    if n % block:
        raise ValueError(f"{name} must be a multiple of block = {block}, got {n}; pad to {-(-n // block) * block}")
    return n // block
