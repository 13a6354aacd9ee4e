"""The base model of a training run, by which the run is recognised when it goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnflow._core.digests import add_tensor
from attnflow.bias.kind import layer_biases


def fingerprint(model: nn.Module, *, frozen: bool = False) -> dict[str, str]:
    """Name, type and a digest of every weight of a model beside its bias and its adapters.

    Args:
        model: with a bias or without.
        frozen: of the weights that are not trained alone.

    Cost: every weight is read once, about a second for a gigabyte; sharded ones are gathered one by one.
    """
    total, dtypes = hashlib.sha256(), dict[torch.dtype, int]()
    for name, tensor in _weights(model, frozen or hasattr(model, "peft_config")):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        add_tensor(total, f"{name} {tuple(whole.shape)} {whole.dtype}", whole)
        dtypes[whole.dtype] = dtypes.get(whole.dtype, 0) + whole.numel()
    config = getattr(model, "config", None)
    return {
        "name": str(getattr(config, "_name_or_path", "") or type(model).__name__),
        "dtype": str(max(dtypes, key=dtypes.__getitem__, default="none")).removeprefix("torch."),
        "sha256": total.hexdigest(),
    }


def described(base: object) -> str:
    """A fingerprint in words."""
    if not isinstance(base, dict):
        return "unknown"
    values = cast("dict[str, str]", base)
    return f"{values.get('name')} ({values.get('dtype')}, sha256 {values.get('sha256', '')[:12]})"


def _weights(model: nn.Module, frozen: bool) -> Iterator[tuple[str, Tensor]]:
    ours = {id(p) for _, bias in layer_biases(model) for p in bias.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in ours and not (frozen and parameter.requires_grad):
            yield name, parameter
