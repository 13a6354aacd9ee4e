"""The handle of a bias: what it says, switches, takes away, and how it is reached again."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attnflow as af
from attnflow.models.subject import Loaded
from tests.bias.hf.common import (
    EVERY_OTHER_KIND,
    GUIDANCE,
    biased,
    disabled,
    disturb,
    family,
    handle_of,
    outputs,
    same_state,
    tokens,
)


def test_it_prints_switches_and_takes_away():
    model, ids = family("Llama"), tokens(2, 7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with torch.no_grad():
        plain = outputs(model, input_ids=ids)
        with af.bias.attach(model, GUIDANCE, train="guidance") as handle:
            assert str(handle).startswith("bias on 2 of 2 attention layers: ")
            assert repr(handle) == "<BiasHandle on LlamaForCausalLM>"
            assert list(handle.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
            assert handle.num_parameters == handle.num_trained == sum(p.numel() for p in handle.parameters())
            disturb(model)
            moved = outputs(model, input_ids=ids)
            assert not torch.equal(moved, plain)
            assert handle.enabled
            handle.enabled = False
            assert not handle.enabled
            assert torch.equal(outputs(model, input_ids=ids), plain)
            handle.enabled = True
            assert torch.equal(outputs(model, input_ids=ids), moved)
            assert handle.active
        assert torch.equal(outputs(model, input_ids=ids), plain)
    assert same_state(model, before)
    assert model.config._attn_implementation == implementation
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not handle.active
    assert not handle.enabled
    handle.remove()
    assert str(handle).endswith("(removed)")
    with pytest.raises(RuntimeError, match="this bias was removed: attach it again"):
        handle.enabled = True
    with pytest.raises(RuntimeError, match="was removed; attach again"), handle:
        pass


def test_the_model_keeps_it_through_wrappers_copies_and_pickles():
    model, ids = biased("Llama", (*GUIDANCE, *EVERY_OTHER_KIND)), tokens(1, 5)
    handle = handle_of(model)
    assert handle_of(torch.nn.Sequential(model)) is handle
    buffer = io.BytesIO(pickle.dumps(model))
    for other in (copy.deepcopy(model), pickle.load(buffer)):
        own = handle_of(other)
        assert own is not handle
        assert own.model is other
        with torch.no_grad():
            moved = outputs(model, input_ids=ids)
            assert torch.equal(outputs(other, input_ids=ids), moved)
            with disabled(model):
                assert torch.equal(outputs(other, input_ids=ids), moved)
            own.remove()
            base = {name: value for name, value in model.state_dict().items() if ".score_terms." not in name}
            assert same_state(other, base), "its own hooks are gone"
            assert not torch.equal(outputs(other, input_ids=ids), moved)
            assert torch.equal(outputs(model, input_ids=ids), moved), "the first model is untouched"
    assert handle.active


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_that_looks_at_its_mask_stays_causal(implementation):
    """Doge works with the mask that it is given, and drops what it does not know: a bias acts on its own mask."""
    model, ids = family("Doge", torch.float32), tokens(1, 10)
    model.set_attn_implementation(implementation)
    changed = ids.clone()
    changed[0, 6:] = (changed[0, 6:] + 7) % 50
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        af.bias.attach(model, GUIDANCE)
        torch.testing.assert_close(model(ids, use_cache=False).logits, plain)
        disturb(model)
        moved = model(ids, use_cache=False).logits
        assert (moved - plain).abs().max() > 1e-3
        torch.testing.assert_close(model(changed, use_cache=False).logits[:, :6], moved[:, :6])


def test_parameters_of_the_paper_on_the_meta_device():
    """daa, sec. 4: 8.4 M parameters on LLaMA-2-7B."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008))
    handle = af.bias.attach(model)
    assert handle.num_parameters == 8_392_720
    assert (len(handle.layers), set(handle.layers.values())) == (16, {524_545})
    assert str(handle) == (
        "bias on 16 of 32 attention layers: 8,392,720 parameters (0.12 % of the base model's 6,738,415,616); "
        "6,746,808,336 parameters are trained"
    )
    assert all(parameter.is_meta for parameter in handle.parameters())


def test_guidance_only_training_freezes_and_detaching_thaws():
    model = family("Llama")
    model.lm_head.weight.requires_grad_(False)
    handle = af.bias.attach(model, GUIDANCE, train="guidance")
    assert handle.num_trained == handle.num_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    handle.remove()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]


def test_what_load_model_returns_will_do(tmp_path):
    loaded, ids = Loaded(family("Llama"), None), tokens(1, 6)
    handle = af.bias.attach(loaded, GUIDANCE)
    disturb(loaded.model)
    af.bias.save(loaded, tmp_path)
    assert len(af.bias.capture(loaded, ids[0]).layers) == 2
    handle.remove()
    assert af.bias.load(loaded, tmp_path).num_parameters == handle.num_parameters


def test_transformers_trainer_decays_weights_but_neither_norms_nor_biases(tmp_path):
    model = family("Llama", torch.float32)
    af.bias.attach(model, (*GUIDANCE, *EVERY_OTHER_KIND))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    decayed = Trainer(model, arguments).get_decay_parameter_names(model)
    ours = [name for name, _ in model.named_parameters() if "score_terms" in name]
    free = [name for name in ours if "norm" in name.split("score_terms.")[1] or name.endswith("bias")]
    assert 0 < len(free) < len(ours) - 8
    assert [name for name in ours if name not in decayed] == free
