"""A mask in cells and blocks: allowed pairs of each, counted from row intervals, never n x n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnflow._core import checks
from attnflow._core.checks import IntArray
from attnflow.masks.mask import Mask


@dataclass(frozen=True, eq=False)
class Grid:
    """How much of each cell of `query_step` queries by `key_step` keys a mask allows.

    `counts` are its allowed pairs, `pairs` all of them, both int64[rows, columns]; cells at the far edges are smaller.
    """

    counts: IntArray
    pairs: IntArray
    query_step: int
    key_step: int

    @property
    def is_exact(self) -> bool:
        """Whether a cell is one pair."""
        return self.query_step == self.key_step == 1

    def levels(self, steps: int) -> IntArray:
        """0 for nothing allowed, `steps` for everything, 1..steps - 1 for evenly spaced shares between them."""
        between = 1 + np.minimum((self.counts / self.pairs * (steps - 1)).astype(np.int64), steps - 2)
        return np.where(self.counts == 0, 0, np.where(self.counts == self.pairs, steps, between))


def grid(mask: Mask, query_step: int, key_step: int) -> Grid:
    """Counts the allowed pairs of each cell. Cost: O(intervals + cells), for shattered rows O(keys met by a row)."""
    checks.integer("query_step", query_step, 1)
    checks.integer("key_step", key_step, 1)
    rows, columns = (
        np.diff(np.append(np.arange(0, size, step), size))
        for size, step in zip(mask.shape, (query_step, key_step), strict=True)
    )
    pairs = np.outer(rows, columns)
    if 0 in mask.shape:
        return Grid(np.zeros_like(pairs), pairs, query_step, key_step)
    return Grid(mask.block_counts((query_step, key_step)), pairs, query_step, key_step)


def square_grid(mask: Mask, limit: int) -> Grid:
    """The grid of square cells, as small as they can be with at most `limit` rows and columns."""
    step = max(1, -(-max(mask.shape) // checks.integer("limit", limit, 1)))
    return grid(mask, step, step)


def ticks(size: int, most: int = 6) -> list[int]:
    """Round positions to write on an axis, from 0 to the last position.

    >>> ticks(64), ticks(5), ticks(1000)
    ([0, 20, 40, 63], [0, 1, 2, 3, 4], [0, 200, 400, 600, 800, 999])
    """
    if size <= most:
        return list(range(size))
    step = next(s for power in range(20) for s in (10**power, 2 * 10**power, 5 * 10**power) if size / s <= most - 1)
    return [*[t for t in range(0, size, step) if t == 0 or size - 1 - t >= 0.6 * step], size - 1]


def block_sizes(mask: Mask) -> list[int]:
    """128, FlexAttention's block, and up to two smaller ones that cut a short sequence into 2 to 32 blocks."""
    n = max(mask.shape)
    return [128, *[size for size in (64, 32, 16, 8, 4) if 2 * size <= n <= 32 * size][:2]]
