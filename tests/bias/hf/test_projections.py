"""Attention whose queries and keys no table names: latent, of different widths from layer to layer, shared weights."""

import pytest
import torch
import transformers

import attnflow as af
from tests.bias.hf.common import disturb, layer_biases, outputs
from tests.conformance.inputs import ids
from tests.conformance.miniature import Architecture, build

DECODERS = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
}
WIDE = af.bias.GuidanceConfig(layers="every", hidden_dim=8)


def made(model_type, name):
    return build(Architecture(model_type, name, "decoder")).double()


def test_layers_of_different_widths_have_networks_of_different_widths():
    model = made("gemma4_text", DECODERS["gemma4_text"])
    af.bias.attach(model, WIDE)
    for (_, bias), layer in zip(layer_biases(model), model.model.layers, strict=True):
        attention = layer.self_attn
        assert bias.shape.head_dim == attention.head_dim
        assert bias.shape.num_heads * attention.head_dim == attention.q_proj.out_features
        assert bias.shape.num_kv_heads * attention.head_dim == attention.k_proj.out_features


@pytest.mark.parametrize(
    ("model_type", "name", "words"),
    [
        ("jetmoe", "JetMoeForCausalLM", r"queries are more than components.*'rotated' or 'hidden'"),
        ("hrm_text", "HrmTextForCausalLM", r"in several lists of layers \(model.L_module.layers, model.H_module"),
    ],
)
def test_attention_that_cannot_be_read_says_what_to_do(model_type, name, words):
    model = made(model_type, name)
    with pytest.raises(af.UnsupportedArchitecture, match=words):
        af.bias.attach(model)


def test_widths_that_its_heads_do_not_divide():
    model = transformers.SwinModel(transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=64))
    with pytest.raises(af.UnsupportedArchitecture, match="does not state its number of heads"):
        af.bias.attach(model)


def test_a_model_that_holds_other_stacks_takes_a_bias_on_its_own():
    model, text = made("phi4_multimodal", "Phi4MultimodalForCausalLM"), ids(10)
    with pytest.raises(ValueError, match=r"Phi4MultimodalModel \(model.layers\).*pass the one that you mean"):
        af.bias.attach(model)
    plain = outputs(model, input_ids=text)
    handle = af.bias.attach(model.model, WIDE)
    assert set(handle.layers) == {"layers.0.self_attn", "layers.1.self_attn"}
    disturb(model)
    assert not torch.allclose(outputs(model, input_ids=text), plain)


def test_a_sink_for_each_query_is_refused():
    model, text = made("inkling2_text", "Inkling2ForCausalLM"), ids(10)
    config, message = af.bias.GuidanceConfig(reference="rotated"), r"has a sink for each query, \[1, 4, 10, 1\]"
    with af.bias.attach(model, config), pytest.raises(af.UnsupportedArchitecture, match=message):
        model(text)


def test_a_cache_without_a_place_for_the_bias_says_so():
    """MiniMax's own cache takes every layer behind the model's for one of linear attention."""
    model, text = made("minimax", "MiniMaxForCausalLM"), ids(10)
    with torch.no_grad():
        plain = outputs(model, input_ids=text, use_cache=False)
        af.bias.attach(model, WIDE)
        assert torch.equal(outputs(model, input_ids=text, use_cache=False), plain)
        disturb(model)
        assert (outputs(model, input_ids=text, use_cache=False) - plain).abs().max() > 1e-3 * plain.abs().max()
        with pytest.raises(af.UnsupportedArchitecture, match=r"MiniMaxCache numbers its layers.*use_cache=False"):
            model(text, use_cache=True)


def test_two_calls_of_the_attention_interface_in_one_module_are_refused():
    model, text = made("diffllama", "DiffLlamaForCausalLM"), ids(10)
    before = model(text).logits
    message = r"more than once in a forward.*out of layers"
    with af.bias.attach(model, WIDE), pytest.raises(af.UnsupportedArchitecture, match=message):
        model(text)
    torch.testing.assert_close(model(text).logits, before)
