"""Means with 95 % intervals of Student's t, paired or not, shares with Wilson's, ratios with a bootstrap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import gammaincinv, ndtr, ndtri, stdtrit

Array = npt.NDArray[np.float64]

DRAWS: Final = 10_000
_PARTS: Final = 2000  # of a distribution that is averaged over


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __format__(self, digits: str) -> str:
        return said(self.numbers, f"+{digits}")

    def __str__(self) -> str:
        return f"{self:.4f}"

    @property
    def numbers(self) -> list[float]:
        return [self.mean, self.low, self.high]

    @property
    def side(self) -> int:
        """1 or -1 if the whole interval lies above or below 0, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def less(self, bar: float) -> Interval:
        return Interval(self.mean - bar, self.low - bar, self.high - bar)


def widest(*intervals: Interval) -> Interval:
    """What all of them say of one quantity: the mean that is nearest to 0, and the outermost ends.

    >>> print(format(widest(Interval(0.2, 0.1, 0.3), Interval(0.1, -0.1, 0.2)), ".1f"))
    +0.1 [-0.1, +0.3]
    """
    nearest = min((one.mean for one in intervals), key=abs)
    return Interval(nearest, min(one.low for one in intervals), max(one.high for one in intervals))


def said(numbers: Sequence[float], form: str = ".3f") -> str:
    """Mean, low and high in text.

    >>> said([0.5, 0.25, 0.75], ".0%")
    '50% [25%, 75%]'
    """
    return "{0:{3}} [{1:{3}}, {2:{3}}]".format(*numbers, form)


def interval(values: Array) -> Interval:
    """Mean of [seeds, items] with the interval of Student's t.

    With several seeds it is that of their means, so that it speaks of further seeds and these items. With one seed it
    is over items, which must be independent, and speaks of further items alone.
    """
    return student((values.mean(axis=1) if len(values) > 1 else values[0]).tolist())


def student(values: Sequence[float]) -> Interval:
    """Mean of independent values with the interval of Student's t; it has no ends if there is one value only."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def proportion(successes: int, items: int) -> Interval:
    """How many of so many, with Wilson's interval, which is honest where none or all are right.

    >>> print(f"{proportion(0, 100).high:.3f}")
    0.037
    """
    if not 0 <= successes <= items or items < 1:
        raise ValueError(f"expected 0 to {items} successes of at least one item, got {successes}")
    z, mean = float(ndtri(0.975)), successes / items
    middle = (mean + z * z / (2 * items)) / (1 + z * z / items)
    half = z / (1 + z * z / items) * math.sqrt(mean * (1 - mean) / items + z * z / (4 * items * items))
    low, high = middle - half if successes else 0.0, middle + half if successes < items else 1.0  # free of rounding
    return Interval(mean, low, high)


def detectable(values: Sequence[float], power: float = 0.8) -> float:
    """The smallest true mean, in size, that the interval of Student's t would distinguish from 0 so often.

    Independent normal values with the spread of these; their own mean does not enter.
    """
    if len(values) < 2:
        raise ValueError(f"a spread takes at least 2 values, got {len(values)}")
    freedom = len(values) - 1
    threshold = float(stdtrit(freedom, 0.975))
    # The spread of a sample, as a share of the true one, at the middles of equally likely parts.
    chances = (np.arange(_PARTS) + 0.5) / _PARTS
    shares = threshold * np.sqrt(2 * gammaincinv(freedom / 2, chances) / freedom)

    def seen(shift: float) -> float:
        return float(np.mean(ndtr(shift - shares) + ndtr(-shift - shares)))

    shift = float(brentq(lambda shift: seen(shift) - power, 0.0, 10 * threshold))
    return shift * statistics.stdev(values) / math.sqrt(len(values))


def ratios(part: Array, whole: Array, draws: int = DRAWS) -> Array:
    """part.sum(0) / whole.sum(0) of each column, with its low and high end: [columns, 3].

    A percentile bootstrap over rows, the same for all columns and for both arrays [rows, columns]. A ratio over nothing
    is infinite.

    Cost: draws * rows * columns multiplications.
    """
    generator, rows = np.random.default_rng(0), len(part)
    both = np.concatenate([part, whole], axis=1)
    drawn = np.empty((draws, both.shape[1]))
    for first in range(0, draws, 100):  # few enough that the counts of rows have room
        numbers = generator.integers(rows, size=(min(100, draws - first), rows))
        times = np.stack([np.bincount(row, minlength=rows) for row in numbers])
        drawn[first : first + len(times)] = times.astype(np.float64) @ both
    with np.errstate(divide="ignore"):
        means = part.sum(0) / whole.sum(0)
        found = drawn[:, : part.shape[1]] / drawn[:, part.shape[1] :]
    low, high = np.percentile(
        found, [2.5, 97.5], axis=0, method="nearest"
    )  # nothing lies between a number and infinity
    return np.stack([means, low, high], axis=1)


def welch(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Mean of `one` less that of `other`, independent samples of any spread, with Welch's interval."""
    if min(len(one), len(other)) < 2:
        raise ValueError(f"expected at least 2 values of each sample, got {len(one)} and {len(other)}")
    mean = statistics.fmean(one) - statistics.fmean(other)
    shares = [statistics.variance(each) / len(each) for each in (one, other)]
    if not sum(shares):
        raise ValueError("expected samples with a spread, got two constants")
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(each) - 1) for share, each in zip(shares, (one, other), strict=True)
    )
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(shares))
    return Interval(mean, mean - half, mean + half)


def permutation_test(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p-value of the difference of means over all ways of splitting both into two such groups.

    Cost: the number of ways, 252 for two groups of five.
    """
    every, size = np.array([*one, *other], dtype=np.float64), len(one)
    ways = math.comb(len(every), size)
    if ways > 1_000_000:
        raise ValueError(f"{ways} ways of splitting {len(every)} values: too many to go through all")
    seen = abs(np.mean(one) - np.mean(other))
    total = every.sum()
    sums = np.array([every[list(chosen)].sum() for chosen in combinations(range(len(every)), size)])
    found = np.abs(sums / size - (total - sums) / (len(every) - size))
    return float(np.mean(found >= seen * (1 - 1e-12) - 1e-15))


def speed_up(steps: Sequence[float], faster: Sequence[float], control: Sequence[float], window: int = 3) -> float:
    """How much earlier one curve of losses is where another one ends: 1 - (its step there) / (all steps).

    Both curves are smoothed by a running mean of `window` points; the place of the first crossing is interpolated. 0.3:
    the level at the end of `control` is reached after 70 % of the steps. A curve that never gets there has 0.0; one of
    noise against another of the same kind has more than 0 on average, so that a comparison needs a null distribution.

    >>> speed_up([0, 1, 2, 3, 4], [8, 4, 2, 1, 1], [8, 6, 5, 4, 3], window=1)
    0.625
    """
    if not len(steps) == len(faster) == len(control) or len(steps) < window:
        raise ValueError(f"curves must have one value for each of at least {window} steps")
    mine, theirs = (_smoothed(np.array(curve, dtype=np.float64), window) for curve in (faster, control))
    places = np.array(steps, dtype=np.float64)[window - 1 :]
    level = theirs[-1]
    below = np.flatnonzero(mine <= level)
    if not len(below):
        return 0.0
    first = int(below[0])
    place = places[first]
    if first:
        part = (mine[first - 1] - level) / (mine[first - 1] - mine[first])
        place = places[first - 1] + part * (place - places[first - 1])
    return float(1 - place / places[-1])


def _smoothed(curve: Array, window: int) -> Array:
    return np.convolve(curve, np.ones(window) / window, mode="valid")
