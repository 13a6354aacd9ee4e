"""`save` and `load`: the bias of a transformers model in a folder of two files, without the model itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as encoded
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnflow._core.errors import WrongBase
from attnflow._core.files import write_atomically
from attnflow.bias.config import BiasConfig
from attnflow.bias.content import (
    BilinearConfig,
    CumulativeConfig,
    DotConfig,
    GuidanceConfig,
    KeyConfig,
    LowRankConfig,
)
from attnflow.bias.hf.attach import BiasHandle, Train, attach, handle
from attnflow.bias.hf.layers import CHILD, layers_of
from attnflow.bias.kind import CustomConfig, layer_biases
from attnflow.bias.positions import AlibiConfig, DenseConfig, RelativeConfig
from attnflow.models.layers import same_weights, weight_samples
from attnflow.models.loaded import Loaded, split

WEIGHTS: Final = "bias.safetensors"
CONFIG: Final = "bias_config.json"
KINDS: Final[Mapping[str, type[BiasConfig]]] = {
    config.kind: config
    for config in (
        GuidanceConfig,
        BilinearConfig,
        DotConfig,
        KeyConfig,
        CumulativeConfig,
        LowRankConfig,
        DenseConfig,
        AlibiConfig,
        RelativeConfig,
    )
}
_FORMAT: Final = "attnflow-bias"
_VERSION: Final = 1
_TYPES: Final = {"bias": list, "base": Mapping, "weights": str}


def config_from_dict(values: Mapping[str, object]) -> BiasConfig:
    """The config that `to_dict` described, of whatever kind; a custom one holds code, and cannot be read.

    Raises:
        ValueError: no such kind, unknown fields, or values out of range.
    """
    kind = str(values.get("kind"))
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    return KINDS[kind].from_dict(values)


def save(model: nn.Module | Loaded, folder: str | os.PathLike[str]) -> Path:
    """Write the attached bias to a folder: its tensors as safetensors, its configs and base model as JSON.

    The file of the tensors carries the rest as well, so that one rename replaces the whole of an older bias: however
    often a save is killed, the folder holds the last one that came so far. Other files there stay as they are.

    Returns:
        The folder, created if need be.

    Raises:
        ValueError: the model has no bias, or one with NaN or infinity in it, or it has no values yet (meta device) or
            is spread over processes.
    """
    model, _ = split(model)
    configs = [config.to_dict() for config in handle(model).configs]
    tensors = _tensors(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("the bias is on the meta device, where it has no values to save")
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        raise ValueError(
            "the bias is sharded over processes (FSDP), where each holds a part; save the whole state dict by "
            "Trainer or accelerate, load it into one model, and save the bias of that"
        )
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    bad = [name for name, tensor in plain.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ValueError(f"the bias holds NaN or infinity in {', '.join(bad[:3])}, which is not saved")
    about = {"format": _FORMAT, "version": _VERSION, "bias": configs, "base": _base(model)}
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    write(place, plain, about)
    return place


def write(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
    """Both files of a saved bias; `about` gets the digests of the tensors and of itself."""
    content = encoded(dict(tensors))
    whole = {**about, "weights": digest(content), "header": _digest(_header(content))}
    whole["checksum"] = _digest(whole)
    with write_atomically(folder / CONFIG) as config:
        config.write((json.dumps(whole, indent=2) + "\n").encode())
        with write_atomically(folder / WEIGHTS) as weights:  # in place first: this is what is read
            weights.write(encoded(dict(tensors), metadata={"format": "pt", _FORMAT: json.dumps(whole)}))


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
    expected = [one for one in saved.configs if one["kind"] == CustomConfig.kind]
    passed = [config.to_dict() for config in custom]
    if expected != passed:
        raise ValueError(
            f"the saved bias has the custom parts {expected or 'none'}, but custom= has {passed or 'none'}; pass the "
            "same CustomConfig objects that were attached"
        )
    own = iter(custom)
    configs: list[BiasConfig] = [
        next(own) if one["kind"] == CustomConfig.kind else config_from_dict(one) for one in saved.configs
    ]
    tensors = saved.tensors()
    attached = attach(model, configs, train=train, backend=backend)
    try:
        _fill(model, tensors, saved.folder)
    except ValueError:
        attached.remove()
        raise
    return attached


def restore(model: nn.Module, folder: Path) -> bool:
    """Give the attached bias the values in a folder; False if no bias is saved there.

    Raises:
        ValueError: damaged files, or a bias of another configuration.
    """
    if not (folder / WEIGHTS).is_file():
        return False
    saved = read(folder)
    attached = json.loads(json.dumps([config.to_dict() for config in handle(model).configs]))
    if list(saved.configs) != attached:
        raise ValueError(f"{folder} holds another bias: {list(saved.configs)}, attached is {attached}")
    _fill(model, saved.tensors(), folder)
    return True


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    expected = _tensors(model)
    if set(expected) != set(tensors):
        missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        raise ValueError(f"{folder / WEIGHTS} does not fit its config: missing {missing[:3]}, unexpected {extra[:3]}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            got, want = tuple(tensor.shape), tuple(expected[name].shape)
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


def _base(model: nn.Module) -> dict[str, object]:
    """What a saved bias says of its base model."""
    layers = layers_of(model)
    config, shape = layers[0].site.owner.config, layers[0].shape
    return {
        "name": str(getattr(config, "_name_or_path", "") or ""),
        "model_type": str(getattr(config, "model_type", "")),
        "num_layers": len(layers),
        "shape": {name: getattr(shape, name) for name in ("num_heads", "num_kv_heads", "head_dim", "hidden_size")},
        "samples": weight_samples([layer.site.module for layer in layers], CHILD),
    }


def _check_base(model: nn.Module, saved: Saved, strict: bool) -> None:
    here: dict[str, Any] = _base(model)
    for name in ("model_type", "num_layers", "shape"):
        if saved.base.get(name) != here[name]:
            called = f" ({saved.base_name})" if saved.base_name else ""
            raise WrongBase(
                f"the bias was trained on another base model{called}: {name} is {saved.base.get(name)} there and "
                f"{here[name]} here"
            )
    if strict and not same_weights(here["samples"], saved.base.get("samples", [])):
        raise WrongBase(
            f"the bias was saved with other weights of this architecture ({saved.base_name or 'unnamed'}); load those, "
            "or pass strict=False if this model was trained on from there"
        )


@dataclass(frozen=True)
class Saved:
    """What a folder says of the bias in it, read without its model.

    Attributes:
        folder: itself.
        configs: of the summands, as `BiasConfig.to_dict` writes them.
        base: the model that it was trained on: name, model_type, num_layers, shape, samples of its weights.
    """

    folder: Path
    configs: Sequence[Mapping[str, Any]]
    base: Mapping[str, Any]

    @property
    def base_name(self) -> str:
        """The name that the base model was loaded by; "" if it had none."""
        return str(self.base.get("name") or "")

    def check(self, layer: int | None = None, head: int | None = None) -> None:
        """Raise ValueError for a layer that has no bias here, or a head that the base model does not have."""
        number, num_heads = int(self.base["num_layers"]), int(self.base["shape"]["num_heads"])
        placed = [GuidanceConfig(layers=one["layers"]).layer_indices(number) for one in self.configs]  # as every kind
        layers = sorted({index for indices in placed for index in indices})
        if layer is not None and layer not in layers:
            raise ValueError(f"layer must be one of those with a bias, {layers}, got {layer}")
        if head is not None and not 0 <= head < num_heads:
            raise ValueError(f"head must be one of the base model's, 0 to {num_heads - 1}, got {head}")

    def tensors(self) -> dict[str, Tensor]:
        """The parameters, by layer number and name; ValueError for a damaged file, or NaN or infinity in it."""
        path = self.folder / WEIGHTS
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise ValueError(f"{path} holds NaN or infinity in {', '.join(bad[:3])}; train it again")
        return tensors


def read(folder: str | os.PathLike[str]) -> Saved:
    """The saved bias of a folder; its tensors are checked against its config, and not loaded.

    Raises:
        FileNotFoundError: no saved bias there.
        ValueError: files that are damaged, or of a newer version.
    """
    place = Path(folder)
    if not (place / WEIGHTS).is_file():
        raise FileNotFoundError(f"{place} holds no saved bias: {WEIGHTS} is missing; af.bias.save writes one")
    content = (place / WEIGHTS).read_bytes()
    header = _header(content)
    inside = header.pop("__metadata__", {}).get(_FORMAT)
    about = None if inside is None else _parsed(place / WEIGHTS, inside.encode())
    # The other file may be of an earlier save, if this one was killed before its end; it is only checked.
    beside = _parsed(place / CONFIG, (place / CONFIG).read_bytes()) if (place / CONFIG).is_file() else None
    values = digest(content)
    if about is None or "checksum" not in about:  # of an older save
        if beside is None:
            raise FileNotFoundError(f"{place} holds no saved bias: {CONFIG} is missing; af.bias.save writes one")
        about = beside if about is None or beside["weights"] == values else about
    if about["weights"] != values or about.get("header", _digest(header)) != _digest(header):
        raise ValueError(f"{place / WEIGHTS} is damaged: its numbers are not those that were saved")
    return Saved(place, about["bias"], about["base"])


def digest(content: bytes) -> str:
    """Of the numbers in a safetensors file, without the header before them."""
    return hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _header(content: bytes) -> dict[str, Any]:
    """The names, types and places of the tensors in a safetensors file; empty if it is damaged."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        names = header.get("__metadata__", {}).items()
        sound = all(isinstance(text, str) for _, text in names)
    except (ValueError, AttributeError, RecursionError):
        return {}
    return header if sound else {}


def _parsed(path: Path, content: bytes) -> Mapping[str, Any]:
    try:
        about = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(about, Mapping) or about.get("format") != _FORMAT:
        raise ValueError(f"{path} is not the config of a saved bias")
    if about.get("version") != _VERSION:
        raise ValueError(f"{path} has version {about.get('version')}, this release reads {_VERSION}; update attnflow")
    if "checksum" in about and _digest({k: v for k, v in about.items() if k != "checksum"}) != about["checksum"]:
        raise ValueError(
            f"{path} is damaged, or was edited: it is not as it was saved. {WEIGHTS} carries the same: without a "
            f"{CONFIG} beside it, that is read"
        )
    wrong = [name for name, kind in _TYPES.items() if not isinstance(about.get(name), kind)]
    if not wrong and not all(isinstance(one, Mapping) and "kind" in one and "layers" in one for one in about["bias"]):
        wrong = ["bias"]
    if not wrong and not all(isinstance(one, int | float) for one in about["base"].get("samples", ())):
        wrong = ["base"]
    if wrong:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} cannot be read")
    return cast(Mapping[str, Any], about)
