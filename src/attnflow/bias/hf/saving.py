"""`save` and `load`: the bias of a transformers model, without the model that it belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnflow._core.errors import AttnflowError
from attnflow.bias.config import BiasConfig
from attnflow.bias.hf.attach import BiasHandle, Train, attach, handle
from attnflow.bias.hf.layers import CHILD, Layer, layers_of
from attnflow.bias.kinds import CustomConfig, config_from_dict
from attnflow.bias.layer import layer_biases
from attnflow.bias.saved import WEIGHTS, Saved, read, write
from attnflow.models.loaded import Loaded, split

_SAMPLES: Final = 16  # numbers of the base model by which it is recognised


class WrongBase(AttnflowError):
    """A saved bias belongs to another base model."""


def save(model: nn.Module | Loaded, folder: str | os.PathLike[str]) -> Path:
    """Write the attached bias to a folder: its tensors as safetensors, its configs and base model as JSON.

    Returns:
        The folder, created if need be.

    Raises:
        ValueError: the model has no bias, or it has no values yet (meta device) or is spread over processes.
    """
    model, _ = split(model)
    configs = handle(model).configs
    tensors = _tensors(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("the bias is on the meta device, where it has no values to save")
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        raise ValueError(
            "the bias is sharded over processes (FSDP), where each holds a part; save the whole state dict by "
            "Trainer or accelerate, load it into one model, and save the bias of that"
        )
    return write(folder, tensors, [config.to_dict() for config in configs], _base(model))


def load(
    model: nn.Module | Loaded,
    folder: str | os.PathLike[str],
    *,
    custom: Sequence[CustomConfig] = (),
    train: Train = "all",
    backend: str = "auto",
    strict: bool = True,
) -> BiasHandle:
    """Attach a saved bias to the base model that it was trained on.

    Args:
        model: the base model, without a bias.
        folder: where `save` wrote.
        custom: the custom configs among the saved ones, in their order: code is never imported by name.
        train: as in `attach`.
        backend: as in `attach`.
        strict: refuse a base model whose sizes fit but whose weights are not those that the bias was saved with.

    Returns:
        The handle, as `attach` returns it.

    Raises:
        FileNotFoundError: no saved bias there.
        WrongBase: another base model, with what differs.
        ValueError: files that are damaged, of a newer version, or hold NaN or infinity. The model is as it was.
    """
    model, _ = split(model)
    saved = read(folder)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device, where weights cannot be loaded; load its weights first")
    _check_base(model, saved, strict)
    configs, tensors = _configs(saved, custom), saved.tensors()
    attached = attach(model, configs, train=train, backend=backend)
    try:
        fill(model, tensors, saved.folder)
    except ValueError:
        attached.remove()
        raise
    return attached


def fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Give the attached bias the values of saved tensors.

    Raises:
        ValueError: other names or shapes; nothing is changed then.
    """
    expected = _tensors(model)
    if set(expected) != set(tensors):
        missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        raise ValueError(f"{folder / WEIGHTS} does not fit its config: missing {missing[:3]}, unexpected {extra[:3]}")
    wrong = [name for name, tensor in tensors.items() if tensor.shape != expected[name].shape]
    if wrong:
        name = wrong[0]
        got, want = tuple(tensors[name].shape), tuple(expected[name].shape)
        raise ValueError(f"{folder / WEIGHTS} does not fit its config: {name} has shape {got}, expected {want}")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the bias by layer number and name; none is copied."""
    return {
        f"layers.{bias.shape.index}.{name}": tensor
        for _, bias in layer_biases(model)
        for name, tensor in bias.state_dict().items()
    }


def _configs(saved: Saved, custom: Sequence[CustomConfig]) -> list[BiasConfig]:
    expected = [one for one in saved.configs if one["kind"] == CustomConfig.kind]
    passed = [config.to_dict() for config in custom]
    if expected != passed:
        raise ValueError(
            f"the saved bias has the custom parts {expected or 'none'}, but custom= has {passed or 'none'}; pass the "
            "same CustomConfig objects that were attached"
        )
    objects = iter(custom)
    return [next(objects) if one["kind"] == CustomConfig.kind else config_from_dict(one) for one in saved.configs]


def _base(model: nn.Module) -> dict[str, object]:
    """What a saved bias says of its base model."""
    layers = layers_of(model)
    config, shape = layers[0].site.owner.config, layers[0].shape
    return {
        "name": str(getattr(config, "_name_or_path", "") or ""),
        "model_type": str(getattr(config, "model_type", "")),
        "num_layers": len(layers),
        "shape": {name: getattr(shape, name) for name in ("num_heads", "num_kv_heads", "head_dim", "hidden_size")},
        "samples": _samples(layers),
    }


def _samples(layers: Sequence[Layer]) -> list[float]:
    """A few weights of the first, middle and last layer, by which the base model is recognised in any precision."""
    samples: list[float] = []
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for name, parameter in layer.site.module.named_parameters():
            if CHILD not in name and ".lora_" not in name and parameter.is_floating_point() and parameter.ndim == 2:
                flat = parameter.detach().flatten()
                samples += flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float().tolist()
                break
    return samples


def _check_base(model: nn.Module, saved: Saved, strict: bool) -> None:
    here: dict[str, Any] = _base(model)
    for name in ("model_type", "num_layers", "shape"):
        if saved.base.get(name) != here[name]:
            called = f" ({saved.base_name})" if saved.base_name else ""
            raise WrongBase(
                f"the bias was trained on another base model{called}: {name} is {saved.base.get(name)} there and "
                f"{here[name]} here"
            )
    theirs, ours = torch.tensor(saved.base.get("samples", [])), torch.tensor(here["samples"])
    scale = float(ours.abs().max()) if ours.numel() else 0.0
    if strict and (theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=0.01, atol=2e-3 * scale)):
        raise WrongBase(
            f"the bias was saved with other weights of this architecture ({saved.base_name or 'unnamed'}); load those, "
            "or pass strict=False if this model was trained on from there"
        )
