"""What is left of a bias when it is shuffled: a control for how much of its effect comes from pairs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnflow.bias.kind import LayerBias, layer_biases
from attnflow.bias.terms import Additive, Dense, Guidance, Product, Term


@contextmanager
def shuffled(model: nn.Module, how: str, seed: int = 0) -> Generator[None]:
    """Run a causal model with the bias of each layer shuffled; for rows that hold one whole document each, no cache.

    "queries": each query is given the guidance of the query at the same position of the *next sequence of the batch*:
    B'[b, i, j] = B(q[b + 1, i], k[b, j]). Both see the same number of keys, nothing of the future enters, and all that
    depends on the key alone stays: a key-only bias keeps its whole effect.

    "keys": for each query, the values of B over its allowed keys are permuted among these keys, independently in each
    row: B'[i, j] = B[i, p_i(j)] with p_i uniform on 0..i. The distribution of B in each row stays, what it says about
    which key is lost.

    Args:
        model: with a bias.
        how: "queries" or "keys".
        seed: of the permutations; the same in every forward pass of a layer.
    """
    ways: dict[str, Callable[[Term, torch.Generator], Term]] = {"queries": _queries, "keys": _keys}
    if how not in ways:
        raise ValueError(f"how must be 'queries' or 'keys', got {how!r}")
    biases = [bias for _, bias in layer_biases(model)]
    for bias in biases:
        bias.terms = _Shuffled(bias, ways[how], seed)
    try:
        yield
    finally:
        for bias in biases:
            del bias.terms  # the method of the class shows again


class _Shuffled:
    """Stands in for `LayerBias.terms`."""

    def __init__(self, bias: LayerBias, way: Callable[[Term, torch.Generator], Term], seed: int) -> None:
        self.terms, self.way, self.seed = bias.terms, way, seed + 1000 * bias.shape.index

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Term, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(self.way(term, generator) for term in self.terms(*args, **kwargs))


def _queries(term: Term, generator: torch.Generator) -> Term:
    del generator
    if isinstance(term, Additive):
        return replace(term, rows=None)  # its query side is what softmax cannot see
    if not isinstance(term, Guidance | Product):
        raise ValueError(f"a {type(term).__name__} term has no vectors of queries to shuffle")
    if term.rows.shape[0] < 2:
        raise ValueError("shuffling queries takes them from another sequence: give a batch of at least 2")
    return replace(term, rows=term.rows.roll(-1, dims=0))


def _keys(term: Term, generator: torch.Generator) -> Term:
    columns = next(value.shape[-2 if value.ndim == 4 else -1] for value in _sides(term))
    every = slice(0, columns)
    values = term.tile(every, every)
    if values.shape[-2] != values.shape[-1]:
        raise ValueError("shuffling keys needs all tokens of a sequence in one call, without a cache")
    order = _orders(columns, generator).to(values.device)
    return Dense(values.gather(-1, order.expand(values.shape)))


def _sides(term: Term) -> list[Tensor]:
    found = getattr(term, "columns", None)
    if not isinstance(found, Tensor):
        raise ValueError(f"a {type(term).__name__} term has no columns to shuffle")
    return [found]


def _orders(size: int, generator: torch.Generator) -> Tensor:
    """int64[size, size]: row i is a uniform permutation of 0..i, followed by i + 1, i + 2, ... unmoved."""
    noise = torch.rand(size, size, generator=generator)
    place = torch.arange(size)
    later = place[None] > place[:, None]
    return torch.where(later, place.expand(size, size).float() + 1, noise).argsort(dim=-1)
