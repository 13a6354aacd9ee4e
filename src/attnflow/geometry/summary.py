"""Median and quartiles of scores over the layers, or the heads, of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from attnflow.models.families.find import Kind

Matrix = Literal["all", "head"]


@dataclass(frozen=True)
class Quartiles:
    """First quartile, median and third quartile (linear interpolation); NaN without values."""

    q25: float
    median: float
    q75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Of the values that are numbers."""
        numbers = [value for value in values if not math.isnan(value)]
        return cls(*(float(q) for q in np.quantile(numbers, (0.25, 0.5, 0.75)))) if numbers else cls(*[math.nan] * 3)

    def __str__(self) -> str:
        return f"{self.median:z.3f} [{self.q25:z.3f}, {self.q75:z.3f}]"


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of one kind of attention in one tower.

    Attributes:
        tower: as in `MatrixScores`.
        kind: as in `MatrixScores`.
        matrix: "all" (the full matrix of each layer) or "head" (each head of each layer by itself).
        count: matrices.
        flagged: matrices with a flag.
        symmetry: over these matrices.
        directionality: over these matrices.
        norm: over these matrices.
    """

    tower: str
    kind: Kind
    matrix: Matrix
    count: int
    flagged: int
    symmetry: Quartiles
    directionality: Quartiles
    norm: Quartiles

    @property
    def what(self) -> str:
        """Tower and kind in words, such as "decoder, cross"."""
        return ", ".join(filter(None, (self.tower, self.kind)))
