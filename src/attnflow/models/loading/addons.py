"""Saves what was added to a model (a bias, a reader) in a separate folder without the model.

`KIND.safetensors` holds everything; its header has the config, the base model's identity and a digest of the file. One
rename replaces an older add-on. `KIND_config.json` repeats the config for people and is never read back.
"""

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
from safetensors.torch import load as decoded
from safetensors.torch import save as encoded
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture, WrongBase
from attnflow._core.files import write_atomically
from attnflow.models.loading.offload import parameter_of
from attnflow.models.passes.processes import whole

_VERSION: Final = 1
_NO_DIGEST: Final = "digest of this file".ljust(64, "-")  # in its place while it is computed
_SAMPLES: Final = 16  # numbers of a matrix by which a model is recognised
_ADAPTERS: Final = (".lora_", "modules_to_save")


def split_heads(kind: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"a {kind} needs all heads of an attention layer in one process, and tensor parallelism splits them: use DDP "
        f"or FSDP2 instead, and attach the {kind} before them"
    )


def check_loaded(added: nn.Module, kind: str, like: Tensor) -> None:
    """Raise where an add-on was offloaded with its model: its parameters are read outside of a forward pass of it."""
    if not like.is_meta and next(added.parameters(), like).is_meta:
        raise ValueError(
            f"the parameters of a {kind} were offloaded together with the model: offload the model first, then attach "
            f"the {kind}"
        )


@dataclass(frozen=True)
class Addon:
    """A saved add-on, read without its model; the tensors are finite, the values in `config` are unchecked."""

    path: Path
    kind: str
    config: Mapping[str, Any]
    base: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def base_name(self) -> str:
        return str(self.base.get("name") or "")

    def check_base(self, here: Mapping[str, object], strict: bool = True) -> None:
        """Raise `WrongBase` for a model of another `identity`; unless `strict`, other weights of its sizes pass."""
        named = f" ({self.base_name})" if self.base_name else ""
        for name in here:
            if name not in ("name", "samples") and self.base.get(name) != here[name]:
                raise WrongBase(
                    f"the {self.kind} in {self.path.parent} was made for another base model{named}: {name} is "
                    f"{self.base.get(name)} there and {here[name]} here"
                )
        if strict and not same_weights(here["samples"], self.base.get("samples")):
            raise WrongBase(
                f"the {self.kind} in {self.path.parent} was made for other weights of this architecture"
                f"{named or ' (unnamed)'}; load those, or pass strict=False if this model was trained on from there"
            )

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the saved values into tensors of the same names and shapes; `ValueError` on a mismatch."""
        missing, extra = sorted(set(targets) - set(self.tensors)), sorted(set(self.tensors) - set(targets))
        if missing or extra:
            raise ValueError(f"{self.path} does not fit its config: missing {missing[:3]}, unexpected {extra[:3]}")
        for name, tensor in self.tensors.items():
            if tensor.shape != targets[name].shape:
                got, want = tuple(tensor.shape), tuple(targets[name].shape)
                raise ValueError(f"{self.path} does not fit its config: {name} has shape {got}, expected {want}")
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.copy_(self.tensors[name])


def save_addon(
    folder: str | os.PathLike[str],
    kind: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    base: Mapping[str, object],
    write: bool = True,
) -> Path:
    """Write an add-on to a folder, which is returned; other files there stay. `ValueError` for what cannot be saved.

    Every rank with shards of the tensors calls it; one of them is to `write`.
    """
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError(f"the {kind} is on the meta device, where it has no values to save")
    plain = {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}
    if bad := _nonfinite(plain):
        raise ValueError(f"the {kind} holds NaN or infinity in {', '.join(bad[:3])}, which is not saved")
    about = {"kind": kind, "version": _VERSION, "base": dict(base), "config": dict(config)}
    content = encoded(plain, metadata={"attnflow": json.dumps(about), "sha256": _NO_DIGEST})
    digest = hashlib.sha256(content).hexdigest()
    folder = Path(folder)
    if not write:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with write_atomically(folder / f"{kind}.safetensors") as file:
        file.write(content.replace(_NO_DIGEST.encode(), digest.encode(), 1))
    with write_atomically(folder / f"{kind}_config.json") as file:
        file.write((json.dumps(about, indent=2) + "\n").encode())
    return folder


def read_addon(folder: str | os.PathLike[str], kind: str) -> Addon:
    """Read the add-on of a kind from a folder, and check it whole; `ValueError` for one that is damaged."""
    path = Path(folder) / f"{kind}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no saved {kind}: {path.name} is missing")
    content = path.read_bytes()
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header["__metadata__"]
        written, about = str(metadata["sha256"]), json.loads(metadata["attnflow"])
        whole = hashlib.sha256(content.replace(written.encode(), _NO_DIGEST.encode(), 1)).hexdigest() == written
        stored = about["kind"], about["version"]
        parts = cast("tuple[object, object]", (about["config"], about["base"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not a saved {kind}: its header cannot be read") from error
    if stored != (kind, _VERSION):
        raise ValueError(
            f"{path} is an add-on {stored[0]} of version {stored[1]}, expected {kind} of version {_VERSION}; update "
            "attnflow"
        )
    if not whole or not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(f"{path} is damaged or was edited: its digest differs from the saved one")
    try:
        tensors = decoded(content)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if bad := _nonfinite(tensors):
        raise ValueError(f"{path} holds NaN or infinity in {', '.join(bad[:3])}; make it again")
    return Addon(path, kind, about["config"], about["base"], tensors)


def identity(config: object, layers: Sequence[nn.Module], without: str, **sizes: object) -> dict[str, object]:
    """Identify a base model by its config, sizes, and a few weights of three layers, in any precision."""
    samples: list[float] = []
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for name, parameter in layer.named_parameters():
            ours = without in name or any(part in name for part in _ADAPTERS)
            if parameter.is_meta:
                parameter = parameter_of(layer, name)
            if not (ours or parameter.is_meta) and parameter.is_floating_point() and parameter.ndim == 2:
                flat = whole(parameter.detach()).flatten()
                samples += flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float().tolist()
                break
    return {
        "name": str(getattr(config, "_name_or_path", "") or ""),
        "model_type": str(getattr(config, "model_type", "")),
        "num_layers": len(layers),
        **sizes,
        "samples": samples,
    }


def same_weights(here: object, saved: object) -> bool:
    """Compare samples of weights with those of a file, which may hold anything."""
    try:
        ours, theirs = (torch.tensor(cast(Any, sample), dtype=torch.float64, device="cpu") for sample in (here, saved))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    scale = float(ours.abs().max()) if ours.numel() else 0.0
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0.01, atol=2e-3 * scale)


def _nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
