"""What a table of the last token read says of a token some places on: what a model must beat to be of any use."""

from __future__ import annotations

from typing import Final

import numpy as np
from torch import Tensor

PRIOR: Final = 20.0  # counts that the frequencies alone are worth


def frequencies(training: Tensor, held: Tensor, vocabulary: int) -> float:
    """Nats per token of held-out rows by the frequencies of the training text."""
    return float(-np.log(shares(training, vocabulary)[held.numpy()]).mean())


def after(training: Tensor, held: Tensor, distance: int, vocabulary: int) -> float:
    """Nats per token of held-out rows, given the token `distance` places before it.

    Counts of pairs are smoothed towards the frequencies of tokens.

    Cost: O(n log n) for n training tokens.
    """
    each = shares(training, vocabulary)
    pairs, counts = np.unique(_pairs(training, distance, vocabulary), return_counts=True)
    wanted = _pairs(held, distance, vocabulary)
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, counts[place], 0)
    before = np.bincount(pairs // vocabulary, weights=counts, minlength=vocabulary)[wanted // vocabulary]
    chance = (seen + PRIOR * each[wanted % vocabulary]) / (before + PRIOR)
    return float(-np.log(chance).mean())


def shares(rows: Tensor, vocabulary: int) -> np.ndarray:
    """The share of each token in a text; each is above 0."""
    counts = np.bincount(rows.numpy().ravel(), minlength=vocabulary) + 1.0
    return counts / counts.sum()


def _pairs(rows: Tensor, distance: int, vocabulary: int) -> np.ndarray:
    values = rows.numpy()
    return (values[:, :-distance] * vocabulary + values[:, distance:]).ravel()
