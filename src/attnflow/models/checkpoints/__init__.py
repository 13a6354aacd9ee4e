"""Checkpoints of every format behind one small interface: names, shapes, and tensors read one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from torch import nn

from attnflow._core.errors import MissingExtra
from attnflow.models.checkpoints.files import BadCheckpoint, Folder, LocalFolder, read_json
from attnflow.models.checkpoints.gguf import GGUFWeights
from attnflow.models.checkpoints.module import ModuleWeights
from attnflow.models.checkpoints.safetensors import SafetensorsWeights, find_safetensors
from attnflow.models.checkpoints.torch_file import SUFFIXES, TorchWeights, find_torch_files
from attnflow.models.checkpoints.weights import Weights
from attnflow.models.names import resolve

_SHARD: Final = re.compile(r"-\d+-of-(\d+)\.\w+$")

__all__ = ["BadCheckpoint", "Weights", "open_weights"]


def open_weights(source: nn.Module | str | os.PathLike[str]) -> Weights:
    """A model in memory, a folder, a file, or a model on the hub, of which nothing but headers is read yet.

    In a folder, safetensors come first, then `.bin` and its like, then GGUF.

    Raises:
        FileNotFoundError: there is no such file, folder or model.
        BadCheckpoint: a file is damaged, missing or in a form that is not opened.
        MissingExtra: the hub or a GGUF file, without the packages that read them.
    """
    if isinstance(source, nn.Module):
        return ModuleWeights(source)
    if not isinstance(cast(object, source), str | os.PathLike):
        raise TypeError(f"expected a torch module, a path or the id of a model, got {type(source).__name__}")
    place = resolve(os.fspath(source))
    if isinstance(place, str):
        try:
            from attnflow.models.hub import find_model
        except ImportError as error:
            raise MissingExtra("huggingface_hub", "hf", "a model of the hub") from error
        place = cast(Folder | Path, find_model(place))
    if isinstance(place, Path):
        alone = None if place.is_dir() else place.name
        return _from_folder(LocalFolder(place if alone is None else place.parent, only=alone), alone)
    return _from_folder(place)


def _from_folder(folder: Folder, only: str | None = None) -> Weights:
    config = _config(folder)
    safetensors = find_safetensors(folder) if only is None else [only] * only.endswith(".safetensors")
    if safetensors:
        _refuse_one_shard(folder, safetensors)
        return SafetensorsWeights(folder, safetensors, config)
    torch_files = find_torch_files(folder) if only is None else [only] * only.endswith(SUFFIXES)
    if torch_files:
        _refuse_one_shard(folder, torch_files)
        return TorchWeights(folder, torch_files, config)
    gguf = [name for name in folder.files if name.endswith(".gguf")]
    if len(gguf) == 1:
        _refuse_one_shard(folder, gguf)
        return GGUFWeights(folder.file(gguf[0]))
    if gguf:
        raise BadCheckpoint(f"{folder.name} holds {len(gguf)} GGUF files ({', '.join(gguf[:3])}); pass one of them")
    if "adapter_config.json" in folder.files:
        raise BadCheckpoint(f"{folder.name} holds an adapter: merge it into its model and save that")
    raise BadCheckpoint(f"{folder.name} holds no weights: expected safetensors, .bin, .pt or GGUF")


def _refuse_one_shard(folder: Folder, files: Sequence[str]) -> None:
    """One shard would give the scores of a part of the model, as if they were of all of it."""
    shard = _SHARD.search(files[0]) if len(files) == 1 else None
    if shard and int(shard[1]) > 1:
        raise BadCheckpoint(
            f"{folder.file(files[0]).name} is one of {shard[1]} shards: pass the folder that holds all of them and "
            "their index (GGUF: merge them with llama-gguf-split)"
        )


def _config(folder: Folder) -> Mapping[str, object]:
    for name in ("config.json", "params.json"):
        if name in folder.files:
            return read_json(folder, name)
    return {}
