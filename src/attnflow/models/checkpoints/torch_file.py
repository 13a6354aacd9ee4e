"""Files of `torch.save`: tensors only, so that no code in them is run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from attnflow.models.checkpoints.files import BadCheckpoint, Folder, shards_of
from attnflow.models.checkpoints.weights import Weights, as_float

_INSIDE: Final = ("state_dict", "model", "module", "model_state_dict")
_INDEX: Final = "pytorch_model.bin.index.json"
SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")


class TorchWeights(Weights):
    """A model saved by `torch.save`, opened with `weights_only=True` and mapped from disk where the format allows it.

    Args:
        folder: where the files are, on this machine.
        files: names of the files; with shards, all of them.
        config: what config.json says.
    """

    def __init__(self, folder: Folder, files: Sequence[str], config: Mapping[str, object]) -> None:
        self.name = folder.name
        self.config = config
        self._tensors: dict[str, Tensor] = {}
        for name in files:
            path = folder.local(name)
            if path is None:
                raise BadCheckpoint(
                    f"{folder.name} has its weights in {name}, which cannot be read by ranges: download it and pass "
                    "the folder"
                )
            self._tensors.update(_load(path))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.packed = frozenset(name for name, tensor in self._tensors.items() if not tensor.is_floating_point())

    def read(self, tensor: str, rows: tuple[int, int] | None) -> Tensor:
        """A tensor, or a run of its rows, in float32."""
        value = self._tensors[tensor]
        return as_float(value if rows is None else value[slice(*rows)])


def find_torch_files(folder: Folder) -> list[str]:
    """The files that hold the model: the shards of the index, or the one file; empty if there are none.

    Raises:
        BadCheckpoint: a shard is missing, or which of several files holds the model is not clear.
    """
    if _INDEX in folder.files:
        return shards_of(folder, _INDEX)
    if "pytorch_model.bin" in folder.files:
        return ["pytorch_model.bin"]
    there = [name for name in folder.files if name.endswith(SUFFIXES) and name != "training_args.bin"]
    if len(there) > 1:
        raise BadCheckpoint(
            f"{folder.name} holds {len(there)} files of weights ({', '.join(there[:3])}); pass one of them"
        )
    return there


def _load(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        archive = file.read(4) == b"PK\x03\x04"  # the older format is none, and cannot be mapped
    try:
        content = cast(object, torch.load(path, map_location="cpu", weights_only=True, mmap=archive))
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(
            f"{path} holds more than tensors, or is damaged; a pickle can run any code and is not opened: convert it "
            "to safetensors on a machine that trusts it"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
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
    return tensors
