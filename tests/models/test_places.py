"""Queries and keys that no registry knows, by a probe: against what unit vectors show, and what the geometry does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnflow as af
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.score import score
from attnflow.models.weights.attention import attention_layers
from attnflow.models.weights.families.rows import Composed, Selected
from tests.conformance import inputs, oracles
from tests.conformance.miniature import Architecture, build, shrink

DECODERS = {
    "Gemma4ForCausalLM": "gemma4_text",  # layers of different widths
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",  # of different numbers of heads
    "Phi4MultimodalForCausalLM": "phi4_multimodal",  # one projection for all
    "MoshiForCausalLM": "moshi",  # a linear map in a wrapper
    "KimiLinearForCausalLM": "kimi_linear",  # latent, beside recurrent layers
    "DeepseekV32ForCausalLM": "deepseek_v32",  # latent, beside an indexer
    "DeepseekV4ForCausalLM": "deepseek_v4",  # keys that are the values
    "ZambaForCausalLM": "zamba",  # layers that share their weights
    "LongcatFlashForCausalLM": "longcat_flash",  # a factor on a part of the keys
    "AXK2ForCausalLM": "axk2",  # queries of two copies of a latent
    "T5Gemma2ForConditionalGeneration": "t5gemma2",  # self- and cross-attention in one softmax
}


def miniature(name: str, model_type: str = ""):
    return build(Architecture(model_type or DECODERS[name], name, "decoder"))


def forms(query: Tensor, key: Tensor) -> Tensor:
    """[heads, width, width] of [width, heads, dim], up to one factor for all heads."""
    form = torch.einsum("ihc,jhc->hij", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1)).double()
    return form / form.norm()


def heads(weight: Tensor, count: int) -> Tensor:
    return weight.detach().unflatten(0, (count, -1)).permute(2, 0, 1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "KimiLinearForCausalLM" else ()) for name in DECODERS],
)
def test_it_reads_what_unit_vectors_show(name):
    model = miniature(name)
    layers = {layer.name: layer for layer in attention_layers(model)}
    shown = oracles.queries_and_keys(model, inputs.text(model))
    assert shown
    assert set(shown) <= set(layers)
    for path, (query, key) in shown.items():
        layer = layers[path]
        assert not layer.discovered
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (*query.shape[1:2], *key.shape[1:])
        ours = forms(heads(layer.query(), layer.num_heads), heads(layer.key(), layer.num_kv_heads))
        torch.testing.assert_close(ours, forms(query, key), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_every_precision_it_sees_the_same_rows(dtype):
    model = miniature("LongcatFlashForCausalLM").to(dtype)
    expected = miniature("LongcatFlashForCausalLM")
    for ours, theirs in zip(attention_layers(model), attention_layers(expected), strict=True):
        tolerance = {"rtol": 0, "atol": 64 * torch.finfo(dtype).eps} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(ours.query().to(theirs.query()), theirs.query(), **tolerance)
        torch.testing.assert_close(ours.key().to(theirs.key()), theirs.key(), **tolerance)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("Qwen3_5ForConditionalGeneration", "qwen3_5"), ("Glm4vForConditionalGeneration", "glm4v")],
)
def test_a_vision_tower_is_called_alone_and_named_apart(name, model_type):
    model = miniature(name, model_type)
    layers = [layer for layer in attention_layers(model) if layer.tower == "vision"]
    assert {layer.tower for layer in attention_layers(model)} == {"text", "vision"}
    assert [layer.layer for layer in layers] == [0, 1]
    for layer in layers:
        weight = model.get_submodule(layer.name).qkv.weight
        width = weight.shape[1]
        assert torch.equal(layer.query(), weight[:width])
        assert torch.equal(layer.key(), weight[width : 2 * width])
        assert not layer.discovered
    assert {row.tower for row in score(model)} == {"text", "vision"}
    assert score(model, fold=False).notes == ()


def test_tokens_of_a_tower_are_told_from_its_heads():
    model = miniature("Lfm3VlForConditionalGeneration", "lfm3_vl")  # takes [tokens, width]: no batch
    (layer,) = [layer for layer in attention_layers(model) if layer.tower == "vision"]
    assert torch.equal(layer.query(), model.get_submodule(layer.name).q_proj.weight)
    assert torch.equal(layer.key(), model.get_submodule(layer.name).k_proj.weight)
    assert (layer.num_heads, layer.num_kv_heads) == (4, 2)


def test_layers_that_attend_to_the_keys_of_an_earlier_one_have_its_weights():
    config = shrink(miniature("Gemma4ForCausalLM").config, narrow=True).to_dict()
    kinds = ["sliding_attention", "full_attention"] * 2
    config |= {"num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 2, "per_layer_config": None}
    cls = type(miniature("Gemma4ForCausalLM"))
    model = cls(cls.config_class(**{k: v for k, v in config.items() if v is not None})).eval()
    layers = attention_layers(model)
    for sharing, own in ((2, 0), (3, 1)):
        assert torch.equal(layers[sharing].key(), layers[own].key())
        assert torch.equal(layers[sharing].query(), model.model.layers[sharing].self_attn.q_proj.weight)


@pytest.mark.parametrize(
    ("name", "model_type", "why"),
    [
        ("JetMoeForCausalLM", "jetmoe", "mixtures of what its submodules put out"),
        ("ZayaForCausalLM", "zaya", "mixtures of what its submodules put out"),
        ("MambaForCausalLM", "mamba", "no queries and keys that are known"),
        ("FNetForMaskedLM", "fnet", "no queries and keys that are known"),
    ],
)
def test_what_is_no_linear_function_is_refused(name, model_type, why):
    with pytest.raises(UnsupportedArchitecture, match=why):
        score(miniature(name, model_type))


def test_what_cannot_be_run_is_read_by_its_names_and_says_so():
    layers = attention_layers(miniature("Llama4ForConditionalGeneration", "llama4"))
    assert {layer.tower: layer.discovered for layer in layers} == {"text": False, "vision": True}


def test_a_loss_probes_once_until_the_weights_are_others():
    model = miniature("MoshiForCausalLM").train()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    first = af.geometry.penalty(model)
    assert af.geometry.penalty(model) == first
    assert len(calls) == 1
    projection = model.model.layers[0].self_attn.q_proj
    weight = projection.linear.weight.detach()
    projection.linear.weight = torch.nn.Parameter(weight + torch.randn_like(weight))
    assert af.geometry.penalty(model) != first
    assert len(calls) == 2


def test_rows_are_written_where_they_are_read():
    model = miniature("Phi4MultimodalForCausalLM")
    for layer in attention_layers(model):
        assert isinstance(layer.query_rows, Selected)
        query, key = torch.randn_like(layer.query()), torch.randn_like(layer.key())
        layer.write(query, key)
        assert torch.equal(layer.query(), query)
        assert torch.equal(layer.key(), key)
    af.geometry.init_symmetric_(model)
    assert all(row.symmetry == pytest.approx(1, abs=1e-6) for row in score(model))
    af.geometry.init_skew_(model)
    assert all(row.symmetry == pytest.approx(-1, abs=1e-6) for row in score(model))


def test_products_are_penalised_and_monitored_but_not_written():
    model = miniature("DeepseekV32ForCausalLM")
    layers = attention_layers(model)
    assert all(isinstance(layer.query_rows, Composed) for layer in layers)
    af.geometry.penalty(model).backward()
    for layer in layers:
        assert all(parameter.grad.norm() > 0 for parameter in layer.parameters.values())
    with af.geometry.monitor(model, every=1) as handle:
        handle.step()
    assert [row.symmetry for row in handle.scores] == [row.symmetry for row in score(model, per_head=False, fold=False)]
    with pytest.raises(UnsupportedArchitecture, match="products of several weights"):
        af.geometry.init_symmetric_(model)
