"""What a table of the two neighbours of a gap says of its tokens: what a model must beat to be of any use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experiments.hasse.tables import PRIOR, shares
from experiments.infilling.filling import Gaps

_Ints = npt.NDArray[np.int64]
_Counted = tuple[_Ints, _Ints]  # of pairs (context, token), in ascending order, and how often each was seen


def between(gaps: Gaps, training: Tensor, held: Tensor, vocabulary: int) -> tuple[Tensor, list[float]]:
    """(the likeliest tokens of each gap [rows, gaps, block], mean nats of the right ones for each row).

    Each token alone, given the last token before the gap and the first one after it; counts are smoothed towards those
    given the nearer of the two, and these towards the shares of tokens.

    Cost: O(n log n) for n training tokens, and the vocabulary for each pair of neighbours that the gaps have.
    """
    width, firsts = gaps.block + 1, np.array(gaps.firsts)
    of_text, values = training.numpy().astype(np.int64), held.numpy().astype(np.int64)
    each = shares(training, vocabulary)
    left, right = values[:, firsts - 1], values[:, firsts + gaps.block]
    pairs = left * vocabulary + right
    best = np.zeros((*pairs.shape, gaps.block), dtype=np.int64)
    loss = np.zeros_like(best, dtype=np.float64)
    for offset in range(gaps.block):
        before, token, after = (
            of_text[:, place : of_text.shape[1] - width + place].ravel() for place in (0, offset + 1, width)
        )
        is_left = offset < gaps.block / 2
        both = _counted(before * vocabulary + after, token, vocabulary)
        one = _counted(before if is_left else after, token, vocabulary)
        wanted = values[:, firsts + offset]
        for pair in np.unique(pairs):
            near = pair // vocabulary if is_left else pair % vocabulary
            chance = _smoothed(both, pair, _smoothed(one, near, each))
            here = pairs == pair
            best[here, offset] = chance.argmax()
            loss[here, offset] = -np.log(chance[wanted[here]])
    return torch.from_numpy(best), loss.mean(axis=(1, 2)).tolist()


def _counted(context: _Ints, token: _Ints, vocabulary: int) -> _Counted:
    found, counts = np.unique(context * vocabulary + token, return_counts=True)
    return found, counts


def _smoothed(counted: _Counted, context: int, prior: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Chances of all tokens after a context; `prior` is worth some counts."""
    found, counts = counted
    vocabulary = len(prior)
    first, last = np.searchsorted(found, [context * vocabulary, (context + 1) * vocabulary])
    chance = PRIOR * prior
    chance[found[first:last] - context * vocabulary] += counts[first:last]
    return chance / chance.sum()
