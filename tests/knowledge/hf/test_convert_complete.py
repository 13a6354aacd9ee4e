"""A conversion accounts for every matrix of a layer and checks itself; what it cannot take is refused whole."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.knowledge.hf.layer_forms import LinearLayer
from tests.models import outputs, tokens

SIZES = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24)).eval()


def test_what_would_be_left_out_refuses_the_model_and_it_is_as_it_was():
    model = llama()
    model.model.layers[0].adapter = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        af.UnsupportedArchitecture,
        match=r"model\.layers\.0\.adapter\.0 \(1 matrix\), model\.layers\.0\.adapter\.1 \(1 matrix\) .* 2 in all",
    ):
        af.knowledge.from_ffn(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model, "knowledge")
    ids = tokens(1, 5)
    partly = af.knowledge.from_ffn(model, partial=True)
    torch.testing.assert_close(outputs(partly, input_ids=ids), outputs(model, input_ids=ids), rtol=1e-5, atol=1e-6)
    assert partly.knowledge.num_entries == 48


def test_outputs_that_differ_are_refused(monkeypatch):
    model = llama()
    true = LinearLayer.entries
    monkeypatch.setattr(LinearLayer, "entries", lambda *args: true(*args).mul(1.01))
    with pytest.raises(af.UnsupportedArchitecture, match="was not converted exactly: outputs differ by"):
        af.knowledge.from_ffn(model)
    assert af.knowledge.from_ffn(model, check=False).knowledge.num_entries == 48


def test_layers_that_are_not_read_are_refused():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    with pytest.raises(af.UnsupportedArchitecture, match="does not read its feed-forward layers"):
        af.knowledge.from_ffn(model)
    assert af.knowledge.from_ffn(model, check=False).knowledge.num_entries == 48


def test_the_check_leaves_no_trace():
    model = llama().train()
    state = torch.get_rng_state()
    opened = af.knowledge.from_ffn(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert opened.training
    assert model.training
    assert torch.equal(opened.knowledge.entries, af.knowledge.from_ffn(model, check=False).knowledge.entries)


def test_a_model_that_does_not_run_says_how_to_go_on():
    model = llama()
    model.forward = lambda pixels: pixels
    with pytest.raises(ValueError, match=r"does not run on input_ids of the check .* pass check= named inputs"):
        af.knowledge.from_ffn(model)
    model = llama()
    assert af.knowledge.from_ffn(model, check={"inputs_embeds": torch.randn(1, 3, 16)}).knowledge.num_layers == 2
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="says nothing finite"):
        af.knowledge.from_ffn(model)
