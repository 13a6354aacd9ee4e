"""Hooks by which files above `mask` give it the catalogue and a reader of plain data; advice for a wrong type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

CATALOGUE: Final[dict[str, Callable[..., Any]]] = {}
_READERS: Final[list[Callable[[object, str], Any]]] = []


def reads_masks(reader: Callable[[object, str], Any]) -> None:
    """Registers the function (plain data, name of its place) -> mask."""
    _READERS[:] = [reader]


def read_mask(spec: object, where: str = "mask") -> Any:
    """Makes a mask from plain data with `attnflow.masks.spec`."""
    return _READERS[0](spec, where)


def not_a_mask(value: object) -> TypeError:
    """The error for a wrong type: what came, and which call makes a mask of it."""
    return TypeError(f"expected a Mask, got {type(value).__name__}; {_how_to_make_one(value)}")


def _how_to_make_one(value: object) -> str:
    make = "af.masks."
    if isinstance(value, np.ndarray):
        return f"make one with {make}from_dense(torch.from_numpy(array))"
    if isinstance(value, Tensor):
        table = "tensor" + "[0]" * (value.ndim - 2)  # of one batch element and head
        if value.dtype != torch.bool:
            table = f"{table} == 0" if value.is_floating_point() else f"{table}.bool()"
        return f"make one with {make}from_dense({table})"
    if type(value).__name__ == "BlockMask":  # by name: its module takes 0.3 s to import
        return f"make one with {make}from_block_mask(block_mask)"
    if callable(value) and getattr(value, "__module__", "") in ("attnflow.masks.catalogue", "attnflow.masks.streams"):
        return f"call {getattr(value, '__name__', 'it')} with its arguments first"
    if callable(value):
        return f"make one with {make}from_mask_mod(function, num_queries)"
    if type(getattr(value, "mask", None)).__name__ == "Mask":
        return "pass its .mask"
    return f"make one with the catalogue, such as {make}causal(n), or with {make}from_dense(torch.tensor(rows))"
