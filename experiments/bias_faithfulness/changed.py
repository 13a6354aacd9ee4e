"""A trained bias, changed as it is computed: keys hidden from queries, or one sign of it kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from attnflow.bias.config import Vectors
from attnflow.bias.kind import LayerBias, layer_biases
from attnflow.bias.terms import Dense, Term

Change = Callable[[Tensor, int], Tensor]  # (B [batch or 1, maps, queries, keys], number of the layer) -> another B

_HIDDEN: Final = -1e9  # its weight after softmax is 0, exactly


@contextmanager
def changed(model: nn.Module, change: Change) -> Generator[None]:
    """Run a causal model with the bias of each layer changed; for sequences of one length, without a cache."""
    biases = [bias for _, bias in layer_biases(model)]
    for bias in biases:
        bias.terms = _Changed(bias, change)
    try:
        yield
    finally:
        for bias in biases:
            del bias.terms  # the method of the class shows again


class _Changed:
    """Stands in for `LayerBias.terms`."""

    def __init__(self, bias: LayerBias, change: Change) -> None:
        self.terms, self.change, self.layer = bias.terms, change, bias.shape.index

    def __call__(self, queries: Vectors, columns: Tensor, slots: Tensor | None = None) -> tuple[Term, ...]:
        (term,) = self.terms(queries, columns, slots)
        whole = term.tile(slice(0, queries.positions.shape[1]), slice(0, columns.shape[1]))
        return (Dense(self.change(whole, self.layer)),)


def hide(hidden: Mapping[int, Tensor]) -> Change:
    """Hide keys from queries; by layer, bool[batch or 1, queries, keys]."""

    def change(bias: Tensor, layer: int) -> Tensor:
        return bias + _HIDDEN * hidden[layer][:, None] if layer in hidden else bias

    return change


def keep(sign: int) -> Change:
    """Of the row-centred bias under a causal mask, keep the values of one sign; 0 keeps none.

    >>> keep(-1)(torch.tensor([[[[0.0, 9.0], [1.0, 3.0]]]]), 0).tolist()
    [[[[0.0, 0.0], [-1.0, 0.0]]]]
    """

    def change(bias: Tensor, layer: int) -> Tensor:
        del layer
        allowed = torch.ones(bias.shape[-2:], dtype=torch.bool).tril()
        raw = bias.masked_fill(~allowed, 0.0)
        centred = (raw - raw.sum(dim=-1, keepdim=True) / allowed.sum(dim=-1, keepdim=True)).masked_fill(~allowed, 0.0)
        return centred.clamp(max=0.0) if sign < 0 else centred.clamp(min=0.0) if sign else torch.zeros_like(bias)

    return change
