"""What cannot work is refused with a reason, and leaves the model as it was."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)
from transformers.models.t5 import modeling_t5

import attnflow as af
from attnflow.bias.kind import LayerBias
from tests.bias.hf.common import GUIDANCE, biased, disabled, disturb, family, handle_of, outputs, same_state, tokens
from tests.models import WITHOUT_INTERFACE

CHECKED = "Type-check error"  # which comes first while the tests run


def refused(model, error, match, *arguments, **options):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with pytest.raises(error, match=match):
        af.bias.attach(model, *arguments, **options)
    assert same_state(model, before)
    assert model.config._attn_implementation is implementation
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="has no bias attached"):
        handle_of(model).remove()


def test_attaching_twice_and_detaching_twice():
    model = biased("Llama")
    with pytest.raises(ValueError, match=r"has a bias attached already; remove it by its handle first"):
        af.bias.attach(model, GUIDANCE)
    with pytest.raises(ValueError, match="has a bias attached already"):
        af.bias.attach(model.model, GUIDANCE)
    with pytest.raises(ValueError, match="a part of the model that the bias was attached to"):
        handle_of(model.model).remove()
    handle_of(model).remove()
    for use in (lambda model: af.bias.save(model, "folder"), lambda model: af.bias.capture(model, [5, 6])):
        with pytest.raises(ValueError, match="has no bias attached"):
            use(model)


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_without_the_interface_or_without_attention(name):
    refused(family(name), af.UnsupportedArchitecture, "does not take the attention interface", GUIDANCE)


def test_layers_that_share_the_keys_of_an_earlier_one_are_left_out():
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3nTextConfig(
        **dict.fromkeys(("altup_num_inputs", "num_kv_shared_layers", "num_key_value_heads", "eos_token_id"), 2),
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 50),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "laurel_rank", "sliding_window"), 4),
        **dict.fromkeys(("head_dim", "hidden_size_per_layer_input"), 8),
        hidden_size=32,
        intermediate_size=48,
        layer_types=kinds,
        activation_sparsity_pattern=[0.0] * 4,
        pad_token_id=0,
        bos_token_id=1,
    )
    model, ids = Gemma3nForCausalLM(config).double().eval(), tokens(2, 9)
    shared = af.bias.GuidanceConfig(layers=[0, 2], hidden_dim=4)
    refused(model, af.UnsupportedArchitecture, r"layers.2.self_attn attends to the keys of an earlier layer", shared)
    shared = af.bias.GuidanceConfig(layers=[2], hidden_dim=4, reference="hidden")
    refused(model, af.UnsupportedArchitecture, r"layers.2.self_attn attends to the keys of an earlier layer", shared)
    for placement, count in (("every", 2), ("every_other", 1)):
        with af.bias.attach(model, af.bias.GuidanceConfig(layers=placement, hidden_dim=4)) as handle:
            assert len(handle.layers) == count
            assert f"bias on {count} of 4 attention layers" in str(handle)
    with torch.no_grad():
        plain = outputs(model, input_ids=ids)
        af.bias.attach(model, af.bias.GuidanceConfig(layers=[0, 1], hidden_dim=4, reference="hidden"))
        assert torch.equal(outputs(model, input_ids=ids), plain)
        disturb(model)
        whole, cache = outputs(model, input_ids=ids, use_cache=False), DynamicCache(config=config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    assert (whole - plain).abs().max() > 1e-3


def test_kinds_that_a_layer_cannot_have():
    refused(family("Bert"), ValueError, "CumulativeConfig.*is not causal", af.bias.CumulativeConfig())
    for name in ("GPT2", "Bert", "OPT"):
        config = af.bias.AlibiConfig(layers="every_other", gain=0.0)
        refused(family(name), af.UnsupportedArchitecture, "takes no rotary embedding from outside", config)


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "Phi3", "Gemma3"])
def test_removing_rotary_embedding_makes_positions_equal(name):
    """ALiBi in place of rotary embedding: without either, an encoder's or first layer's keys have no order."""
    wide = {"sliding_window": 64} if name == "Gemma3" else {}
    model, ids = family(name, num_hidden_layers=1, **wide), tokens(1, 6)
    af.bias.attach(model, af.bias.AlibiConfig(gain=0.0))
    order = torch.tensor([2, 0, 1, 3, 4, 5])
    with torch.no_grad():
        first, second = (outputs(model, input_ids=one)[:, -1] for one in (ids, ids[:, order]))
        torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-5)
        disturb(model)
        first, second = (outputs(model, input_ids=one)[:, -1] for one in (ids, ids[:, order]))
        assert (second - first).abs().max() > 1e-4


def test_t5_keeps_its_own_buckets_beside_the_bias():
    model, ids, targets = family("T5"), tokens(2, 7), tokens(2, 5)
    if not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        refused(model, af.UnsupportedArchitecture, "does not take the attention interface", GUIDANCE)
        return
    refused(model, ValueError, "several stacks of self-attention", GUIDANCE)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = outputs(model, input_ids=ids, decoder_input_ids=targets)
        for part in (model.get_encoder(), model.get_decoder()):
            af.bias.attach(part, af.bias.KeyConfig(layers="every", hidden_dim=4), backend="reference")
            same = outputs(model, input_ids=ids, decoder_input_ids=targets)
            assert torch.equal(same, plain)
            for bias in (module for module in part.modules() if isinstance(module, LayerBias)):
                bias._trained = True  # the path of a trained bias, whose B is still 0
            torch.testing.assert_close(outputs(model, input_ids=ids, decoder_input_ids=targets), plain)
            disturb(part)
            assert (outputs(model, input_ids=ids, decoder_input_ids=targets) - plain).abs().max() > 1e-4
            handle_of(part).remove()


def test_what_errors_advise_works():
    bert = family("Bert")
    with pytest.raises(ValueError, match="use KeyConfig or GuidanceConfig"):
        af.bias.attach(bert, af.bias.CumulativeConfig())
    for config in (af.bias.KeyConfig(), af.bias.GuidanceConfig()):
        af.bias.attach(bert, config).remove()
    gpt = family("GPT2")
    with pytest.raises(af.UnsupportedArchitecture, match="use rope='keep'"):
        af.bias.attach(gpt, af.bias.AlibiConfig())
    af.bias.attach(gpt, af.bias.AlibiConfig(rope="keep"))
    handle_of(gpt).remove()
    af.bias.attach(gpt, af.bias.DenseConfig(max_length=4))
    disturb(gpt)
    with pytest.raises(
        ValueError, match=r"covers 4 positions, the sequence reaches 5; attach it with a larger max_length"
    ):
        outputs(gpt, input_ids=tokens(1, 6))
    handle_of(gpt).remove()
    af.bias.attach(gpt, af.bias.DenseConfig(max_length=6))
    disturb(gpt)
    outputs(gpt, input_ids=tokens(1, 6))
    with pytest.raises(ValueError, match="pass the one that you mean"):
        af.bias.attach(family("T5"), GUIDANCE) if hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS") else pytest.skip()
    af.bias.attach(family("T5").get_decoder(), af.bias.KeyConfig(layers="every"))


def test_vision_models():
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4
    )
    model, pixels = ViTModel(config).double().eval(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        plain = model(pixels)[0]
        af.bias.attach(model, GUIDANCE)
        assert torch.equal(model(pixels)[0], plain)
        disturb(model)
        assert (model(pixels)[0] - plain).abs().max() > 1e-4
        handle_of(model).remove()
        assert torch.equal(model(pixels)[0], plain)


def test_parameters_of_the_paper_on_the_meta_device():
    """daa, sec. 4: 8.4 M parameters on LLaMA-2-7B."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008))
    summary = af.bias.attach(model)
    assert summary.num_parameters == 8_392_720
    assert (len(summary.layers), set(summary.layers.values())) == (16, {524_545})
    assert str(summary) == (
        "bias on 16 of 32 attention layers: 8,392,720 parameters (0.12 % of the base model's 6,738,415,616); "
        "6,746,808,336 are trained"
    )
    assert all(parameter.is_meta for parameter in handle_of(model).parameters())
    assert af.bias.GuidanceConfig() == af.bias.GuidanceConfig(
        layers="every_other", hidden_dim=64, reference="unrotated", share_heads=True, init="zero"
    )


def test_a_layer_on_several_devices():
    model = family("Llama")
    model.model.layers[0].self_attn.q_proj.to("meta")
    with pytest.raises(ValueError, match=r"self_attn lies on several devices \(cpu, meta\); move it to one"):
        af.bias.attach(model, GUIDANCE)
    assert "score_terms" not in str(model)


def test_guidance_only_training_freezes_and_detaching_thaws():
    model = family("Llama")
    model.lm_head.weight.requires_grad_(False)
    summary = af.bias.attach(model, GUIDANCE, train="guidance")
    assert (
        summary.num_trained == summary.num_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
    handle_of(model).remove()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]


def test_changing_the_attention_implementation_under_a_bias_is_noticed():
    """Otherwise the bias would be out of force without a word."""
    model, ids = biased("Llama"), tokens(1, 5)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="ran without it: the model's attention implementation was set to 'eager'"):
        outputs(model, input_ids=ids)
    with disabled(model):
        outputs(model, input_ids=ids)
    handle_of(model).remove()
    assert model.config._attn_implementation == "eager"  # what the user has chosen last
    af.bias.attach(model, GUIDANCE)
    outputs(model, input_ids=ids)


def test_implementations_that_take_no_bias():
    model = family("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2', which takes no bias; choose one of sdpa, eager"):
        af.bias.attach(model)
