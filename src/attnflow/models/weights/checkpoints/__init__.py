"""Checkpoints of every format behind one small interface: names, shapes, and tensors read one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from torch import Tensor, nn

from attnflow._core.checks import preview
from attnflow._core.errors import MissingExtra
from attnflow._core.wrappers import class_of
from attnflow.models.loading.names import resolve
from attnflow.models.loading.offload import parameter_of
from attnflow.models.passes.processes import whole
from attnflow.models.weights.checkpoints.files import (
    GGUF,
    SAFETENSORS,
    BadCheckpoint,
    Folder,
    Weights,
    as_float,
    index_of,
    model_files,
    not_reached,
    read_json,
    refuse_adapter,
    safetensors_weights,
    shards,
)
from attnflow.models.weights.checkpoints.gguf import gguf_weights

__all__ = ["BadCheckpoint", "Weights", "config_of", "open_weights"]

_SHARD: Final = re.compile(r"-\d+-of-(\d+)\.\w+$")
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")


def open_weights(source: nn.Module | str | os.PathLike[str]) -> Weights:
    """Open a model in memory, a folder, a file, or a model on the hub; only headers are read, and no pickle."""
    if isinstance(source, nn.Module):
        return _module_weights(source)
    if not isinstance(cast(object, source), str | os.PathLike):
        raise TypeError(f"expected a torch module, a path or the id of a model, got {type(source).__name__}")
    place = resolve(os.fspath(source))
    if isinstance(place, str):
        place = _downloaded(place)
    alone = None if place.is_dir() else place.name
    if alone is None:
        refuse_adapter(place)
    return _from_folder(Folder(place if alone is None else place.parent, only=alone), alone)


def _downloaded(name: str) -> Path:
    """Return the folder of a model in the hub's cache, fetched if needed; `FileNotFoundError` if it cannot be had."""
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "hf", "a model of the hub") from error
    http = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])  # of the HTTP client that this version brings
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"]))
    except (http, OSError) as error:
        raise not_reached(name, error, constants.HF_HUB_OFFLINE) from error


def _from_folder(folder: Folder, only: str | None = None) -> Weights:
    config = read_json(folder, "config.json") if "config.json" in folder.sizes else {}
    for suffix, opened in ((SAFETENSORS, safetensors_weights), (GGUF, gguf_weights)):
        files = model_files(folder, suffix) if only is None else [only] * only.endswith(suffix)
        shard = _SHARD.search(files[0]) if len(files) == 1 else None
        if shard and int(shard[1]) > 1:  # it would give the scores of a part of the model as if they were of all of it
            raise BadCheckpoint(
                f"{folder.path / files[0]} is one of {shard[1]} shards: pass the folder that holds all of them and "
                "their index (GGUF: merge them with llama-gguf-split)"
            )
        if files:
            weights = opened(folder, files, config)
            names = {} if only or (index := index_of(folder, suffix)) is None else shards(folder, index)
            if lost := [name for name in names if name not in weights.shapes]:
                raise BadCheckpoint(
                    f"{folder.name} lacks {len(lost)} of {len(names)} tensors that its index names "
                    f"({preview(lost, 3)}); download it again"
                )
            return weights
    if pickled := [name for name in folder.sizes if name.endswith(_PICKLED)]:
        raise BadCheckpoint(
            f"{folder.name} has its weights in {pickled[0]}; a pickle can run any code and is not opened: convert it "
            "with save_pretrained on a machine that trusts it, or pass the loaded model"
        )
    raise BadCheckpoint(f"{folder.name} holds no weights: expected safetensors or GGUF")


def _module_weights(model: nn.Module) -> Weights:
    """Open the parameters of a torch module; shared ones appear once."""
    config = config_of(model)
    parameters, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        parameter = (parameter_of(model, tensor) if every[tensor].is_meta else every[tensor]).detach()
        if parameter.is_meta:
            raise BadCheckpoint(f"{tensor} is on the meta device, which holds no numbers: load the weights first")
        parameter = whole(parameter)
        return as_float(parameter if rows is None else parameter[slice(*rows)])

    return Weights(
        str(config.get("_name_or_path") or class_of(model).__name__),
        config,
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        frozenset(name for name, parameter in parameters.items() if not parameter.is_floating_point()),
        read,
        model,
    )


def config_of(model: nn.Module) -> Mapping[str, object]:
    """Return a model's config as in config.json; empty if it has none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    return config if isinstance(config, Mapping) else {}
