"""Every format gives the weights of the model that it was written from."""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from safetensors.torch import save_file

from attnflow.geometry.score import score
from attnflow.models.weights.attention import attention_layers
from tests.models import ZOO
from tests.models.checkpoints import blocks_of, repack, same_weights, write_gguf


def test_safetensors_shards_and_a_model_in_memory(llama, tmp_path):
    model, folder = llama
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    for source in (folder, folder / "model.safetensors", str(folder), tmp_path / "shards", model):
        same_weights(source, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(llama, tmp_path, dtype):
    model, _ = llama
    half = model.to(dtype)
    half.save_pretrained(tmp_path / "half")
    same_weights(tmp_path / "half", half)
    same_weights(half, half)


@pytest.mark.parametrize("blocks", ["tensor", "row", "block", "none"])
def test_eight_bit_floats_are_multiplied_by_their_scales(llama, blocks):
    model, folder = llama
    (folder / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "quantization_config": {"weight_block_size": [24, 20]}})
    )

    def packed(tensors):
        for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
            weight = tensors[name]
            scale = {
                "tensor": weight.abs().amax() / 400,
                "row": weight.abs().amax(1, keepdim=True) / 400,
                "block": torch.rand(-(-weight.shape[0] // 24), 2) / 100 + 0.01,
                "none": torch.tensor(1.0),
            }[blocks]
            spread = scale
            if blocks == "block":
                spread = scale.repeat_interleave(24, 0).repeat_interleave(20, 1)[: weight.shape[0], :32]
            tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
            weights = dict(model.named_parameters())
            weights[name].data = tensors[name].float() * spread
            if blocks != "none":
                tensors[f"{name}_scale" if blocks == "row" else f"{name}_scale_inv"] = scale

    repack(folder, packed)
    same_weights(folder, model, 1e-6)


@pytest.mark.parametrize("prefix", ["", "model.", "base_model.model."])
def test_prefixes_of_names_do_not_matter(llama, prefix):
    model, folder = llama
    repack(folder, lambda tensors: {prefix + name.removeprefix("model."): value for name, value in tensors.items()})
    same_weights(folder, model)


def test_mobilellm_is_laid_out_as_llama(llama):
    model, folder = llama
    config = {**json.loads((folder / "config.json").read_text()), "model_type": "mobilellm"}
    (folder / "config.json").write_text(json.dumps(config))
    same_weights(folder, model)
    assert not score(folder, fold=False).notes


def as_llama_cpp(weight, heads):
    """The rows of each head from halves to neighbouring pairs, as llama.cpp's converter does."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(("kind", "error"), [("F32", 0), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_1", 0.2)])
def test_gguf_is_unpacked_and_its_rows_put_back(llama, tmp_path, kind, error):
    model, _ = llama
    file = write_gguf(
        tmp_path / "m.gguf", "llama", blocks_of(model, as_llama_cpp), kind=gguf.GGMLQuantizationType[kind]
    )
    same_weights(file, model, error)
    same_weights(tmp_path, model, error)
    assert not score(file, fold=False).notes


def test_gguf_of_other_architectures_keeps_its_rows(llama, tmp_path):
    model, _ = llama
    same_weights(write_gguf(tmp_path / "m.gguf", "qwen2", blocks_of(model)), model)
    fused = ZOO["Phi3"].build().float()
    weights = {
        f"blk.{index}.attn_qkv.weight": layer.self_attn.qkv_proj.weight.detach()
        for index, layer in enumerate(fused.model.layers)
    }
    same_weights(write_gguf(tmp_path / "fused.gguf", "phi3", weights), fused)


def test_gguf_of_an_encoder_and_a_decoder(tmp_path):
    model = ZOO["T5"].build().float()
    words = {("encoder", "self"): "enc.blk.{}.attn", ("decoder", "self"): "dec.blk.{}.attn"}
    words["decoder", "cross"] = "dec.blk.{}.cross_attn"
    tensors = {}
    for live in attention_layers(model):
        stem = words[live.tower, live.kind].format(live.layer)
        tensors[f"{stem}_q.weight"], tensors[f"{stem}_k.weight"] = live.query().detach(), live.key().detach()
    file = write_gguf(tmp_path / "m.gguf", "t5", tensors, kv_heads=4)
    same_weights(file, model)
    assert {(row.tower, row.kind) for row in score(file, attention="all")} == set(words)


def test_defaults_of_the_family_are_filled_in(tmp_path):
    """Released configs of models with two towers name no heads where these are the default."""
    kinds = {"text_config": "siglip_text_model", "vision_config": "siglip_vision_model"}
    config = {
        "model_type": "siglip",
        **{part: {"model_type": kind, "num_hidden_layers": 1} for part, kind in kinds.items()},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    stem = "{}_model.encoder.layers.0.self_attn.{}_proj.weight"
    save_file(
        {stem.format(t, p): torch.randn(768, 768) for t in ("text", "vision") for p in "qk"}, tmp_path / "a.safetensors"
    )
    scores = score(tmp_path, fold=False)
    assert [(row.tower, row.head) for row in scores if row.head in ("all", 11)] == [
        ("text", "all"), ("text", 11), ("vision", "all"), ("vision", 11),
    ]  # fmt: skip
    assert not scores.notes
