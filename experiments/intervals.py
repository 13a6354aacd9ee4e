"""Means with 95 % intervals: a bootstrap over seeds and rows, or Student's t where there are seeds alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

Array = npt.NDArray[np.float64]

DRAWS: Final = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __format__(self, digits: str) -> str:
        return "{0:+{3}} [{1:+{3}}, {2:+{3}}]".format(*self.numbers, digits)

    def __str__(self) -> str:
        return f"{self:.4f}"

    @property
    def numbers(self) -> list[float]:
        """Mean, low, high, as files hold them."""
        return [self.mean, self.low, self.high]


def interval(values: Array, draws: int = DRAWS) -> Interval:
    """Mean of [seeds, rows] with a percentile bootstrap that draws seeds and rows anew, both with replacement.

    Rows are paired with those of what they are compared with before they come here. With three seeds the interval is
    a rough one, and too narrow rather than too wide.
    """
    low, high = np.percentile(_means(values, draws), [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


def student(values: Sequence[float]) -> Interval:
    """Mean of independent values with the interval of Student's t; it has no ends if there is one value only."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def fraction(part: Array, whole: Array, draws: int = DRAWS) -> Interval | None:
    """part.mean() / whole.mean() with the same bootstrap for both; None if the whole is not clearly above 0."""
    wholes = _means(whole, draws)
    if np.percentile(wholes, 2.5) <= 0:
        return None
    low, high = np.percentile(_means(part, draws) / wholes, [2.5, 97.5])
    return Interval(float(part.mean() / whole.mean()), float(low), float(high))


def _means(values: Array, draws: int) -> Array:
    generator = np.random.default_rng(0)  # the same draws for every array of a shape: ratios stay paired
    seeds, rows = values.shape
    means = np.empty(draws)
    for draw in range(draws):
        chosen = np.ix_(generator.integers(seeds, size=seeds), generator.integers(rows, size=rows))
        means[draw] = values[chosen].mean()
    return means
