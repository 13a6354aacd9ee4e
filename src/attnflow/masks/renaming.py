"""Intervals of keys after the keys got other numbers, in time and memory of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from attnflow._core.checks import IntArray

_SAMPLE: Final = 64  # intervals from which the number of all stretches is guessed
_LONG: Final = 1 << 16  # stretches: about as much work as to guess their number
_CHUNK: Final = 1 << 13  # intervals that are renamed at a time

Pieces = tuple[IntArray, IntArray, IntArray]


def renamed(starts: IntArray, ends: IntArray, new_key: IntArray, limit: int) -> Pieces | None:
    """(number of the interval, start, end) of each stretch of new numbers; None if there are more than `limit`.

    Args:
        starts: int64[m], first key of each interval.
        ends: int64[m], the key after its last; intervals are not empty.
        new_key: int64[n], the number that each key gets; no number twice within an interval.
        limit: of stretches.

    Cost: O((m + stretches) log n), stretches up to `limit`.
    """
    first = np.concatenate([[0], np.flatnonzero(np.abs(np.diff(new_key)) != 1) + 1])  # where numbers stop to run on
    run = np.searchsorted(first, np.stack([starts, ends - 1]), side="right") - 1
    count = run[1] - run[0] + 1
    total = int(count.sum())
    if total > min(limit, 2 * len(starts)):  # each key alone, perhaps, where their new numbers still lie together
        size = int(new_key.max()) + 1
        old_key = np.full(size + 2, -1)  # with a number before the first and one after the last
        old_key[new_key + 1] = np.arange(len(new_key))
        if np.array_equal(old_key[new_key + 1], np.arange(len(new_key))):  # no number is there twice
            if limit > _LONG and hopeless(starts, ends, new_key, limit):
                return None
            return _sorted_runs(starts, ends, new_key, old_key, limit)
    if total > limit:
        return None
    source = np.repeat(np.arange(len(count)), count)
    which = np.arange(total) - np.repeat(np.cumsum(count) - count - run[0], count)
    low = np.maximum(starts[source], first[which])
    high = np.minimum(ends[source], np.append(first, len(new_key))[which + 1]) - 1
    low, high = new_key[low], new_key[high]
    return source, np.minimum(low, high), np.maximum(low, high) + 1


def expected(starts: IntArray, ends: IntArray, new_key: IntArray, sample: int = _SAMPLE) -> int:
    """About how many stretches `renamed` gives, from a sample of the intervals. Cost: O(n)."""
    if not len(starts):
        return 0
    chosen = np.random.default_rng(0).integers(len(starts), size=min(len(starts), sample))
    old_key = np.full(int(new_key.max()) + 2, -1)
    old_key[new_key + 1] = np.arange(len(new_key))
    below = old_key[new_key]
    parts = ((start, end, below[start:end]) for start, end in zip(starts[chosen], ends[chosen], strict=True))
    return round(
        np.mean([np.count_nonzero((part < start) | (part >= end)) for start, end, part in parts]) * len(starts)
    )


def hopeless(starts: IntArray, ends: IntArray, new_key: IntArray, limit: int) -> bool:
    """Whether two samples say that there are far more stretches than `limit`. Cost: O(n), of which there is less."""
    larger = max(_SAMPLE, min(1 << 10, (1 << 28) // max(1, len(new_key))))
    return all(expected(starts, ends, new_key, sample) > 4 * limit for sample in (_SAMPLE, larger))


def _sorted_runs(starts: IntArray, ends: IntArray, new_key: IntArray, old_key: IntArray, limit: int) -> Pieces | None:
    """The maximal stretches of each interval: a key begins one iff the key numbered just below it is outside."""
    n, stride = len(new_key), len(old_key) + 1
    pairs, which = np.unique(starts * (n + 1) + ends, return_inverse=True)  # rows of a block share their intervals
    starts, ends = np.divmod(pairs, n + 1)
    below, above = _Ranges.of(old_key[new_key]), _Ranges.of(old_key[new_key + 2])
    lows, highs, total = [pairs[:0]], [pairs[:0]], 0
    for first in range(0, len(starts), _CHUNK):
        part = slice(first, first + _CHUNK)
        for bounds, ranges in ((lows, below), (highs, above)):
            reported = ranges.outside(starts[part], ends[part], limit - total)
            if reported is None:
                return None
            bounds.append(np.sort((reported[0] + first) * stride + new_key[reported[1]]))
        total += len(lows[-1])
    interval, low = np.divmod(np.concatenate(lows), stride)
    high = np.concatenate(highs) % stride + 1
    count = np.bincount(interval, minlength=len(starts))
    repeats = count[which]
    if repeats.sum() > limit:
        return None
    source = np.repeat(np.arange(len(which)), repeats)
    shift = (np.cumsum(count) - count)[which] - (np.cumsum(repeats) - repeats)
    place = np.arange(len(source)) + np.repeat(shift, repeats)
    return source, low[place], high[place]


@dataclass(frozen=True)
class _Ranges:
    """Minima and maxima of an array over aligned ranges of 1, 2, 4, ... entries."""

    lowest: list[IntArray]
    highest: list[IntArray]

    @classmethod
    def of(cls, values: IntArray) -> _Ranges:
        lowest, highest = [values], [values]
        while len(lowest[-1]) > 1:
            if len(lowest[-1]) % 2:
                lowest[-1] = np.append(lowest[-1], np.iinfo(np.int64).max)
                highest[-1] = np.append(highest[-1], -2)
            lowest.append(lowest[-1].reshape(-1, 2).min(axis=1))
            highest.append(highest[-1].reshape(-1, 2).max(axis=1))
        return cls(lowest, highest)

    def outside(self, starts: IntArray, ends: IntArray, limit: int) -> tuple[IntArray, IntArray] | None:
        """(interval, index) of the entries in each interval whose values are not in it; None if over `limit`.

        A range within an interval is entered only if it holds such an entry, so the ranges of a level are at most as
        many as the answers, and two more for each interval.
        """
        top = len(self.lowest) - 1
        level_of = np.minimum(np.frexp((ends - starts).astype(np.float64))[1], top)
        interval, node = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for level in range(top, -1, -1):
            fresh = np.flatnonzero(level_of == level)
            left, right = starts[fresh] >> level, (ends[fresh] - 1) >> level  # the same range, or the one beside it
            two = right > left
            interval = np.concatenate([interval, fresh, fresh[two]])
            node = np.concatenate([node, left, right[two]])
            start, end = starts[interval], ends[interval]
            enter = (self.lowest[level][node] < start) | (self.highest[level][node] >= end)
            enter &= (node << level < end) & (node + 1 << level > start)
            interval, node = interval[enter], node[enter]
            if len(node) > limit + 2 * len(starts):
                return None
            if level:
                interval = np.repeat(interval, 2)
                node = np.stack([2 * node, 2 * node + 1], axis=1).ravel()
        return (interval, node) if len(node) <= limit else None
