"""Files of a checkpoint, on disk or elsewhere, read by byte ranges; safetensors, in one file or in shards.

Of safetensors the header is read, then only the byte ranges of requested tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import AttnflowError
from attnflow.models.families.rows import Read

SAFETENSORS: Final = ".safetensors"
GGUF: Final = ".gguf"
_LARGEST_JSON: Final = 100_000_000
_MOST_LAYERS: Final = 2048  # that are made without asking whether there are weights for them: a second or two


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
    """The top-level files of one checkpoint, with their sizes in bytes; results and messages call it by its name."""

    def __init__(self, path: str, name: str, sizes: Mapping[str, int]) -> None:
        self.path, self.name, self.sizes = path, name, sizes

    def title(self, file: str) -> str:
        """Name a file for messages."""
        return f"{self.path}/{file}"

    def local(self, file: str) -> Path | None:
        """Return a file's path on this machine, or None."""
        return None

    def read(self, file: str, start: int, stop: int) -> bytearray:
        """Return exactly the bytes from `start` to before `stop`, or raise."""
        raise NotImplementedError


class LocalFolder(Folder):
    """A folder on disk, or one file in it with its config beside it."""

    def __init__(self, path: Path, only: str | None = None) -> None:
        there = sorted(entry for entry in path.iterdir() if entry.is_file())
        mine = [entry for entry in there if only in (None, entry.name) or entry.suffix == ".json"]
        sizes = {entry.name: entry.stat().st_size for entry in mine}
        super().__init__(str(path), str(path / only) if only else str(path), sizes)

    def local(self, file: str) -> Path:
        """Return a file's path."""
        return Path(self.path) / file

    def read(self, file: str, start: int, stop: int) -> bytearray:
        """Return a byte range; `BadCheckpoint` if the file ends before it."""
        # Read, not mapped: the pages of a map would stay in memory and count as this process's.
        if not 0 <= start <= stop <= self.sizes[file]:  # before memory is taken for it
            raise BadCheckpoint(
                f"{self.title(file)} is truncated or damaged: bytes {start} to {stop} of {self.sizes[file]}"
            )
        buffer = bytearray(stop - start)
        with self.local(file).open("rb") as opened:
            opened.seek(start)
            count = opened.readinto(buffer)
        if count < len(buffer):
            raise BadCheckpoint(f"{self.title(file)} is truncated: it ends at byte {start + count}, not {stop}")
        return buffer


def model_files(folder: Folder, suffix: str) -> list[str]:
    """List the files of a format that hold the model: the index's shards, or one file; empty if there are none.

    `BadCheckpoint` for a missing shard, or several files of which any may hold the model.
    """
    there = [name for name in folder.sizes if name.endswith(suffix) and not name.startswith("adapter_")]
    indices = [name for name in folder.sizes if name.endswith(f"{suffix}.index.json")]
    usual = f"model{SAFETENSORS}"
    if indices and there != [usual]:
        preferred = f"model{suffix}.index.json"
        return shards(folder, preferred if preferred in indices else indices[0])
    if usual in there:
        return [usual]
    if len(there) > 1:
        raise BadCheckpoint(
            f"{folder.name} holds {len(there)} {suffix} files and no index ({', '.join(there[:3])}); pass one of them"
        )
    return there


def read_json(folder: Folder, file: str) -> Mapping[str, object]:
    """Read a JSON file of the folder; `BadCheckpoint` unless it holds an object."""
    title, size = folder.title(file), folder.sizes[file]
    if size > _LARGEST_JSON:
        raise BadCheckpoint(f"{title} has {size} bytes; no config or index is longer than {_LARGEST_JSON}")
    try:
        content = json.loads(folder.read(file, 0, size))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{title} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{title} holds no JSON object")
    return cast(Mapping[str, object], content)


def shards(folder: Folder, index: str) -> list[str]:
    """List the files that an index names; all must exist."""
    names = read_json(folder, index).get("weight_map")
    if not isinstance(names, dict):
        raise BadCheckpoint(f"{folder.name}/{index} has no weight_map")
    files = sorted({str(name) for name in cast(dict[str, object], names).values()})
    outside = [name for name in files if "/" in name or "\\" in name or name in ("", ".", "..")]
    if outside:
        raise BadCheckpoint(f"{folder.name}/{index} names a file outside of its folder: {outside[0]!r:.80}")
    missing = [name for name in files if name not in folder.sizes]
    if missing:
        raise BadCheckpoint(
            f"{folder.name} lacks {len(missing)} of {len(files)} shards ({', '.join(missing[:3])}); download it again"
        )
    return files


def check_sizes(name: str, config: Mapping[str, object], tensors: int) -> None:
    """Refuse, with `BadCheckpoint`, a config of more layers than tensors before any module is built."""
    for word, size in _sizes(config):
        if size > max(_MOST_LAYERS, tensors):
            raise BadCheckpoint(f"{name}: {word} of its config is {size}, with {tensors} tensors in its weights")


def _sizes(config: Mapping[Any, object]) -> Iterator[tuple[str, int]]:
    """Yield the module counts that a config and its nested configs ask for."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(cast(Mapping[Any, object], value))
        elif isinstance(name, str) and any(word in name for word in ("layer", "depth", "expert")):
            if isinstance(value, int):
                yield name, value
            elif isinstance(value, list | tuple):
                yield f"the length of {name}", len(cast(Sequence[object], value))


def as_float(value: Tensor) -> Tensor:
    """Convert to float32 on the CPU; float64 stays."""
    return value.to("cpu", torch.float64 if value.dtype == torch.float64 else torch.float32)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0][:300]


_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_LARGEST_HEADER: Final = 100_000_000  # the limit of the format


@dataclass(frozen=True, slots=True)
class _Entry:
    folder: Folder
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self, rows: tuple[int, int] | None) -> Tensor:
        shape, start, stop = self.shape, self.start, self.stop
        if self.dtype not in _DTYPES:
            raise BadCheckpoint(f"{self.folder.title(self.file)} holds {self.dtype} where numbers are expected")
        if rows is not None:
            width = (stop - start) // max(shape[0], 1)
            shape = (rows[1] - rows[0], *shape[1:])
            start, stop = start + rows[0] * width, start + rows[1] * width
        if start == stop:
            return torch.zeros(shape)
        return as_float(
            torch.frombuffer(self.folder.read(self.file, start, stop), dtype=_DTYPES[self.dtype]).view(shape)
        )


def safetensors_weights(folder: Folder, files: Sequence[str], config: Mapping[str, object]) -> Weights:
    """Open a model stored as safetensors; 8-bit floats are multiplied by their scales when read."""
    entries: dict[str, _Entry] = {}
    for name in files:
        entries |= _header(folder, name)

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        entry = entries[tensor]
        scales = (f"{tensor}_scale_inv", f"{tensor}_scale")  # both are factors, whatever the first is called
        scale = next((entries[name] for name in scales if name in entries), None)
        if scale is None or not entry.dtype.startswith("F8"):
            return entry.read(rows)
        value = _scaled(entry.read(None), scale.read(None), config)
        return value if rows is None else value[slice(*rows)]

    return Weights(
        folder.name,
        config,
        {name: entry.shape for name, entry in entries.items()},
        frozenset(name for name, entry in entries.items() if entry.dtype not in _DTYPES),
        read,
    )


def _header(folder: Folder, file: str) -> dict[str, _Entry]:
    """Read every tensor's entry, checked against the file's length."""
    title, size = folder.title(file), folder.sizes[file]
    if size < 8:
        raise BadCheckpoint(f"{title} is no safetensors file: it has {size} bytes")
    length = int.from_bytes(folder.read(file, 0, 8), "little")
    if length > min(_LARGEST_HEADER, size - 8):
        raise BadCheckpoint(f"{title} is truncated or no safetensors file: a header of {length} bytes in {size}")
    try:
        header = cast(dict[str, Any], json.loads(folder.read(file, 8, 8 + length)))
        entries = {
            name: _Entry(
                folder,
                file,
                str(item["dtype"]),
                _counts(item["shape"]),
                *(8 + length + at for at in _counts(item["data_offsets"])),
            )
            for name, item in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{title} has a damaged header: {error}") from error
    for name, entry in entries.items():
        if entry.stop > size or entry.start > entry.stop:
            raise BadCheckpoint(f"{title} is truncated: {name} ends at byte {entry.stop} of {size}")
        if entry.dtype in _DTYPES:
            expected = math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
            if entry.stop - entry.start != expected:
                raise BadCheckpoint(
                    f"{title} has a damaged header: {name} of shape {list(entry.shape)} takes {expected} bytes, "
                    f"not {entry.stop - entry.start}"
                )
    return entries


def _counts(values: object) -> tuple[int, ...]:
    counts = tuple(cast(Sequence[object], values))
    for count in counts:
        if type(count) is not int or count < 0:
            raise ValueError(f"expected sizes and offsets, got {count!r:.40}")
    return cast(tuple[int, ...], counts)


def _scaled(value: Tensor, scale: Tensor, config: Mapping[str, object]) -> Tensor:
    """Multiply 8-bit floats by their scales: one for all, one a row, or one a block."""
    if scale.numel() == 1:
        return value * scale.flatten()
    if scale.ndim != 2 or value.ndim != 2:
        raise BadCheckpoint(f"scales of shape {list(scale.shape)} for 8-bit weights of shape {list(value.shape)}")
    if scale.shape == (value.shape[0], 1):
        return value * scale
    said = config.get("quantization_config")
    blocks = cast(Mapping[str, Any], said).get("weight_block_size") if isinstance(said, Mapping) else None
    try:
        height, width = _counts(blocks or (128, 128))
    except (ValueError, TypeError) as error:
        raise BadCheckpoint(f"weight_block_size of the config must be two sizes, got {blocks!r:.80}") from error
    if not height or not width:
        raise BadCheckpoint(f"weight_block_size of the config must be two sizes above 0, got {blocks!r:.80}")
    if scale.shape != (math.ceil(value.shape[0] / height), math.ceil(value.shape[1] / width)):
        raise BadCheckpoint(
            f"scales of shape {list(scale.shape)} for 8-bit weights of shape {list(value.shape)} in blocks of "
            f"{height} x {width}"
        )
    spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return value * spread[: value.shape[0], : value.shape[1]]
