"""Masks over several streams of one sequence: training layouts that are longer than the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnflow._core import checks
from attnflow._core.checks import Indices, boolean, integer
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.masks.registry import mask, named_masks


@mask(permutation="2,0,3,1")
def permutation_lm(permutation: Indices) -> Mask:
    """XLNet's two-stream attention (arXiv:1906.08237, sec. 2.3) as one mask over 2n positions.

    Positions 0..n-1 are the content stream h, and n..2n-1 the query stream g. Let t(i) be the step of position i in
    the factorisation order, so `permutation[t(i)] == i`. Content i attends to content j iff t(j) <= t(i). Query i
    attends to content j iff t(j) < t(i), and to itself.

    Args:
        permutation: the factorisation order of the n positions.

    >>> permutation_lm([1, 0]).dense().int().tolist()
    [[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """
    order = checks.permutation("permutation", permutation)
    n = len(order)
    checks.size("2n", 2 * n)
    step = np.empty_like(order)
    step[order] = t = np.arange(n)
    rank = np.concatenate([step, n + step])  # numbered by step, each row is one or two intervals
    rows = IntervalRows.of(2 * n, 2 * n, (t, 0, t + 1), (n + t, 0, t), (n + t, n + t, n + t + 1))
    return Mask(rows, "permutation_lm", {"permutation": tuple(order.tolist())}, query_rank=rank, key_rank=rank)


@mask(num_blocks="4", block="2")
def block_two_stream(num_blocks: int, block: int, predict_first: bool = False) -> Mask:
    """Block two-stream attention (hasse, eq. 45, which is correct): block generation without approximation.

    Let N = num_blocks and p = N - 1. There are p content blocks, then p mask blocks; mask block t (from 0) predicts
    content block t + 1. Content block i attends to content j <= i. Mask block t attends to content j <= t and to
    itself. `predict_first` adds the mask block that predicts block 0 from nothing and attends only to itself; the
    paper leaves it out. Mask blocks are then t = 0..p, and block t attends to content j < t and to itself.

    Positions of the tokens: `[0..p*block-1] ++ [block..N*block-1]`, with `predict_first` `[0..] ++ [0..]`.

    >>> block_two_stream(3, 1).dense().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    >>> block_two_stream(2, 1, predict_first=True).dense().int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    num_blocks = integer("num_blocks", num_blocks, 1)
    block = integer("block", block, 1)
    predict_first = boolean("predict_first", predict_first)
    p = num_blocks - 1
    checks.size("the number of positions", (2 * p + predict_first) * block)
    content, ahead = np.arange(p), np.arange(p + predict_first)
    below = ahead if predict_first else ahead + 1  # content blocks that a mask block sees
    itself = p + ahead
    size = p + len(ahead)
    blocks = IntervalRows.of(size, size, (content, 0, content + 1), (itself, 0, below), (itself, itself, itself + 1))
    parameters = {"num_blocks": num_blocks, "block": block, "predict_first": predict_first}
    return Mask(blocks.in_blocks(block), "block_two_stream", parameters)


@mask(num_blocks="4", block="2")
def block_diffusion(num_blocks: int, block: int) -> Mask:
    """Training mask of block diffusion (BD3-LM, arXiv:2503.09573, sec. B.6): noised blocks, then clean blocks.

    Noised block i attends to itself and to clean blocks j < i; clean block i attends to clean blocks j <= i. No
    prediction reads the last clean block, so `af.tasks.check` reports it as dead (order.md).

    >>> block_diffusion(2, 1).dense().int().tolist()
    [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    n = integer("num_blocks", num_blocks, 1)
    block = integer("block", block, 1)
    checks.size("2 * num_blocks * block", 2 * n * block)
    i = np.arange(n)
    # Numbered with the clean blocks first, information flows upwards only.
    blocks = IntervalRows.of(2 * n, 2 * n, (i, 0, i + 1), (n + i, 0, i), (n + i, n + i, n + i + 1))
    rank = np.roll(np.arange(2 * n * block), n * block)
    parameters = {"num_blocks": n, "block": block}
    return Mask(blocks.in_blocks(block), "block_diffusion", parameters, query_rank=rank, key_rank=rank)


@mask(n="6")
def butterfly(n: int) -> Mask:
    """Butterfly attention over 3n - 2 positions: every prediction reads both sides of its token, and nothing leaks.

    This is eq. 58 of hasse, *corrected*: the printed form drops the right neighbour of every centre, so that n - 1 of
    the n subtasks are not embedded (`i-n+1 < j` must be `i-n+1 <= j`). Let a = n - 1, with q and k from 0. The
    forward stream, q < a, reads k <= q. The backward stream, a <= q < 2a, reads q <= k < 2a. The centre q = 2a + s
    reads k < s, a + s <= k < 2a, and k == q. The mask allows n(2n - 1) pairs.

    Positions of the tokens: `[0..n-2] ++ [1..n-1] ++ [0..n-1]`.

    >>> butterfly(2).dense().int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
    >>> butterfly(5).nnz == 5 * (2 * 5 - 1)
    True
    """
    n = integer("n", n)
    size = checks.size("3n - 2", max(3 * n - 2, 0))
    a = max(n - 1, 0)
    t, s = np.arange(a), np.arange(n)
    # Numbered with the backward stream reversed, information flows upwards only.
    rank = np.concatenate([t, 2 * a - 1 - t, 2 * a + s])
    centre = 2 * a + s
    streams = (t, 0, t + 1), (a + t, a, a + t + 1)
    centres = (centre, 0, s), (centre, a, 2 * a - s), (centre, centre, centre + 1)
    rows = IntervalRows.of(size, size, *streams, *centres)
    return Mask(rows, "butterfly", {"n": n}, query_rank=rank, key_rank=rank)


@mask(n="6", horizon="3")
def look_ahead(n: int, horizon: int) -> Mask:
    """Look-ahead mask tokens after every position (Samragh et al., arXiv:2507.11851).

    The n content positions come first. Then content i has `horizon - 1` mask tokens d = 1..horizon-1, at position
    n + i * (horizon - 1) + d - 1; token d of i predicts i + d + 1. Content attends causally. Mask token d attends to
    content k <= i and to the mask tokens 1..d of the same i. `horizon=1` is `causal(n)`. The family that it trains is
    `af.tasks.look_ahead`. Predicting several tokens without extra ones (`af.tasks.multi_token_prediction`) is causal.

    >>> look_ahead(2, 2).dense().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    n, horizon = integer("n", n), integer("horizon", horizon, 1)
    size = checks.size("n * horizon", n * horizon)
    ahead = horizon - 1
    q, m = np.arange(n), np.arange(n * ahead)
    i = m // max(ahead, 1)
    rows = IntervalRows.of(size, size, (q, 0, q + 1), (n + m, 0, i + 1), (n + m, n + i * ahead, n + m + 1))
    return Mask(rows, "look_ahead", {"n": n, "horizon": horizon})


if not TYPE_CHECKING:
    __all__ = list(named_masks(__name__))
