"""Files of a checkpoint; safetensors, in one file or in shards, read only row by row as requested."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from attnflow._core.errors import AttnflowError
from attnflow.models.loading.names import short_names
from attnflow.models.weights.families.rows import Read

SAFETENSORS: Final = ".safetensors"
GGUF: Final = ".gguf"
_LARGEST_JSON: Final = 100_000_000
_MOST_LAYERS: Final = 2048  # that are made without asking whether there are weights for them: a second or two
_COUNT: Final = re.compile(r"(layer|depth|expert)(?!.*_size$)")  # a size is a width, as of a shared expert
_NUMBERS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
MERGE: Final = "merge it with PEFT (merge_and_unload) and save the model that results"


class BadCheckpoint(AttnflowError, ValueError):
    """A checkpoint is damaged, incomplete, or in a form that is not opened; the message names the file."""


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


class Folder:
    """The top-level files of one checkpoint, with their sizes in bytes; or one file, with the JSON files beside it."""

    def __init__(self, path: Path, only: str | None = None) -> None:
        there = sorted(entry for entry in path.iterdir() if entry.is_file())
        mine = [entry for entry in there if only in (None, entry.name) or entry.suffix == ".json"]
        self.path, self.name = path, str(path / only) if only else str(path)
        self.sizes = {entry.name: entry.stat().st_size for entry in mine}


def model_files(folder: Folder, suffix: str) -> list[str]:
    """List the files that hold the model: the index's shards, or one file; `BadCheckpoint` if some are missing."""
    if (index := index_of(folder, suffix)) is not None:
        return sorted(set(shards(folder, index).values()))
    there = _files(folder, suffix)
    if f"model{SAFETENSORS}" in there:
        return [f"model{SAFETENSORS}"]
    if len(there) > 1:
        raise BadCheckpoint(
            f"{folder.name} holds {len(there)} {suffix} files and no index ({', '.join(there[:3])}); pass one of them"
        )
    return there


def index_of(folder: Folder, suffix: str) -> str | None:
    """Return the file that names the shard of each tensor; None if the model is one file."""
    if _files(folder, suffix) == [f"model{SAFETENSORS}"]:
        return None
    indices = [name for name in folder.sizes if name.endswith(f"{suffix}.index.json")]
    return max(indices, key=lambda name: name == f"model{suffix}.index.json", default=None)


def _files(folder: Folder, suffix: str) -> list[str]:
    return [name for name in folder.sizes if name.endswith(suffix) and not name.startswith("adapter_")]


def refuse_adapter(path: Path) -> None:
    """Refuse, with `BadCheckpoint`, a folder that holds a PEFT adapter, with or without a model beside it."""
    if (path / "adapter_config.json").is_file():
        raise BadCheckpoint(
            f"{path} holds a PEFT adapter, which changes a model: load both with peft.AutoPeftModel.from_pretrained "
            f"and pass the model, or {MERGE}"
        )


def read_json(folder: Folder, file: str) -> Mapping[str, object]:
    """Read a JSON file of the folder; `BadCheckpoint` unless it holds an object."""
    title, size = folder.path / file, folder.sizes[file]
    if size > _LARGEST_JSON:
        raise BadCheckpoint(f"{title} has {size} bytes; no config or index is longer than {_LARGEST_JSON}")
    try:
        content = json.loads(title.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{title} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{title} holds no JSON object")
    return cast(Mapping[str, object], content)


def shards(folder: Folder, index: str) -> Mapping[str, str]:
    """Return the file of each tensor that an index names; all must exist."""
    stated = read_json(folder, index).get("weight_map")
    if not isinstance(stated, dict):
        raise BadCheckpoint(f"{folder.name}/{index} has no weight_map")
    names = {tensor: str(name) for tensor, name in cast(dict[str, object], stated).items()}
    files = sorted(set(names.values()))
    outside = [name for name in files if "/" in name or "\\" in name or name in ("", ".", "..")]
    if outside:
        raise BadCheckpoint(f"{folder.name}/{index} names a file outside of its folder: {outside[0]!r:.80}")
    missing = [name for name in files if name not in folder.sizes]
    if missing:
        raise BadCheckpoint(
            f"{folder.name} lacks {len(missing)} of {len(files)} shards ({', '.join(missing[:3])}); download it again"
        )
    return names


def check_sizes(name: str, config: Mapping[str, object], tensors: int) -> None:
    """Refuse, with `BadCheckpoint`, a config of more layers than tensors before any module is built."""
    for word, size in _sizes(config):
        if size > max(_MOST_LAYERS, tensors):
            raise BadCheckpoint(f"{name}: {word} of its config is {size}, with {tensors} tensors in its weights")


def _sizes(config: Mapping[Any, object]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(cast(Mapping[Any, object], value))
        elif isinstance(name, str) and _COUNT.search(name):
            if isinstance(value, int):
                yield name, value
            elif isinstance(value, list | tuple):
                yield f"the length of {name}", len(cast(Sequence[object], value))


def as_float(value: Tensor) -> Tensor:
    """Convert to float32 on the CPU; float64 stays."""
    return value.to("cpu", torch.float64 if value.dtype == torch.float64 else torch.float32)


def not_reached(name: str, error: Exception, offline: bool) -> FileNotFoundError:
    why = "HF_HUB_OFFLINE is set and it is not in the local cache" if offline else first_line(error)
    return FileNotFoundError(f"{name!r} is not local, and cannot be downloaded from the hub ({why}){short_names()}")


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def safetensors_weights(folder: Folder, files: Sequence[str], config: Mapping[str, object]) -> Weights:
    """Open a model stored as safetensors; 8-bit floats are multiplied by their scales when read."""
    shapes: dict[str, tuple[int, ...]] = {}
    stored: dict[str, tuple[Path, str]] = {}  # the file of each tensor, and its dtype
    for name in files:
        with _opened(folder.path / name) as file:
            for tensor in file.keys():  # noqa: SIM118
                piece = file.get_slice(tensor)
                shapes[tensor], stored[tensor] = tuple(piece.get_shape()), (folder.path / name, piece.get_dtype())

    def plain(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        path, dtype = stored[tensor]
        if dtype not in _NUMBERS:
            raise BadCheckpoint(f"{path} holds {dtype} where numbers are expected")
        with _opened(path) as file:  # anew: the pages of a map would stay in memory and count as this process's
            value = file.get_tensor(tensor) if rows is None else file.get_slice(tensor)[slice(*rows)]
            return as_float(value.clone())

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        scales = (f"{tensor}_scale_inv", f"{tensor}_scale")  # both are factors, whatever the first is called
        scale = next((name for name in scales if name in stored), None)
        if scale is None or not stored[tensor][1].startswith("F8"):
            return plain(tensor, rows)
        value = _scaled(plain(tensor, None), plain(scale, None), config)
        return value if rows is None else value[slice(*rows)]

    packed = frozenset(name for name, (_, dtype) in stored.items() if dtype not in _NUMBERS)
    return Weights(folder.name, config, shapes, packed, read)


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        with cast(Any, safe_open(path, "pt")) as file:
            yield file
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is not a safetensors file, or is truncated or damaged: {error}") from error


def _scaled(value: Tensor, scale: Tensor, config: Mapping[str, object]) -> Tensor:
    """Multiply 8-bit floats by their scales: one for all, one a row, or one a block."""
    if scale.numel() == 1:
        return value * scale.flatten()
    if scale.ndim != 2 or value.ndim != 2:
        raise BadCheckpoint(f"scales of shape {list(scale.shape)} for 8-bit weights of shape {list(value.shape)}")
    if scale.shape == (value.shape[0], 1):
        return value * scale
    quantized = config.get("quantization_config")
    blocks: Any = (
        cast("Mapping[str, Any]", quantized).get("weight_block_size") if isinstance(quantized, Mapping) else None
    )
    blocks = blocks or (128, 128)
    two = isinstance(blocks, list | tuple) and len(cast(Sequence[object], blocks)) == 2
    if not two or any(type(size) is not int or size <= 0 for size in blocks):
        raise BadCheckpoint(f"weight_block_size of the config must be two sizes above 0, got {blocks!r:.80}")
    height, width = blocks
    if scale.shape != (math.ceil(value.shape[0] / height), math.ceil(value.shape[1] / width)):
        raise BadCheckpoint(
            f"scales of shape {list(scale.shape)} for 8-bit weights of shape {list(value.shape)} in blocks of "
            f"{height} x {width}"
        )
    spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return value * spread[: value.shape[0], : value.shape[1]]
