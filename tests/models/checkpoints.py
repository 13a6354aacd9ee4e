"""Checkpoints written for the tests of reading, and the comparison with the model that they were written from."""

from __future__ import annotations

import gguf
import torch
from safetensors.torch import load_file, save_file

from attnflow.geometry.score import query_keys
from attnflow.models.attention import attention_layers


def same_weights(source, model, tolerance=0.0, **options):
    found, expected = list(query_keys(source, "all", **options)), attention_layers(model)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.layer, ours.kind, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
            theirs.layer, theirs.kind, theirs.num_heads, theirs.num_kv_heads, theirs.head_dim,
        )  # fmt: skip
        for one, other in ((ours.query(), theirs.query()), (ours.key(), theirs.key())):
            assert one.dtype == torch.float32
            assert (one - other).abs().max().item() <= tolerance


def repack(folder, change):
    """Rewrite the safetensors file of a folder with what `change` makes of its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors) or tensors, file)


def write_gguf(path, architecture, tensors, heads=4, kv_heads=2, kind=gguf.GGMLQuantizationType.F32, **more):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(5000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_array("some.short.list", [1, 2, 3])
    writer.add_bool("some.flag", True)
    for name, value in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(value.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
