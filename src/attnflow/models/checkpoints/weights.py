"""`Weights`: the tensors of a model wherever they are, with readers for modules in memory and `torch.save` files."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn

from attnflow.models.checkpoints.files import BadCheckpoint, Folder
from attnflow.models.families.rows import Read

_INSIDE: Final = ("state_dict", "model", "module", "model_state_dict")


@dataclass(frozen=True, eq=False)
class Weights:
    """Names and shapes of all tensors of a model, and a reader for each.

    `read` gives a tensor or a run of its rows on the CPU in float32 (float64 stays). `packed` names tensors that cannot
    be read as numbers, such as quantised blocks.
    """

    name: str
    config: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    packed: frozenset[str]
    read: Read
    module: nn.Module | None = None


def module_weights(model: nn.Module) -> Weights:
    """Open the parameters of a torch module; shared ones appear once."""
    config = config_of(model)
    name = config.get("_name_or_path")
    parameters = dict(model.named_parameters())

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        parameter = parameters[tensor].detach()
        if parameter.is_meta:
            raise BadCheckpoint(f"{tensor} is on the meta device, which holds no numbers: load the weights first")
        if hasattr(parameter, "full_tensor"):  # a DTensor
            raise BadCheckpoint(f"{tensor} is sharded over devices, which are not asked for it: score a checkpoint")
        return as_float(parameter if rows is None else parameter[slice(*rows)])

    return Weights(
        name if isinstance(name, str) and name else type(model).__name__,
        config,
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        frozenset(name for name, parameter in parameters.items() if not parameter.is_floating_point()),
        read,
        model,
    )


def config_of(model: nn.Module) -> Mapping[str, object]:
    """Return a model's config as in config.json; empty if it has none."""
    config = getattr(model, "config", None)
    as_dict = getattr(config, "to_dict", None)
    if callable(as_dict):
        return cast(Mapping[str, object], as_dict())
    return cast(Mapping[str, object], config) if isinstance(config, Mapping) else {}


def torch_weights(folder: Folder, files: Sequence[str], config: Mapping[str, object]) -> Weights:
    """Open a `torch.save` file, tensors only so that no code runs, mapped from disk if possible."""
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = folder.local(name)
        if path is None:
            raise BadCheckpoint(
                f"{folder.name} has its weights in {name}, which cannot be read by ranges: download it and pass the "
                "folder"
            )
        tensors |= _load(path)
    return Weights(
        folder.name,
        config,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        frozenset(name for name, tensor in tensors.items() if not tensor.is_floating_point()),
        lambda name, rows: as_float(tensors[name] if rows is None else tensors[name][slice(*rows)]),
    )


def _load(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        archive = file.read(4) == b"PK\x03\x04"  # the older format is none, and cannot be mapped
    if archive:
        _require_stored(path)
    try:
        content = cast(object, torch.load(path, map_location="cpu", weights_only=True, mmap=archive))
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(
            f"{path} holds more than tensors, or is damaged; a pickle can run any code and is not opened: convert it "
            "to safetensors on a machine that trusts it"
        ) from error
    except Exception as error:  # a damaged pickle fails anywhere in the unpickler, with any class of error
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise BadCheckpoint(f"{path} is truncated or no file of torch.save: {why}") from error
    for word in _INSIDE:
        inner = cast(Mapping[str, object], content).get(word) if isinstance(content, Mapping) else None
        if isinstance(inner, Mapping):
            content = cast(object, inner)
            break
    items = cast(Mapping[object, object], content) if isinstance(content, Mapping) else {}
    tensors = {str(name): value for name, value in items.items() if isinstance(value, Tensor)}
    if not tensors:
        raise BadCheckpoint(f"{path} holds no tensors by name, as a state dict does")
    for name, tensor in tensors.items():
        # A few bytes can stand for a tensor of any size, by strides of 0 or by coordinates.
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise BadCheckpoint(f"{path}: {name} of shape {list(tensor.shape)} is larger than what is stored of it")
    return tensors


def _require_stored(path: Path) -> None:
    """Refuse a compressed archive: `torch.save` never makes one, and 3 MB can become 6 GB."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, UnicodeError) as error:
        raise BadCheckpoint(f"{path} is truncated or no file of torch.save: {error}") from error
    packed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise BadCheckpoint(f"{path} is compressed ({packed[0]!r:.80}), which torch.save does not do: unpack it first")


def as_float(value: Tensor) -> Tensor:
    """Convert to float32 on the CPU; float64 stays."""
    return value.to("cpu", torch.float64 if value.dtype == torch.float64 else torch.float32)
