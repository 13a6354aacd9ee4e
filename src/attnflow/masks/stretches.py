"""Intervals of keys when the keys get other numbers: the stretches that they become, or a guess at how many."""

from __future__ import annotations

from typing import Final

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import IntervalRows, ragged

_SAMPLE: Final = 64  # intervals from which the number of all stretches is guessed
_LONG: Final = 1 << 16  # stretches: about as much work as to guess their number
_CHUNK: Final = 1 << 13  # intervals that are renumbered at a time

Pair = tuple[IntArray, IntArray]
Pieces = tuple[IntArray, IntArray, IntArray]


def pieces_of(rows: IntervalRows, new_key: IntArray | None, limit: int) -> Pieces | None:
    """Disjoint (row, start, end), unordered, with key k renumbered `new_key[k]`; None if over `limit`.

    `new_key` repeats no number within an interval. Cost: O((intervals + pieces) log keys), pieces up to `limit`.
    """
    row, starts, ends = rows.row_index(), rows.starts.astype(np.int64), rows.ends.astype(np.int64)
    if new_key is None or not len(starts):
        return row, starts, ends
    # Neighbouring keys whose numbers go up, or down, by one are a run; an interval becomes the parts of its runs.
    first = np.concatenate([[0], np.flatnonzero(np.abs(np.diff(new_key)) != 1) + 1])
    run = np.searchsorted(first, np.stack([starts, ends - 1]), side="right") - 1
    count = run[1] - run[0] + 1
    total = int(count.sum())
    if total > min(limit, 2 * len(starts)) and (neighbours := _neighbours(new_key)):  # parts may lie together
        joined = _joined(starts, ends, new_key, neighbours, limit)
        return None if joined is None else (row[joined[0]], *joined[1:])
    if total > limit:
        return None
    interval, which = ragged(run[0], count)
    low = new_key[np.maximum(starts[interval], first[which])]
    high = new_key[np.minimum(ends[interval], np.append(first, len(new_key))[which + 1]) - 1]
    return row[interval], np.minimum(low, high), np.maximum(low, high) + 1


def expected(starts: IntArray, ends: IntArray, new_key: IntArray, sample: int = _SAMPLE) -> int:
    """The number of maximal stretches, guessed from a sample of the intervals; no number stands twice."""
    neighbours = _neighbours(new_key)
    if not len(starts) or neighbours is None:
        return 0
    chosen = np.random.default_rng(0).integers(len(starts), size=min(len(starts), sample))
    begun: list[int] = []
    for start, end in zip(starts[chosen], ends[chosen], strict=True):
        below = neighbours[0][start:end]
        begun.append(int(np.count_nonzero((below < start) | (below >= end))))
    return round(np.mean(begun) * len(starts))


def _neighbours(new_key: IntArray) -> Pair | None:
    """The keys that are numbered just below and just above each key, -1 for none; None if a number stands twice."""
    key_of = np.full(int(new_key.max(initial=-1)) + 3, -1)
    key_of[new_key + 1] = np.arange(len(new_key))
    unique = np.array_equal(key_of[new_key + 1], np.arange(len(new_key)))
    return (key_of[new_key], key_of[new_key + 2]) if unique else None


def _joined(starts: IntArray, ends: IntArray, new_key: IntArray, neighbours: Pair, limit: int) -> Pieces | None:
    """(interval, start, end) of maximal stretches, which begin where the key numbered just below lies outside."""
    if limit > _LONG:  # two samples that predict far more stretches than the limit are believed
        larger = max(_SAMPLE, min(1 << 10, (1 << 28) // len(new_key)))
        if all(expected(starts, ends, new_key, sample) > 4 * limit for sample in (_SAMPLE, larger)):
            return None
    stride, below, above = int(new_key.max()) + 2, *map(_ranges, neighbours)
    # Rows of a block share their intervals.
    pairs, which = np.unique(starts * (len(new_key) + 1) + ends, return_inverse=True)
    starts, ends = np.divmod(pairs, len(new_key) + 1)
    lows, highs, total = [pairs[:0]], [pairs[:0]], 0
    for first in range(0, len(starts), _CHUNK):
        part = slice(first, first + _CHUNK)
        for bounds, ranges in ((lows, below), (highs, above)):
            reported = _outside(ranges, starts[part], ends[part], limit - total)
            if reported is None:
                return None
            bounds.append(np.sort((reported[0] + first) * stride + new_key[reported[1]]))
        total += len(lows[-1])
    interval, low = np.divmod(np.concatenate(lows), stride)
    high = np.concatenate(highs) % stride + 1
    count = np.bincount(interval, minlength=len(starts))
    if count[which].sum() > limit:
        return None
    owner, place = ragged((np.cumsum(count) - count)[which], count[which])
    return owner, low[place], high[place]


def _ranges(values: IntArray) -> list[Pair]:
    """(minima, maxima) of an array over aligned ranges of 1, 2, 4, ... entries."""
    levels = [(values, values)]
    while len(levels[-1][0]) > 1:
        lowest, highest = levels[-1]
        if len(lowest) % 2:
            levels[-1] = lowest, highest = np.append(lowest, np.iinfo(np.int64).max), np.append(highest, -2)
        levels.append((lowest.reshape(-1, 2).min(axis=1), highest.reshape(-1, 2).max(axis=1)))
    return levels


def _outside(levels: list[Pair], starts: IntArray, ends: IntArray, limit: int) -> Pair | None:
    """(interval, index) of entries with values outside their interval; ranges without any are not entered."""
    interval, node = np.arange(len(starts)), np.zeros(len(starts), np.int64)
    for level in range(len(levels) - 1, -1, -1):
        lowest, highest = levels[level]
        start, end = starts[interval], ends[interval]
        enter = (lowest[node] < start) | (highest[node] >= end)
        enter &= (node << level < end) & (node + 1 << level > start)
        interval, node = interval[enter], node[enter]
        if len(node) > limit + 2 * len(starts):
            return None
        if level:
            interval, node = np.repeat(interval, 2), np.stack([2 * node, 2 * node + 1], axis=1).ravel()
    return (interval, node) if len(node) <= limit else None
