"""LoRA beside a bias: in either order, seen by the bias, merged and unloaded."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

import attnflow as af
from tests.bias.hf.common import GUIDANCE, disabled, disturb, family, handle_of, outputs, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.is_gradient_checkpointing:FutureWarning")


def lora(model, **options):
    targets = {"llama": ["q_proj", "k_proj", "v_proj"], "gpt2": ["c_attn"], "phi3": ["qkv_proj"]}
    config = LoraConfig(
        r=2,
        target_modules=targets[model.config.model_type],
        fan_in_fan_out="c_attn" in targets[model.config.model_type],
        **options,
    )
    adapted = get_peft_model(model, config).to(model.dtype)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return adapted.eval()


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Phi3"])
def test_the_bias_reads_adapted_projections_in_either_order(name):
    model, ids = family(name), tokens(2, 7)
    first = copy.deepcopy(model)
    af.bias.attach(first, GUIDANCE)
    disturb(first)
    values = [parameter.detach().clone() for parameter in handle_of(first).parameters()]
    torch.manual_seed(1)
    after = lora(first)
    torch.manual_seed(1)
    before = lora(copy.deepcopy(model))
    summary = af.bias.attach(before, GUIDANCE)
    with torch.no_grad():
        plain = outputs(before, input_ids=ids)
        for parameter, value in zip(handle_of(before).parameters(), values, strict=True):
            parameter.copy_(value)
        both = outputs(before, input_ids=ids)
        assert torch.equal(outputs(after, input_ids=ids), both)
        assert summary.num_parameters == sum(value.numel() for value in values)
        with disabled(after):
            assert torch.equal(outputs(after, input_ids=ids), plain)
        merged = after.merge_and_unload()
        torch.testing.assert_close(outputs(merged, input_ids=ids), both, rtol=1e-6, atol=1e-6)
        removed = before.unload()
        assert (outputs(removed, input_ids=ids) - both).abs().max() > 1e-3
        with disabled(removed):
            assert torch.equal(outputs(removed, input_ids=ids), outputs(model, input_ids=ids))
        handle_of(removed).remove()
        assert torch.equal(outputs(removed, input_ids=ids), outputs(model, input_ids=ids))


def test_both_are_trained_together_and_saved_apart(tmp_path):
    model = lora(family("Llama"))
    af.bias.attach(model, GUIDANCE)
    disturb(model)
    outputs(model, input_ids=tokens(2, 7)).sin().sum().backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {("lora_" in name) != ("score_terms" in name) for name in trained} == {True}
    assert all(model.get_parameter(name).grad is not None for name in trained)
    model.save_pretrained(tmp_path / "adapter")
    af.bias.save(model, tmp_path / "bias")
    ids = tokens(1, 6)
    expected = outputs(model, input_ids=ids)
    from safetensors.torch import load_file

    assert not [name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors") if "score_terms" in name]
    handle_of(model).remove()
    af.bias.load(model, tmp_path / "bias")
    assert torch.equal(outputs(model, input_ids=ids), expected)


def test_an_adapter_of_the_bias_itself_is_refused_at_the_first_call():
    """PEFT would put a wrapper in place of the bias, which attention does not ask."""
    model = family("Llama")
    af.bias.attach(model, GUIDANCE)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["score_terms"]))
    with pytest.raises(RuntimeError, match="leave 'score_terms' out of an adapter's modules_to_save"):
        outputs(wrapped, input_ids=tokens(1, 4))


def test_a_pass_that_trains_all_but_the_bias_warns_once():
    model, ids = family("Llama").train(), tokens(2, 7)
    handle = af.bias.attach(model, GUIDANCE)
    copied = copy.deepcopy(model)
    model(ids)  # the bias is trained, too
    adapted = lora(model).train()
    with torch.no_grad():
        adapted(ids)
    adapted.eval()(ids)
    with pytest.warns(UserWarning, match="every parameter of its bias is frozen"):
        adapted.train()(ids)
    with warnings.catch_warnings(action="error", category=UserWarning):
        adapted(ids)
    with pytest.warns(UserWarning, match="every parameter of its bias is frozen"):  # a copy has a handle of its own
        lora(copied).train()(ids)
    handle.remove()
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("error:this pass trains")
def test_a_bias_that_is_trained_or_a_model_that_is_not_warns_of_nothing():
    ids = tokens(2, 7)
    af.bias.attach(adapted := lora(family("Llama")), GUIDANCE)
    adapted.train()(ids)
    model = family("Llama").train()
    handle = af.bias.attach(model, GUIDANCE)
    model.requires_grad_(False)
    model(ids)
    handle.remove()
    af.bias.attach(model.requires_grad_(True), af.bias.AlibiConfig())  # nothing to train
    model(ids)
