"""Safetensors, in one file or in shards: the header is read, then the ranges of the tensors that are asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.models.checkpoints.files import BadCheckpoint, File, Folder, shards_of
from attnflow.models.checkpoints.weights import Weights, as_float

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_LARGEST_HEADER: Final = 100_000_000  # the limit of the format
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Entry:
    file: File
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsWeights(Weights):
    """A model stored as safetensors.

    Args:
        folder: where the files are.
        files: names of the files; with shards, all of them.
        config: what config.json says.
    """

    def __init__(self, folder: Folder, files: Sequence[str], config: Mapping[str, object]) -> None:
        self.name = folder.name
        self.config = config
        self._entries: dict[str, _Entry] = {}
        for name in files:
            self._entries.update(_header(folder.file(name)))
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}
        self.packed = frozenset(name for name, entry in self._entries.items() if entry.dtype not in _DTYPES)

    def read(self, tensor: str, rows: tuple[int, int] | None) -> Tensor:
        """A tensor, or a run of its rows, in float32; 8-bit floats are multiplied by their scales."""
        entry = self._entries[tensor]
        scale = self._scale(tensor) if entry.dtype.startswith("F8") else None
        if scale is not None:
            value = _scaled(self._raw(entry, None), scale, self.config)
            return value if rows is None else value[slice(*rows)]
        return self._raw(entry, rows)

    def _raw(self, entry: _Entry, rows: tuple[int, int] | None) -> Tensor:
        shape, start, stop = entry.shape, entry.start, entry.stop
        if rows is not None:
            width = (stop - start) // shape[0]
            shape = (rows[1] - rows[0], *shape[1:])
            start, stop = start + rows[0] * width, start + rows[1] * width
        return as_float(torch.frombuffer(entry.file.read(start, stop), dtype=_DTYPES[entry.dtype]).view(shape))

    def _scale(self, tensor: str) -> Tensor | None:
        for name in (f"{tensor}_scale_inv", f"{tensor}_scale"):  # both are factors, whatever the first is called
            if name in self._entries:
                return self._raw(self._entries[name], None)
        return None


def find_safetensors(folder: Folder) -> list[str]:
    """The files that hold the model: the shards of the index, or the one file; empty if there are none.

    Raises:
        BadCheckpoint: a shard is missing, or which of several files holds the model is not clear.
    """
    there = [name for name in folder.files if name.endswith(".safetensors")]
    index = next((name for name in folder.files if name.endswith(".safetensors.index.json")), None)
    if _INDEX in folder.files:
        index = _INDEX
    if index is not None and (len(there) != 1 or there[0] != "model.safetensors"):
        return shards_of(folder, index)
    if "model.safetensors" in there:
        return ["model.safetensors"]
    there = [name for name in there if not name.startswith("adapter_")]
    if len(there) > 1:
        raise BadCheckpoint(f"{folder.name} holds {len(there)} safetensors files and no index; pass one of them")
    return there


def _header(file: File) -> dict[str, _Entry]:
    """Every tensor of a file, its place checked against the file's length."""
    if file.size < 8:
        raise BadCheckpoint(f"{file.name} is no safetensors file: it has {file.size} bytes")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(_LARGEST_HEADER, file.size - 8):
        raise BadCheckpoint(
            f"{file.name} is truncated or no safetensors file: a header of {length} bytes in {file.size}"
        )
    try:
        header = cast(dict[str, Any], json.loads(file.read(8, 8 + length)))
        entries = {
            name: _Entry(
                file, str(item["dtype"]), tuple(item["shape"]), *(8 + length + at for at in item["data_offsets"])
            )
            for name, item in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{file.name} has a damaged header: {error}") from error
    for name, entry in entries.items():
        if entry.stop > file.size or entry.start > entry.stop:
            raise BadCheckpoint(f"{file.name} is truncated: {name} ends at byte {entry.stop} of {file.size}")
        if entry.dtype in _DTYPES:
            expected = math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
            if entry.stop - entry.start != expected:
                raise BadCheckpoint(
                    f"{file.name} has a damaged header: {name} of shape {list(entry.shape)} takes {expected} bytes, "
                    f"not {entry.stop - entry.start}"
                )
    return entries


def _scaled(value: Tensor, scale: Tensor, config: Mapping[str, object]) -> Tensor:
    """8-bit floats times their scales: one for all, one a row, or one for each block."""
    if scale.numel() == 1:
        return value * scale.flatten()
    if scale.ndim != 2 or value.ndim != 2:
        raise BadCheckpoint(f"scales of shape {list(scale.shape)} for 8-bit weights of shape {list(value.shape)}")
    if scale.shape == (value.shape[0], 1):
        return value * scale
    said = config.get("quantization_config")
    blocks = cast(Mapping[str, Any], said).get("weight_block_size") if isinstance(said, Mapping) else None
    height, width = cast(Sequence[int], blocks or (128, 128))
    if scale.shape != (math.ceil(value.shape[0] / height), math.ceil(value.shape[1] / width)):
        raise BadCheckpoint(
            f"scales of shape {list(scale.shape)} for 8-bit weights of shape {list(value.shape)} in blocks of "
            f"{height} x {width}"
        )
    spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return value * spread[: value.shape[0], : value.shape[1]]
