"""Checkpoints written for the tests of reading, and the comparison with the model that they were written from."""

from __future__ import annotations

import gguf
import torch
from safetensors.torch import load_file, save_file

from attnflow.geometry.score import layers_of
from attnflow.models.weights.attention import attention_layers


def same_weights(source, model, tolerance=0.0, **options):
    found, expected = layers_of(source, "all", **options)[1], attention_layers(model)
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
    save_file(change(tensors) or tensors, file, {"format": "pt"})


def blocks_of(model, turned=lambda weight, heads: weight):
    """Queries and keys under llama.cpp's names, their rows turned as a converter does."""
    return {
        f"blk.{live.layer}.attn_{name}.weight": turned(weight().detach(), heads).contiguous()
        for live in attention_layers(model)
        for name, weight, heads in (("q", live.query, live.num_heads), ("k", live.key, live.num_kv_heads))
    }


def write_gguf(path, architecture, tensors, heads=4, kv_heads=2, kind=gguf.GGMLQuantizationType.F32, **stated):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    for name, value in ({"block_count": 2} | stated).items():
        getattr(writer, f"add_{name}")(value)
    if not stated:  # a vocabulary of more tokens than are read
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


def write_llama(path, seed=0, without=()):
    """A whole Llama of one layer, width 32 and 16 tokens, as llama.cpp's converter writes it."""
    generator = torch.Generator().manual_seed(seed)
    maps = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 32, "ffn_up": 32, "ffn_down": 32}
    shapes = {"token_embd": (16, 32), "output": (16, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": (rows, 32) for name, rows in maps.items()}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors = {name: value for name, value in tensors.items() if not without or without not in name}
    sizes = {"context_length": 64, "embedding_length": 32, "feed_forward_length": 32, "vocab_size": 16}
    return write_gguf(path, "llama", tensors, block_count=1, layer_norm_rms_eps=1e-5, **sizes)
