"""Is a change rounding? It is if another precision does not show it, it is small, and both compute the same thing."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

# Units in the last place of the largest value that rounding may move. Products of formats narrower than float32 add up
# in float32 and are rounded once.
_ROUNDING: Final = 64
_ROUNDED_ONCE: Final = 4
_COARSE: Final = {"high": 2.0**-10, "medium": 2.0**-7}  # units of float32 products, by torch's setting
_FAR: Final = 1e-2  # of the largest value: two precisions of one computation are closer than this


def row_change(after: Tensor, before: Tensor) -> Tensor:
    """The largest absolute change of each row, float64 [batch, positions] on the CPU; NaN equals NaN."""
    same = (after == before) | (after.isnan() & before.isnan())
    difference = (after.double() - before.double()).abs().nan_to_num(nan=torch.inf)
    return torch.where(same, 0.0, difference).amax(-1).cpu()


def other_precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else torch.float64


def recurs(change: Tensor, values: Tensor, other_values: Tensor, other_moved: Tensor, dtype: torch.dtype) -> Tensor:
    """Which rows move in both precisions: a leak keeps its size in float64, rounding shrinks; the border is between.

    In float64 it exceeds one unit in the last place and eight times the scaled error of float32, as both runs err.
    """
    eps, other = torch.finfo(dtype).eps, torch.finfo(other_precision(dtype)).eps
    if other < eps:
        return row_change(other_moved, other_values) >= change * math.sqrt(other / eps)
    error = float(row_change(values, other_values).max()) * eps / other
    return change > 8 * (error + eps * scale_of(values))


def scale_of(values: Tensor) -> float:
    return float(values.double().abs().nan_to_num(nan=0.0, posinf=0.0).max())


def unit(values: Tensor) -> float:
    eps, device = torch.finfo(values.dtype).eps, values.device.type
    if values.dtype == torch.float64:
        return eps
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype
    return max(eps, torch.finfo(narrow).eps, _COARSE.get(torch.get_float32_matmul_precision(), 0.0))


def rounding_bound(values: Tensor, eps: float) -> float:
    """The largest change of a module's output that rounding can explain, from inputs that did not change."""
    units = _ROUNDING if eps <= torch.finfo(torch.float32).eps else _ROUNDED_ONCE
    return units * eps * scale_of(values)


def computed_otherwise(other_values: Tensor, values: Tensor, eps: float) -> bool:
    """Whether most rows of a tensor differ far from those of another precision; a few may, where a router chooses."""
    change = row_change(other_values, values)
    far = max(_FAR, math.sqrt(eps)) * scale_of(values)
    return int((change > far).sum()) * 2 > change.numel()
