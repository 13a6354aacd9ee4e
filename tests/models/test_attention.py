"""Queries and keys of a model in memory: read with gradients, and written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from attnflow.geometry.score import score
from attnflow.models.weights.attention import attention_layers
from tests.geometry.usage import used_form
from tests.models import ZOO

_LINEAR_FIRST = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LAYOUTS = ["Llama", "GPT2", "GPT2Cross", "GPTNeoX", "Phi3", "FalconGrouped", "CodeGen", "Qwen3Next", "Albert", "Swin"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_is_read_and_nothing_else_changes(name):
    model = ZOO[name].build()
    for live in attention_layers(model):
        query, key = torch.randn_like(live.query()), torch.randn_like(live.key())
        marked = {name: torch.full_like(p, torch.nan) for name, p in live.parameters.items()}
        before = {name: p.detach().clone() for name, p in live.parameters.items()}
        live.write(query, key)
        assert torch.equal(live.query(), query)
        assert torch.equal(live.key(), key)
        changed = sum(int((p != before[name]).sum()) for name, p in live.parameters.items())
        assert changed == query.numel() + key.numel() <= sum(p.numel() for p in marked.values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_reach_the_parameters_in_their_place(name):
    model = ZOO[name].build()
    for live in attention_layers(model):
        (live.query().square().sum() / 2 + live.key().square().sum() / 2).backward()
        for parameter in live.parameters.values():
            taken = parameter.grad != 0
            assert torch.equal(parameter.grad[taken], parameter.detach()[taken])
        used = sum(int((p.grad != 0).sum()) for p in live.parameters.values())
        assert used == live.query().numel() + live.key().numel()
        model.zero_grad()


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize(("name", "module"), [("Llama", modeling_llama), ("Qwen3", modeling_qwen3)])
def test_sines_may_come_before_cosines(name, module, scaling, monkeypatch):
    """As in GPT-J and CodeGen, from transformers 5.24 on."""
    model, apply = ZOO[name].build(), module.apply_rotary_pos_emb
    plain = attention_layers(model)[0]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, sin, cos, **other: apply(q, k, cos, sin, **other))
    rotation = model.model.rotary_emb
    rotation.attention_scaling = scaling
    rotation.register_forward_hook(lambda _, __, output: output[::-1])
    read = attention_layers(model)[0]
    assert torch.equal(read.query(), plain.query())
    assert torch.equal(read.key(), plain.key())


@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_one_run_of_rows_is_a_view(name):
    live = attention_layers(ZOO[name].build())[0]
    parameters = {p.data_ptr() for p in live.parameters.values()}
    assert live.query().untyped_storage().data_ptr() in parameters
    assert live.key().untyped_storage().data_ptr() in parameters


def test_torch_has_attention_of_its_own():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).double().train()  # in evaluation it may skip the functions that are seen
    places = attention_layers(model)
    assert [(live.layer, live.kind) for live in places] == [(0, "self"), (1, "self"), (0, "cross"), (1, "cross")]
    for live in places:
        nn.init.normal_(live.parameters[live.query_rows.tensor])
        used = used_form(
            model,
            live.name,
            lambda batch: model(torch.zeros(batch, 3, 16).double(), torch.zeros(batch, 3, 16).double()),
            16,
        )
        query = live.query().detach().unflatten(0, (4, -1))
        form = query.mT @ live.key().detach().unflatten(0, (4, -1))
        assert torch.allclose(used / used.norm(), form / form.norm(), atol=1e-12)
        assert not live.discovered


def test_attention_between_different_widths_has_no_symmetry():
    model = nn.Module()
    model.attention = nn.MultiheadAttention(16, 4, kdim=24, vdim=24)
    scores = score(model)
    assert scores.matrices[0].flags[0] == "not square"
    assert scores.matrices[0].norm > 0


def test_layers_keep_their_numbers_in_hybrid_models():
    assert [live.layer for live in attention_layers(ZOO["Jamba"].build())] == [1]
    hybrid = replace(ZOO["Qwen3Next"], options={**ZOO["Qwen3Next"].options, **_LINEAR_FIRST})
    assert [live.layer for live in attention_layers(hybrid.build())] == [1]
    assert [live.layer for live in attention_layers(ZOO["Swin"].build())] == [0, 1, 2]
    swin = attention_layers(ZOO["Swin"].build())
    assert [live.num_heads for live in swin] == [2, 4, 4]


def test_towers_are_told_apart():
    def towers(name):
        return list(dict.fromkeys((live.tower, live.kind) for live in attention_layers(ZOO[name].build())))

    assert towers("Bart") == [("encoder", "self"), ("decoder", "self"), ("decoder", "cross")]
    assert towers("CLIP") == [("text", "self"), ("vision", "self")]
    assert towers("Llava") == [("text", "self"), ("vision", "self")]
    assert towers("VisionEncoderDecoder") == [("encoder", "self"), ("decoder", "self"), ("decoder", "cross")]
    assert towers("GPT2Cross") == [("", "self"), ("", "cross")]
    assert towers("Whisper") == towers("Bart") == towers("SpeechT5")


def test_shared_layers_are_scored_once_and_the_result_says_so():
    scores = score(ZOO["Albert"].build(), per_head=False)
    assert len(scores.matrices) == 1
    assert "share their weights" in scores.notes[0]
