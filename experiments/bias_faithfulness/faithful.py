"""How much a prediction moves when keys are hidden from the last query, by scores that claim to rank them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow.bias import capture
from attnflow.bias.kind import layer_biases
from experiments.bias_faithfulness.changed import changed, hide
from experiments.geometry_in_use.summary import spearman

READINGS: Final = ("bias", "weights", "removal", "chance")
KEYS: Final = (1, 2, 4)  # that are hidden in each layer
_DRAWS: Final = 5  # of chance


@dataclass(frozen=True)
class Prompts:
    tokens: Tensor  # int64[prompts, length]; the last one is the query that is explained
    answers: Tensor  # int64[prompts], the token that follows


def explained(model: nn.Module, prompts: Prompts) -> dict[str, dict[str, float]]:
    """By reading, means over prompts and over how many keys are hidden.

    Returns:
        "moved": KL divergence of the prediction from that of the whole model; "lost": log-probability of the answer;
        "without the rest": the divergence where all keys but these are hidden; "rank": over the keys of a layer,
        correlation with what hiding each alone does.
    """
    whole = predicted(model, prompts, {})
    alone = removals(model, prompts, whole)
    found: dict[str, dict[str, float]] = {}
    for reading in READINGS:
        if reading == "chance":
            several = [_scored(model, prompts, whole, alone, _noise(alone, draw)) for draw in range(_DRAWS)]
            found[reading] = {name: sum(one[name] for one in several) / _DRAWS for name in several[0]}
        else:
            given = alone if reading == "removal" else read(model, prompts, reading)
            found[reading] = _scored(model, prompts, whole, alone, given)
    return found


def predicted(model: nn.Module, prompts: Prompts, hidden: Mapping[int, Tensor]) -> Tensor:
    """Log-probabilities after the last token, from which keys are hidden by layer, bool[prompts, keys]."""
    length = prompts.tokens.shape[1]
    pairs = {layer: torch.zeros(len(keys), length, length, dtype=torch.bool) for layer, keys in hidden.items()}
    for layer, keys in hidden.items():
        pairs[layer][:, -1] = keys
    with changed(model, hide(pairs)):
        logits = cast(Any, model)(input_ids=prompts.tokens, use_cache=False).logits[:, -1]
    return logits.double().log_softmax(dim=-1)


def removals(model: nn.Module, prompts: Prompts, whole: Tensor) -> dict[int, Tensor]:
    """By layer, float[prompts, keys]: the divergence where one key is hidden in one layer."""
    count, length = prompts.tokens.shape
    found: dict[int, Tensor] = {}
    for layer in _layers(model):
        each: list[Tensor] = []
        for key in range(length):
            hidden = (torch.arange(length) == key).expand(count, -1)
            each.append(divergence(whole, predicted(model, prompts, {layer: hidden})))
        found[layer] = torch.stack(each, dim=1)
    return found


def read(model: nn.Module, prompts: Prompts, reading: str) -> dict[int, Tensor]:
    """By layer, float[prompts, keys]: the row-centred bias, or the weights, of the last query; means over heads."""
    seen = [capture(model, row, queries=-1, base=False) for row in prompts.tokens]
    return {
        layer: torch.stack([getattr(one.layer(layer), reading)[0, 0] for one in seen]).double()
        for layer in _layers(model)
    }


def divergence(whole: Tensor, other: Tensor) -> Tensor:
    """[prompts], KL divergence in nats of log-probabilities."""
    return (whole.exp() * (whole - other)).sum(dim=-1)


def _scored(
    model: nn.Module, prompts: Prompts, whole: Tensor, alone: Mapping[int, Tensor], given: Mapping[int, Tensor]
) -> dict[str, float]:
    moved, lost, kept = list[Tensor](), list[Tensor](), list[Tensor]()
    for count in KEYS:
        top = {
            layer: torch.zeros_like(score, dtype=torch.bool).scatter(1, score.topk(count, dim=1).indices, True)
            for layer, score in given.items()
        }
        without = predicted(model, prompts, top)
        moved.append(divergence(whole, without))
        lost.append((whole - without).gather(1, prompts.answers[:, None]))
        kept.append(divergence(whole, predicted(model, prompts, {layer: ~keys for layer, keys in top.items()})))
    ranks = [
        spearman(score.numpy(), other.numpy())
        for layer in given
        for score, other in zip(given[layer], alone[layer], strict=True)
    ]
    means = {"moved": moved, "lost": lost, "without the rest": kept}
    return {**{name: float(torch.stack(x).mean()) for name, x in means.items()}, "rank": sum(ranks) / len(ranks)}


def _noise(like: Mapping[int, Tensor], draw: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(draw)
    return {layer: torch.rand(one.shape, generator=generator).double() for layer, one in like.items()}


def _layers(model: nn.Module) -> list[int]:
    return [bias.shape.index for _, bias in layer_biases(model)]
