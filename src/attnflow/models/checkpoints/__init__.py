"""Checkpoints of every format behind one small interface: names, shapes, and tensors read one at a time."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, cast

from torch import nn

from attnflow._core.errors import MissingExtra
from attnflow.models.checkpoints.files import GGUF, SAFETENSORS, TORCH, BadCheckpoint, Folder, LocalFolder, read_json
from attnflow.models.checkpoints.gguf import gguf_weights
from attnflow.models.checkpoints.safetensors import safetensors_weights
from attnflow.models.checkpoints.weights import Weights, module_weights, torch_weights
from attnflow.models.names import resolve

__all__ = ["BadCheckpoint", "Weights", "open_weights"]

_SHARD: Final = re.compile(r"-\d+-of-(\d+)\.\w+$")


def open_weights(source: nn.Module | str | os.PathLike[str]) -> Weights:
    """Open a model in memory, a folder, a file, or a model on the hub; only headers are read.

    In a folder, safetensors come first, then `.bin` and its like, then GGUF. `FileNotFoundError` if it does not exist,
    `BadCheckpoint` if a file is damaged or missing, `MissingExtra` for the hub or GGUF without their packages.
    """
    if isinstance(source, nn.Module):
        return module_weights(source)
    if not isinstance(cast(object, source), str | os.PathLike):
        raise TypeError(f"expected a torch module, a path or the id of a model, got {type(source).__name__}")
    place = resolve(os.fspath(source))
    if isinstance(place, str):
        try:
            from attnflow.models.hub import find_model
        except ImportError as error:
            raise MissingExtra("huggingface_hub", "hf", "a model of the hub") from error
        place = cast(Folder | Path, find_model(place))
    if not isinstance(place, Path):
        return _from_folder(place)
    alone = None if place.is_dir() else place.name
    return _from_folder(LocalFolder(place if alone is None else place.parent, only=alone), alone)


def _from_folder(folder: Folder, only: str | None = None) -> Weights:
    config = next((read_json(folder, name) for name in ("config.json", "params.json") if name in folder.files), {})
    for kind, opened in ((SAFETENSORS, safetensors_weights), (TORCH, torch_weights), (GGUF, gguf_weights)):
        files = kind.find(folder) if only is None else [only] * only.endswith(kind.suffixes)
        shard = _SHARD.search(files[0]) if len(files) == 1 else None
        if shard and int(shard[1]) > 1:  # it would give the scores of a part of the model as if they were of all of it
            raise BadCheckpoint(
                f"{folder.file(files[0]).name} is one of {shard[1]} shards: pass the folder that holds all of them and "
                "their index (GGUF: merge them with llama-gguf-split)"
            )
        if files:
            return opened(folder, files, config)
    if "adapter_config.json" in folder.files:
        raise BadCheckpoint(f"{folder.name} holds an adapter: merge it into its model and save that")
    raise BadCheckpoint(f"{folder.name} holds no weights: expected safetensors, .bin, .pt or GGUF")
