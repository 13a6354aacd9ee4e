"""GGUF, the format of llama.cpp: read by the gguf package and dequantised on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from attnflow._core.errors import MissingExtra
from attnflow.models.weights.checkpoints.files import BadCheckpoint, Folder, Weights

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_MOST_PARTS: Final = 10_000_000  # of a header; the largest vocabularies take a quarter of them
_PERMUTED: Final = "llama"  # its converter reorders the rows of each head: llama.cpp rotates neighbours
_WORDS: Final = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "num_hidden_layers": "block_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def gguf_weights(folder: Folder, files: Sequence[str], _: Mapping[str, object]) -> Weights:
    """Open a model in a GGUF file, which brings its own config; rows that its converter reordered are put back."""
    try:
        from gguf import quants
    except ImportError as error:
        raise MissingExtra("gguf", "hf", "reading a GGUF file") from error
    path = folder.path / files[0]
    reader = _open(path)
    tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    for name, shape in shapes.items():
        if not shape or 0 in shape:
            raise BadCheckpoint(f"{path} has a damaged header: {name} of shape {list(shape)}")

    def stated(key: str) -> object:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = str(stated("general.architecture") or "")
    config: dict[str, object] = {"model_type": "gguf", "architecture": architecture}
    for word, key in _WORDS.items():
        if (value := stated(f"{architecture}.{key}")) is not None:
            config[word] = value

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        stored = tensors[tensor]
        heads = _permuted_heads(tensor, shapes[tensor][0], config) if architecture == _PERMUTED else 0
        data = stored.data if rows is None or heads else stored.data[slice(*rows)]
        try:
            plain = quants.dequantize(data, stored.tensor_type)
        except NotImplementedError as error:
            raise BadCheckpoint(
                f"{path}: {tensor} is in {stored.tensor_type.name}, which gguf cannot unpack"
            ) from error
        value = torch.from_numpy(np.array(plain, dtype=np.float32))  # a copy: the file is mapped read-only
        if not heads:
            return value
        value = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return value if rows is None else value[slice(*rows)]

    return Weights(str(path), config, shapes, frozenset(), read)


def _permuted_heads(tensor: str, rows: int, config: Mapping[str, object]) -> int:
    """Return the number of heads of a tensor with reordered rows; 0 for other tensors."""
    keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    word = keys.get(tensor.removesuffix(".weight").rpartition(".")[2])
    heads = config.get(word, config.get("num_attention_heads")) if word else None
    return heads if isinstance(heads, int) and heads > 0 and rows % (2 * heads) == 0 else 0


def _open(path: Path) -> GGUFReader:
    """Open a file whose header's parts lie inside it; gguf trusts lengths, and would read past the end for ever."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        parts = 0

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise BadCheckpoint(f"{path} is truncated: it ends at byte {len(self.data)}, not {end}")
            self.parts += 1
            if self.parts > _MOST_PARTS:
                raise BadCheckpoint(f"{path} has a damaged header: it has more than {_MOST_PARTS:,} parts")
            return cast(Any, super())._get(offset, dtype, count, override_order)

    try:
        reader = Reader(path)
    except (BadCheckpoint, MemoryError):
        raise
    except Exception as error:  # a damaged header fails anywhere in the reader, with any class of error
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BadCheckpoint(f"{path} is not a GGUF file") from error
        raise BadCheckpoint(f"{path} has a damaged header: {type(error).__name__}: {error}") from error
    if reader.byte_order != "I":
        raise BadCheckpoint(f"{path} is a GGUF file for machines of the other byte order, which is not read")
    return reader
