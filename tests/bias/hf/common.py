"""What the tests of biases on transformers models share: more families, biases, trained values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import attnflow as af
from attnflow.bias.hf.attach import handle_of
from attnflow.bias.kind import layer_biases
from attnflow.models.loading.addons import read_addon, save_addon
from tests.bias.cases import KINDS, config_of
from tests.models import BIDIRECTIONAL, CAUSAL, outputs, tokens
from tests.models import tiny as family

MORE = ("Gemma", "Phi", "StableLm", "Starcoder2", "MBartDecoder")
DECODERS = (*CAUSAL, *MORE)
ENCODERS = tuple(BIDIRECTIONAL)
VARIANTS = {
    "bilinear": {"share_heads": "kv"},
    "dot": {"reference": "per_head", "share_heads": False},
    "key": {"share_heads": False},
    "cumulative": {"layers": [1], "share_heads": False},
    "lowrank": {"reference": "hidden"},
    "relative": {"share_heads": False, "num_buckets": 8, "max_distance": 12},
}
SMALL = {"layers": "every", "hidden_dim": 8, "rank": 3, "max_length": 48}
EVERY_OTHER_KIND = tuple(config_of(kind, **SMALL | VARIANTS.get(kind, {})) for kind in KINDS if kind != "guidance")
GUIDANCE = (af.bias.GuidanceConfig(layers="every", hidden_dim=8),)
ROTATED = (af.bias.GuidanceConfig(layers="every", hidden_dim=8, reference="rotated"),)
BIASES = {"guidance": GUIDANCE, "others": EVERY_OTHER_KIND, "rotated": ROTATED}


def disturb(model: nn.Module, scale: float = 0.5) -> None:
    """Give the bias values as if it had been trained."""
    with torch.no_grad():
        for _, bias in layer_biases(model):
            for parameter in bias.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The model without its bias."""
    handle = handle_of(model)
    handle.enabled = False
    try:
        yield
    finally:
        handle.enabled = True


def biased(name: str, bias=GUIDANCE, dtype: torch.dtype = torch.float64, **changes: object) -> PreTrainedModel:
    """A tiny model with a bias that does something."""
    model = family(name, dtype, **changes)
    af.bias.attach(model, bias)
    disturb(model)
    return model


def untouched(model: nn.Module, error: type[Exception] | tuple[type[Exception], ...], match: str, change) -> None:
    """`change(model)` fails as it should and leaves the model without a trace of it."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with pytest.raises(error, match=match):
        change(model)
    assert same_state(model, before)
    assert model.config._attn_implementation is implementation
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="has no bias attached"):
        handle_of(model)


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


def rewrite(folder: Path, tensors: dict[str, torch.Tensor] | None = None, *, base=None, config=None) -> None:
    """A saved bias as `save` would write it, with other tensors, or with changes of its config or its base."""
    saved = read_addon(folder, "bias")
    about = {**saved.config, **(config or {})}, {**saved.base, **(base or {})}
    with patch("attnflow.models.loading.addons._nonfinite", lambda tensors: []):  # which `save` would refuse
        save_addon(folder, "bias", saved.tensors if tensors is None else tensors, *about)


def same_state(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Whether the model has exactly these tensors, and no hooks of ours."""
    now = model.state_dict()
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    owners = [getattr(getattr(hook, "func", hook), "__self__", hook) for hook in hooks]  # of partials and methods
    ours = [owner for owner in owners if type(owner).__module__.startswith("attnflow")]
    return not ours and now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


__all__ = ["disturb", "family", "handle_of", "layer_biases", "outputs", "read_addon", "tokens"]
