"""`save_pretrained` and `load`: a bias as a folder of two files, without the model that it belongs to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnflow._core.errors import AttnflowError
from attnflow.bias.config import BiasConfig
from attnflow.bias.hf.attach import Bias, Train, attach, describe, detach, record_of
from attnflow.bias.hf.hooks import CHILD
from attnflow.bias.hf.layers import Layer, layers_of
from attnflow.bias.hf.summary import BiasSummary
from attnflow.bias.kinds.custom import Custom
from attnflow.bias.layer import layer_biases

WEIGHTS: Final = "bias.safetensors"
CONFIG: Final = "bias_config.json"
_FORMAT: Final = "attnflow-bias"
_VERSION: Final = 1
_SAMPLES: Final = 16  # numbers of the base model by which it is recognised


class WrongBase(AttnflowError):
    """A saved bias belongs to another base model."""


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str]) -> Path:
    """Write the attached bias to `directory`: its tensors as safetensors, its config and base model as JSON.

    Both files are written beside their places and moved there, tensors first. The config names the tensors' digest: a
    save that was killed between the two moves is recognised, and `load` finds the config that fits.

    Returns:
        The directory, created if need be.

    Raises:
        ValueError: the model has no bias, or it has no values yet (meta device) or is spread over processes.
    """
    record = record_of(model)
    found = _tensors(model)
    if any(tensor.is_meta for tensor in found.values()):
        raise ValueError("the bias is on the meta device, where it has no values to save")
    if any(isinstance(tensor, DTensor) for tensor in found.values()):
        raise ValueError(
            "the bias is sharded over processes (FSDP), where each holds a part; save the whole state dict by "
            "Trainer or accelerate, load it into one model, and save the bias of that"
        )
    about = {"format": _FORMAT, "version": _VERSION, "bias": describe(record.biases), "base": _base(model)}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / f"{WEIGHTS}.part", folder / f"{CONFIG}.part"
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
        save_file(tensors, weights, metadata={"format": "pt"})
        about["weights"] = _digest(weights)
        config.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        weights.unlink(missing_ok=True)
        config.unlink(missing_ok=True)
        raise
    weights.replace(folder / WEIGHTS)
    config.replace(folder / CONFIG)
    return folder


def load(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    custom: Sequence[Custom] = (),
    train: Train = "all",
    impl: str = "auto",
    strict: bool = True,
) -> BiasSummary:
    """Attach a saved bias to the base model that it was trained on.

    Args:
        model: the base model, without a bias.
        directory: where `save_pretrained` wrote.
        custom: the `Custom` biases among the saved ones, in their order: code is never imported by name.
        train: as in `attach`.
        impl: as in `attach`.
        strict: refuse a base model whose sizes fit but whose weights are not those that the bias was saved with.

    Returns:
        A summary of what was added.

    Raises:
        FileNotFoundError: no saved bias there.
        WrongBase: another base model, with what differs.
        ValueError: files that are damaged, of a newer version, or hold NaN or infinity. The model is as it was.
    """
    folder = Path(directory)
    about = _read(folder)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device, where weights cannot be loaded; load its weights first")
    _fits(model, about["base"], strict)
    biases = _biases(about["bias"], custom)
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged: {error}") from error
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ValueError(f"{folder / WEIGHTS} holds NaN or infinity in {', '.join(bad[:3])}; train it again")
    result = attach(model, biases, train=train, impl=impl)
    try:
        _fill(model, tensors, folder)
    except ValueError:
        detach(model)
        raise
    return result


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the bias by layer number and name; none is copied."""
    return {
        f"layers.{bias.shape.index}.{name}": tensor
        for _, bias in layer_biases(model)
        for name, tensor in bias.state_dict().items()
    }


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
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


def _biases(saved: Sequence[Mapping[str, Any]], custom: Sequence[Custom]) -> list[Bias]:
    names = [one for one in saved if one["kind"] == "custom"]
    given_names = describe(custom)
    if names != given_names:
        raise ValueError(
            f"the saved bias has the custom parts {names or 'none'}, but custom= has {given_names or 'none'}; pass the "
            "same Custom objects that were attached"
        )
    given = iter(custom)
    return [next(given) if one["kind"] == "custom" else BiasConfig.from_dict(one) for one in saved]


def _read(folder: Path) -> Mapping[str, Any]:
    """The config of the tensors that lie in a folder, which an interrupted save has left beside its place."""
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no saved bias: {CONFIG} is missing")
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} holds no saved bias: {WEIGHTS} is missing")
    about, digest = _parse(folder / CONFIG), _digest(folder / WEIGHTS)
    if about["weights"] == digest:
        return about
    left = folder / f"{CONFIG}.part"
    if left.is_file() and (newer := _parse(left))["weights"] == digest:
        return newer
    raise ValueError(f"{folder / WEIGHTS} is not the file that {CONFIG} was saved with: damaged, or of another save")


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(about, Mapping) or about.get("format") != _FORMAT:
        raise ValueError(f"{path} is not the config of a saved bias")
    if about.get("version") != _VERSION:
        raise ValueError(f"{path} has version {about.get('version')}, this release reads {_VERSION}; update attnflow")
    types = {"bias": list, "base": Mapping, "weights": str}
    wrong = [name for name, kind in types.items() if not isinstance(about.get(name), kind)]
    if not wrong and not all(isinstance(one, Mapping) and "kind" in one for one in about["bias"]):
        wrong = ["bias"]
    if not wrong and not all(isinstance(one, int | float) for one in about["base"].get("samples", ())):
        wrong = ["base"]
    if wrong:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} cannot be read")
    return cast(Mapping[str, Any], about)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _base(model: nn.Module) -> dict[str, object]:
    """What a saved bias says of its base model."""
    layers = layers_of(model)
    config = layers[0].site.owner.config
    return {
        "name": str(getattr(config, "_name_or_path", "") or ""),
        "model_type": str(getattr(config, "model_type", "")),
        "num_layers": len(layers),
        "shape": _sizes(layers),
        "samples": _samples(layers),
    }


def _sizes(layers: Sequence[Layer]) -> dict[str, int]:
    shape = layers[0].shape
    return {name: getattr(shape, name) for name in ("num_heads", "num_kv_heads", "head_dim", "hidden_size")}


def _samples(layers: Sequence[Layer]) -> list[float]:
    """A few weights of the first, middle and last layer, by which the base model is recognised in any precision."""
    found: list[float] = []
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for name, parameter in layer.site.module.named_parameters():
            if CHILD not in name and ".lora_" not in name and parameter.is_floating_point() and parameter.ndim == 2:
                flat = parameter.detach().flatten()
                found += flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float().tolist()
                break
    return found


def _fits(model: nn.Module, base: Mapping[str, Any], strict: bool) -> None:
    here = _base(model)
    for name in ("model_type", "num_layers", "shape"):
        if base.get(name) != here[name]:
            called = f" ({base['name']})" if base.get("name") else ""
            raise WrongBase(
                f"the bias was trained on another base model{called}: {name} is {base.get(name)} there and "
                f"{here[name]} here"
            )
    saved, ours = torch.tensor(base.get("samples", [])), torch.tensor(here["samples"])
    if strict and (saved.shape != ours.shape or not torch.allclose(saved, ours, rtol=0.01, atol=2e-3 * _scale(ours))):
        raise WrongBase(
            f"the bias was saved with other weights of this architecture ({base.get('name') or 'unnamed'}); load "
            "those, or pass strict=False if this model was trained on from there"
        )


def _scale(samples: Tensor) -> float:
    return float(samples.abs().max()) if samples.numel() else 0.0
