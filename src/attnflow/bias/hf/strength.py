"""How large the bias of each layer is, as far as softmax can see it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnflow._core.results import Result
from attnflow.bias.call import Call
from attnflow.bias.hf.attach import handle
from attnflow.bias.impl.reference import bias_of
from attnflow.bias.layer import LayerBias, layer_biases
from attnflow.bias.terms import Term
from attnflow.models.evaluation import evaluating
from attnflow.models.inputs import sparing
from attnflow.models.loaded import Loaded, split

_BLOCK = 256  # queries at a time


@dataclass(frozen=True)
class Strength(Result):
    """|B| of each layer: the root mean square of B, row-centred over the keys that each query may see.

    Attributes:
        layers: number of the layer -> |B|, in units of the pre-softmax score.
    """

    layers: dict[int, float]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row a layer."""
        return [{"layer": layer, "strength": value} for layer, value in self.layers.items()]


def strength(model: nn.Module | Loaded, inputs: Mapping[str, Tensor]) -> Strength:
    """|B| of each layer on some tokens.

    Softmax removes what is constant in a row, so that |B| before centring would also grow by what has no effect.

    Args:
        model: with a bias, also if it is disabled or wrapped.
        inputs: arguments of the model, such as `{"input_ids": ...}`; a few hundred tokens are enough. Labels are left
            out.

    Raises:
        ValueError: no bias is attached.

    Cost: one forward pass, with logits of one token, and B once more; memory as B of 256 queries.
    """
    model, _ = split(model)
    handle(model)  # raises for a model without a bias
    layers: dict[int, float] = {}
    tensors = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), evaluating(model), _observed(model, layers):
        model(**tensors, **sparing(model))
    return Strength(dict(sorted(layers.items())))


@contextmanager
def _observed(model: nn.Module, layers: dict[int, float]) -> Generator[None]:
    before = [(bias, bias.observer, bias.enabled) for _, bias in layer_biases(model)]
    for bias, _, _ in before:
        bias.observer, bias.enabled = _Measure(bias, layers), True
    try:
        yield
    finally:
        for bias, observer, enabled in before:
            bias.observer, bias.enabled = observer, enabled


class _Measure:
    def __init__(self, bias: LayerBias, layers: dict[int, float]) -> None:
        self.bias, self.layers = bias, layers

    def __call__(self, call: Call) -> None:
        ours = call.terms[: len(self.bias.kinds)]  # what follows is the finite part of the model's own mask
        self.layers[self.bias.shape.index] = centred_size(call, ours)


def centred_size(call: Call, terms: tuple[Term, ...]) -> float:
    """Root mean square of the row-centred sum of terms in one call, over its allowed pairs; 0 without any."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    squares, pairs = 0.0, 0.0
    for start in range(0, queries, _BLOCK):
        block = slice(start, min(start + _BLOCK, queries))
        tile = bias_of(terms, call.num_heads, block, slice(0, keys))
        if tile is None:
            return 0.0
        allowed = call.allow.rows(block)
        weight = (
            torch.ones_like(tile)
            if allowed is None
            else allowed.to(tile.dtype).expand(
                max(tile.shape[0], allowed.shape[0]), max(tile.shape[1], allowed.shape[1]), -1, -1
            )
        )
        count = weight.sum(dim=-1, keepdim=True)
        mean = (tile * weight).sum(dim=-1, keepdim=True) / count.clamp(min=1)
        squares += float(((tile - mean).square() * weight).sum())
        pairs += float(count.sum())
    return (squares / pairs) ** 0.5 if pairs else 0.0
