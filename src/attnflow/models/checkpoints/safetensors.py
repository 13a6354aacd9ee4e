"""Safetensors, in one file or in shards: reads the header, then only the byte ranges of requested tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.models.checkpoints.files import BadCheckpoint, Folder, Weights, as_float

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
