"""GGUF: the header is parsed, and the tensors that are asked for are read and dequantised."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from attnflow._core.errors import MissingExtra
from attnflow.models.checkpoints.files import BadCheckpoint, File, Folder
from attnflow.models.checkpoints.weights import Weights

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_LONGEST_LIST: Final = 4096  # longer ones are vocabularies, which are passed over
_DEEPEST: Final = 4  # lists in lists; writers make none
_LARGEST_COUNT: Final = 10**7
_CHUNK: Final = 1 << 20
# Converters for these reorder the rows of each head from halves to pairs, since llama.cpp rotates neighbours.
_PERMUTED: Final = frozenset({"llama"})
_WORDS: Final = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "num_hidden_layers": "block_count",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]
    kind: int
    start: int


def gguf_weights(folder: Folder, files: Sequence[str], _: Mapping[str, object]) -> Weights:
    """A model in a GGUF file of llama.cpp, which brings its own config.

    In files of the llama architecture, the converter has reordered the rows inside every head, of queries and keys
    alike; the order of the original is restored. (Scores are the same either way.)
    """
    try:
        from gguf import constants, quants
    except ImportError as error:
        raise MissingExtra("gguf", "hf", "reading a GGUF file") from error
    [file] = map(folder.file, files)
    metadata, entries, data_start = _parse(file)
    kinds = cast(Mapping[int, tuple[int, int]], constants.GGML_QUANT_SIZES)
    architecture = str(metadata.get("general.architecture", ""))
    named = {word: f"{architecture}.{key}" for word, key in _WORDS.items()}
    config = {
        "model_type": "gguf",
        "architecture": architecture,
        **{word: metadata[key] for word, key in named.items() if key in metadata},
    }

    def size_of(shape: tuple[int, ...], kind: int) -> int:
        block, size = kinds[kind]
        return math.prod(shape) // block * size

    for name, entry in entries.items():
        if not entry.shape or (entry.kind in kinds and entry.shape[-1] % kinds[entry.kind][0]):
            raise BadCheckpoint(f"{file.name} has a damaged header: {name} of shape {list(entry.shape)}")
    packed = frozenset(name for name, entry in entries.items() if entry.kind not in kinds)
    for name, entry in entries.items():
        stop = 0 if name in packed else data_start + entry.start + size_of(entry.shape, entry.kind)
        if stop > file.size:
            raise BadCheckpoint(f"{file.name} is truncated: {name} ends at byte {stop} of {file.size}")

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        entry = entries[tensor]
        first, last = rows or (0, entry.shape[0])
        width = size_of((entry.shape[-1],), entry.kind)
        start = data_start + entry.start
        data = np.frombuffer(file.read(start + first * width, start + last * width), dtype=np.uint8)
        kind = constants.GGMLQuantizationType(entry.kind)
        if first == last or not width:
            return torch.zeros(last - first, *entry.shape[1:])
        try:
            plain = quants.dequantize(data.reshape(last - first, width), kind)
        except NotImplementedError as error:
            raise BadCheckpoint(f"{file.name}: {tensor} is in {kind.name}, which gguf cannot unpack") from error
        value = torch.from_numpy(np.ascontiguousarray(plain, dtype=np.float32))
        return _unpermuted(tensor, value, config) if architecture in _PERMUTED and rows is None else value

    return Weights(file.name, config, {name: entry.shape for name, entry in entries.items()}, packed, read)


def _unpermuted(tensor: str, value: Tensor, config: Mapping[str, object]) -> Tensor:
    keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    word = keys.get(tensor.removesuffix(".weight").rpartition(".")[2])
    heads = config.get(word, config.get("num_attention_heads")) if word else None
    if not isinstance(heads, int) or heads < 1 or value.shape[0] % (2 * heads):
        return value
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


class _Header(NamedTuple):
    metadata: dict[str, object]
    entries: dict[str, _Entry]
    start: int


def _parse(file: File) -> _Header:
    """Metadata, tensors and where their data begins."""
    cursor = _Cursor(file)
    if bytes(cursor.take(4)) != b"GGUF":
        raise BadCheckpoint(f"{file.name} is no GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        raise BadCheckpoint(f"{file.name} is GGUF of version {version}; versions 2 and 3 (little endian) are read")
    tensors, pairs = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(pairs):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    entries: dict[str, _Entry] = {}
    for _ in range(tensors):
        name = cursor.text()
        sizes = [cursor.count() for _ in range(cursor.number("I"))]
        entries[name] = _Entry(tuple(reversed(sizes)), int(cursor.number("I")), int(cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    step = alignment if isinstance(alignment, int) and alignment > 0 else 32
    return _Header(metadata, entries, -(-cursor.at // step) * step)


class _Cursor:
    """Reads a header from front to back, a chunk of the file at a time."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._buffer = bytearray()
        self._offset = 0  # of the buffer in the file
        self.at = 0

    def take(self, count: int) -> memoryview:
        if self.at + count > self._file.size:
            raise BadCheckpoint(f"{self._file.name} is truncated inside its header")
        if self.at + count > self._offset + len(self._buffer):
            self._offset = self.at
            self._buffer = self._file.read(self.at, min(self.at + max(count, _CHUNK), self._file.size))
        data = memoryview(self._buffer)[self.at - self._offset :][:count]
        self.at += count
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        value = int(self.number("Q"))
        if value > max(_LARGEST_COUNT, self._file.size):
            raise BadCheckpoint(f"{self._file.name} has a damaged header: it counts {value} things")
        return value

    def text(self) -> str:
        return bytes(self.take(self.count())).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> object:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise BadCheckpoint(f"{self._file.name} has a damaged header: a value of kind {kind}")
        if depth == _DEEPEST:
            raise BadCheckpoint(f"{self._file.name} has a damaged header: lists in lists, {_DEEPEST} deep")
        inner, length = int(self.number("I")), self.count()
        if inner in _SCALARS and length > _LONGEST_LIST:
            self.take(length * struct.calcsize("<" + _SCALARS[inner]))
            return None
        if inner == _STRING and length > _LONGEST_LIST:
            for _ in range(length):
                self.take(self.count())
            return None
        return [self.value(inner, depth + 1) for _ in range(length)]
