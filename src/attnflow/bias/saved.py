"""A saved bias as a folder of two files, read without the model that it belongs to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from attnflow._core.files import write_atomically
from attnflow.bias.kinds import GuidanceConfig

WEIGHTS: Final = "bias.safetensors"
CONFIG: Final = "bias_config.json"
_FORMAT: Final = "attnflow-bias"
_VERSION: Final = 1
_TYPES: Final = {"bias": list, "base": Mapping, "weights": str}


@dataclass(frozen=True)
class Saved:
    """What a folder says of the bias in it.

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

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that have a bias."""
        number = int(self.base["num_layers"])
        return sorted({n for one in self.configs for n in GuidanceConfig(layers=one["layers"]).layer_indices(number)})

    def check(self, layer: int | None = None, head: int | None = None) -> None:
        """Raise for a layer that has no bias here, or a head that the base model does not have.

        Raises:
            ValueError: such a number.
        """
        if layer is not None and layer not in self.layers:
            raise ValueError(f"layer must be one of those with a bias, {self.layers}, got {layer}")
        num_heads = int(self.base["shape"]["num_heads"])
        if head is not None and not 0 <= head < num_heads:
            raise ValueError(f"head must be one of the base model's, 0 to {num_heads - 1}, got {head}")

    def tensors(self) -> dict[str, Tensor]:
        """The parameters, by layer number and name.

        Raises:
            ValueError: a damaged file, or NaN or infinity in it.
        """
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
    for name in (CONFIG, WEIGHTS):
        if not (place / name).is_file():
            raise FileNotFoundError(f"{place} holds no saved bias: {name} is missing; af.bias.save writes one")
    about = _parsed(place / CONFIG, (place / CONFIG).read_bytes())
    values = digest((place / WEIGHTS).read_bytes())
    if about["weights"] != values:  # a save that was killed between its two files: the tensors carry their config, too
        about = _inside(place / WEIGHTS)
        if about["weights"] != values:
            raise ValueError(f"{place / WEIGHTS} is damaged: its numbers are not those that were saved")
    return Saved(place, about["bias"], about["base"])


def write(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    configs: Sequence[Mapping[str, object]],
    base: Mapping[str, object],
) -> Path:
    """Write a bias; each file is written whole or not at all, the tensors first, and they carry the config as well."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {"format": _FORMAT, "version": _VERSION, "bias": configs, "base": base, "weights": digest(save(plain))}
    with write_atomically(place / CONFIG) as config:
        config.write((json.dumps(about, indent=2) + "\n").encode())
        with write_atomically(place / WEIGHTS) as weights:
            weights.write(save(plain, metadata={"format": "pt", _FORMAT: json.dumps(about)}))
    return place


def digest(content: bytes) -> str:
    """Of the numbers in a safetensors file, without the header before them."""
    return hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()


def _inside(path: Path) -> Mapping[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            text = cast("dict[str, str]", file.metadata() or {}).get(_FORMAT)
    except SafetensorError:
        text = None
    if text is None:
        raise ValueError(f"{path} is not the file that {CONFIG} was saved with: damaged, or of another save")
    return _parsed(path, text.encode())


def _parsed(path: Path, content: bytes) -> Mapping[str, Any]:
    try:
        about = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(about, Mapping) or about.get("format") != _FORMAT:
        raise ValueError(f"{path} is not the config of a saved bias")
    if about.get("version") != _VERSION:
        raise ValueError(f"{path} has version {about.get('version')}, this release reads {_VERSION}; update attnflow")
    wrong = [name for name, kind in _TYPES.items() if not isinstance(about.get(name), kind)]
    if not wrong and not all(isinstance(one, Mapping) and "kind" in one and "layers" in one for one in about["bias"]):
        wrong = ["bias"]
    if not wrong and not all(isinstance(one, int | float) for one in about["base"].get("samples", ())):
        wrong = ["base"]
    if wrong:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} cannot be read")
    return cast(Mapping[str, Any], about)
