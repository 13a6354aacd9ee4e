"""The transformers of the study: BERT, as an encoder or under a causal mask; its initialisations and penalties."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel

from attnflow.geometry import directionality, init_skew_, init_symmetric_, penalty
from attnflow.geometry.score import layers_in_memory

Objective = Literal["masked", "causal"]

# Of W_q and W_k at the start: N(0, 0.02) as BERT has them, or nn.Linear's uniform weights, which are larger below a
# width of 833. The paper compared "default" with "symmetric", which differ in scale, too.
INITIALISATIONS: Final = ("default", "scaled", "symmetric", "symmetric small", "skew")
PENALTIES: Final = ("penalty symmetric", "penalty skew", "penalty columns")  # on "default"
CONTROLS: Final = {
    "scaled": "default",
    "symmetric": "scaled",
    "symmetric small": "default",
    "skew": "scaled",
    **dict.fromkeys(PENALTIES, "default"),
}
_MASKED: Final = 0.15
_REPLACED, _RANDOM = 0.8, 0.1  # of the masked: by [MASK], and by any token; the rest is left as it is


def build(sizes: dict[str, Any], arm: str, objective: Objective, seed: int) -> Any:
    """A model of an arm before its training; all arms of a seed share every weight but W_q and W_k."""
    config = BertConfig(**sizes, is_decoder=objective == "causal", use_cache=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = BertLMHeadModel(config) if objective == "causal" else BertForMaskedLM(config)
    generator = torch.Generator().manual_seed(seed)
    if arm == "scaled":
        for layer in layers_in_memory(model):
            layer.write(*(_uniform(weight, generator) for weight in (layer.query(), layer.key())))
    elif arm in ("symmetric", "symmetric small"):
        init_symmetric_(model, "paper" if arm == "symmetric" else "matched", generator=generator)
    elif arm == "skew":
        init_skew_(model, "paper", generator=generator)
    elif arm not in ("default", *PENALTIES):
        raise ValueError(f"arms are {', '.join((*INITIALISATIONS, *PENALTIES))}; got {arm!r}")
    return model


def penalised(model: nn.Module, arm: str) -> Tensor | None:
    """What an arm adds to the loss, before its factor: summed over layers, 0 where the aim is reached."""
    if arm == "penalty columns":
        forms = [layer.query().T @ layer.key() for layer in layers_in_memory(model)]
        return torch.stack([1 + directionality(form) for form in forms]).sum()
    if arm == "penalty symmetric":
        return penalty(model, "symmetric")
    return penalty(model, "skew") if arm == "penalty skew" else None


def token_losses(
    model: Any, tokens: Tensor, objective: Objective, mask_token: int, generator: torch.Generator
) -> Tensor:
    """Loss of each predicted token in nats: of all but the first of a row, or of those that are masked."""
    device = next(model.parameters()).device
    if objective == "causal":
        tokens = tokens.to(device)
        logits = model(input_ids=tokens).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    vocabulary = int(model.config.vocab_size if hasattr(model, "config") else model.module.config.vocab_size)
    masked, kind = (torch.rand(tokens.shape, generator=generator) for _ in range(2))
    chosen = masked < _MASKED
    chosen[:, 0] |= ~chosen.any(dim=1)  # a row with nothing to predict has no loss
    other = torch.randint(vocabulary, tokens.shape, generator=generator)
    shown = torch.where(chosen & (kind < _REPLACED), mask_token, tokens)
    shown = torch.where(chosen & (kind >= 1 - _RANDOM), other, shown)
    logits = cast(Tensor, model(input_ids=shown.to(device)).logits)[chosen.to(device)]
    return functional.cross_entropy(logits, tokens[chosen].to(device), reduction="none")


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    bound = 1 / math.sqrt(like.shape[1])
    return (torch.rand(like.shape, generator=generator) * (2 * bound) - bound).to(like)
