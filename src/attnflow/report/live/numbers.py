"""Numbers as a page gets them: rounded to the digits that are drawn, and null in place of NaN, which JSON lacks."""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt
from torch import Tensor


def table(values: Tensor | npt.NDArray[Any]) -> list[list[float | None]]:
    return [[number(value) for value in row] for row in values.tolist()]


def numbers(**values: float | None) -> dict[str, float | None]:
    return {name: number(value) for name, value in values.items()}


def number(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
