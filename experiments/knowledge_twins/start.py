"""Matched starts: what stands between self-attentions scores and writes at the same scale in every arm."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow.knowledge.attention import GeneralizedCrossAttention, named, weigh

_PROBES: Final = 1024  # tokens by which scales are measured
BETWEEN: Final = (".mlp.", ".reader.", "model.knowledge.")  # names of what stands between self-attentions


@torch.no_grad()
def match(model: Any, neurons: int, seed: int) -> None:
    """Rescale a new model so that all arms start alike.

    Embeddings and self-attention: N(0, r) with r = `initializer_range`, the same draws in every arm. Between
    self-attentions, two matrices of each layer are multiplied by a number. W_Q (or W_1): such that scores of normed
    tokens have the standard deviation r sqrt(d). W_V (or W_2): such that outputs have the root mean square of those of
    an ordinary layer with matrices N(0, r) and so many neurons.
    """
    for name, tensor in model.named_parameters():
        if tensor.ndim > 1 and not any(part in name for part in BETWEEN):
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            tensor.copy_(model.config.initializer_range * torch.randn(tensor.shape, generator=generator))
    probes = _normed(torch.randn(_PROBES, model.config.hidden_size, generator=torch.Generator().manual_seed(seed)))
    score, output = targets(model, neurons)
    if hasattr(model, "readers"):
        _match_readers([reader.attention for reader in model.readers()], model.knowledge(), probes, score, output)
    else:
        for layer in model.model.layers:
            _match_layer(layer.mlp, probes, score, output)


def targets(model: Any, neurons: int) -> tuple[float, float]:
    """(standard deviation of scores, root mean square of outputs) of an ordinary layer with so many neurons."""
    spread, gated = model.config.initializer_range, _gated(model)
    score = spread * model.config.hidden_size**0.5
    draws = torch.randn(1 + gated, 1 << 16, generator=torch.Generator().manual_seed(0))
    weights = weigh(score * draws, named("silu" if gated else "relu"))
    return score, spread * neurons**0.5 * float(_size(weights))


def _gated(model: Any) -> bool:
    return model.config.gated if hasattr(model, "readers") else hasattr(model.model.layers[0].mlp, "gate_proj")


def _match_readers(
    readers: Sequence[GeneralizedCrossAttention], entries: Tensor, probes: Tensor, score: float, output: float
) -> None:
    written: dict[int, list[Tensor]] = {}  # outputs by the W_V that makes them, which several layers may share
    for attention in readers:
        attention.query.mul_(score / attention.score(probes, entries, attention.thresholds(entries)).std())
        written.setdefault(id(attention.value), []).append(attention(probes, entries))
    for value in {id(attention.value): attention.value for attention in readers}.values():
        value.mul_(output / _size(torch.cat(written[id(value)])))


def _match_layer(layer: nn.Module, probes: Tensor, score: float, output: float) -> None:
    for name in ("up_proj", "gate_proj"):
        if hasattr(layer, name):
            first = cast(nn.Linear, getattr(layer, name))
            first.weight.mul_(score / first(probes).std())
    cast(nn.Linear, layer.down_proj).weight.mul_(output / _size(layer(probes)))


def _size(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _normed(hidden: Tensor) -> Tensor:
    return hidden / hidden.square().mean(dim=-1, keepdim=True).sqrt()
