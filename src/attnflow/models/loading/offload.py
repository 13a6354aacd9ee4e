"""Models whose weights lie elsewhere: accelerate brings them to each module for its call, and takes them away again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model computes on, where its weights are brought to one; else that of its weights."""
    first = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if first.type != "meta":
        return first
    device = next((hook.execution_device for module in model.modules() for hook in _hooks(module)), None)
    return first if device is None else torch.device(device)


def without_numbers(model: nn.Module) -> bool:
    return any(
        parameter.is_meta and not any(True for _ in _hooks(module))
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )


def parameter_of(model: nn.Module, path: str) -> Tensor:
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent)
    parameter = cast(Tensor, getattr(module, name))
    if not parameter.is_meta:
        return parameter
    return next((cast(Tensor, hook.weights_map[name]) for hook in _hooks(module)), parameter)


def _hooks(module: nn.Module) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None:
            yield one
