"""What the tests of biases on transformers models share: more families, biases, trained values."""

from __future__ import annotations

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import attnflow as af
from tests.models import BIDIRECTIONAL, CAUSAL, outputs, tokens
from tests.models import tiny as family

MORE = ("Gemma", "Phi", "StableLm", "Starcoder2", "MBartDecoder")
DECODERS = tuple(name for name in (*CAUSAL, *MORE) if name != "DeepseekV3")
ENCODERS = tuple(BIDIRECTIONAL)
EVERY_OTHER_KIND = (
    af.bias.BiasConfig("bilinear", layers="every", share_heads="kv"),
    af.bias.BiasConfig("dot", layers="every", reference="per_head", share_heads=False),
    af.bias.BiasConfig("key", layers="every", hidden_dim=8, share_heads=False),
    af.bias.BiasConfig("cumulative", layers=[1], share_heads=False),
    af.bias.BiasConfig("lowrank", layers="every", rank=3, reference="hidden"),
    af.bias.BiasConfig("dense", layers="every", max_length=48),
    af.bias.BiasConfig("alibi", layers="every"),
    af.bias.BiasConfig("relative", layers="every", share_heads=False, num_buckets=8, max_distance=12),
)
GUIDANCE = (af.bias.BiasConfig(layers="every", hidden_dim=8),)
ROTATED = (af.bias.BiasConfig(layers="every", hidden_dim=8, reference="rotated"),)
BIASES = {"guidance": GUIDANCE, "others": EVERY_OTHER_KIND, "rotated": ROTATED}


def disturb(model: nn.Module, scale: float = 0.5) -> None:
    """Give the bias values as if it had been trained."""
    with torch.no_grad():
        for parameter in af.bias.parameters(model):
            parameter.add_(torch.randn_like(parameter) * scale)


def biased(name: str, bias=GUIDANCE, dtype: torch.dtype = torch.float64, **changes: object) -> PreTrainedModel:
    """A tiny model with a bias that does something."""
    model = family(name, dtype, **changes)
    af.bias.attach(model, bias)
    disturb(model)
    return model


def without_dropout(model: nn.Module) -> None:
    """Switch off dropout in a model that is trained: modules, and what modules pass to functions."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def padded(lengths: tuple[int, ...], side: str = "left") -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """(rows of these lengths, the batch of them padded on one side)."""
    rows, size = [tokens(1, length) for length in lengths], max(lengths)
    ids, real = torch.zeros(len(rows), size, dtype=torch.int64), torch.zeros(len(rows), size, dtype=torch.int64)
    for index, row in enumerate(rows):
        where = slice(size - row.shape[1], size) if side == "left" else slice(0, row.shape[1])
        ids[index, where], real[index, where] = row[0], 1
    return rows, {"input_ids": ids, "attention_mask": real}


def windows_roll_back() -> bool:
    """Whether sliding windows of this release of transformers can be rolled back, without any bias."""
    model = family("Mistral")
    cache = DynamicCache(config=model.config)
    try:
        with torch.no_grad():
            model(tokens(1, 6), past_key_values=cache)
            cache.activate_past_recording()
            model(tokens(1, 4), past_key_values=cache)
            cache.crop(-4)
            model(tokens(1, 3), past_key_values=cache)
            model(tokens(1, 3), past_key_values=cache)
    except (RuntimeError, AttributeError):
        return False
    return True


def same_state(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Whether the model has exactly these tensors, and no hooks of ours."""
    now = model.state_dict()
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    ours = [hook for hook in hooks if type(hook).__module__.startswith("attnflow")]
    return not ours and now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


__all__ = ["disturb", "family", "outputs", "tokens"]
