"""`save` and `load`: write and read the bias of a transformers model, without the model itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow.bias.config import BiasConfig, config_from_dict
from attnflow.bias.hf.attach import BiasHandle, Train, attach_to, handle_of, placed
from attnflow.bias.hf.layers import CHILD, BiasedLayer, layers_of
from attnflow.bias.kind import CustomConfig, layer_biases
from attnflow.models.loading.addons import Addon, identity, read_addon, save_addon
from attnflow.models.subject import Loaded, Subject

_SIZES: Final = ("num_heads", "num_kv_heads", "head_dim", "hidden_size")


def save(model: nn.Module | Loaded, folder: str | os.PathLike[str]) -> Path:
    """Write the attached bias to a folder: its tensors as safetensors, its configs and base model as JSON.

    The file of tensors also contains the config, so one rename replaces an older bias: even if a save is killed, the
    folder holds a whole bias. Other files in the folder stay unchanged.

    Of a sharded model, every process calls it: the shards are gathered, and the first process writes.

    Returns:
        The folder, which is created if necessary.

    Raises:
        ValueError: the model has no bias, or the bias holds NaN or infinity, or has no values yet (meta device).
        RankFailed: one of the processes that share the model failed, or did not call it.
    """
    subject = Subject.of(model)
    handle = handle_of(subject.model)
    config = {"bias": [config.to_dict() for config in handle.configs]}
    return subject.on_every_rank(
        "af.bias.save",
        lambda first: save_addon(folder, "bias", _tensors(subject.model), config, _identity(handle.base), first),
    )


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
        folder: the folder that `save` wrote.
        custom: the custom configs among the saved ones, in order, since code is never imported by name. A subclass of
            a config needs only be imported before.
        train: as in `attach`.
        backend: as in `attach`.
        strict: refuse a base model whose sizes fit but whose weights are not those that the bias was saved with.

    Returns:
        The handle, as `attach` returns it.

    Raises:
        FileNotFoundError: the folder has no saved bias.
        WrongBase: the bias was saved with another base model; the message says what differs.
        ValueError: a file is damaged, has another version, or holds NaN or infinity, or a kind is not imported. The
            model stays unchanged.
    """
    subject = Subject.of(model)
    if subject.without_numbers:
        raise ValueError("the model is on the meta device, where weights cannot be loaded: load its weights first")
    subject.require_unwrapped("bias")
    saved = read(folder)
    layers = layers_of(subject)
    saved.check_base(_identity(layers), strict)
    configs = _configs(saved, custom)
    _check_sizes(saved, layers, configs)
    attached = attach_to(subject, layers, configs, train, backend, loaded=train == "all")
    try:
        saved.fill(_tensors(subject.model))
    except ValueError:
        attached.remove()
        raise
    return attached


def _configs(saved: Addon, custom: Sequence[CustomConfig]) -> list[BiasConfig]:
    described: list[Mapping[str, Any]] = saved.config["bias"]
    expected = [values for values in described if values["kind"] == CustomConfig.kind]
    passed = [config.to_dict() for config in custom]
    if expected != passed:
        raise ValueError(
            f"the saved bias has the custom parts {expected or 'none'}, but custom= has {passed or 'none'}: pass the "
            "same CustomConfig objects that were attached"
        )
    rest = iter(custom)
    return [next(rest) if values["kind"] == CustomConfig.kind else config_from_dict(values) for values in described]


def _check_sizes(saved: Addon, layers: Sequence[BiasedLayer], configs: Sequence[BiasConfig]) -> None:
    """Compare shapes before memory is taken for them: a file may ask for any width."""
    for index, chosen in placed(layers, configs).items():
        for place, config in enumerate(chosen):
            if not config.is_ours() or isinstance(config, CustomConfig):  # whose code may compute with what it makes
                continue
            try:
                with torch.device("meta"):
                    state = config.module(layers[index].shape).state_dict(prefix=f"layers.{index}.kinds.{place}.")
            except (RuntimeError, OverflowError) as error:  # of a size beyond 64 bits
                raise ValueError(f"{saved.path} describes a bias of an impossible size: {config}") from error
            for name, tensor in state.items():
                written = tuple(saved.tensors[name].shape) if name in saved.tensors else "none"
                if written != tuple(tensor.shape):
                    raise ValueError(
                        f"{saved.path} does not fit its config: {name} has shape {written}, expected "
                        f"{tuple(tensor.shape)}"
                    )


def read(folder: str | os.PathLike[str]) -> Addon:
    saved = read_addon(folder, "bias")
    described = saved.config.get("bias")
    if not isinstance(described, list) or not all(
        isinstance(values, Mapping) and {"kind", "layers"} <= cast("Mapping[str, object]", values).keys()
        for values in cast("list[object]", described)
    ):
        raise ValueError(f"{saved.path} is damaged: its configs cannot be read")
    return saved


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"layers.{bias.shape.index}.{name}": tensor
        for _, bias in layer_biases(model)
        for name, tensor in bias.state_dict().items()
    }


def _identity(layers: Sequence[BiasedLayer]) -> dict[str, object]:
    sizes = {name: getattr(layers[0].shape, name) for name in _SIZES}
    return identity(layers[0].site.owner.config, [layer.site.module for layer in layers], CHILD, **sizes)
