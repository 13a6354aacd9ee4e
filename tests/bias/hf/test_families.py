"""Every family of models: a new bias changes nothing, a trained one does, and detaching restores the model."""

import pytest
import torch

import attnflow as af
from tests.bias.hf.common import (
    DECODERS,
    ENCODERS,
    EVERY_OTHER_KIND,
    GUIDANCE,
    biased,
    disabled,
    disturb,
    family,
    handle_of,
    layer_biases,
    outputs,
    same_state,
    tokens,
    without_dropout,
)
from tests.models import HYBRID, ZOO

WITHOUT_SDPA = {"GptOss", "Gemma2"}
ALL_KINDS = (*GUIDANCE, *EVERY_OTHER_KIND)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, *HYBRID])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_new_bias_leaves_every_output_as_it_was_bit_for_bit(name, dtype):
    model, ids = family(name, dtype), tokens(2, 9)
    kinds = ALL_KINDS if name in DECODERS else [one for one in ALL_KINDS if one.kind != "cumulative"]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    without_dropout(model)
    for implementation in ("eager",) if name in WITHOUT_SDPA else ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        for training in (False, True):
            model.train(training)
            plain = outputs(model, input_ids=ids)
            af.bias.attach(model, kinds)
            with_gradients = outputs(model, input_ids=ids)
            with torch.no_grad():
                without = outputs(model, input_ids=ids)
            handle_of(model).remove()
            assert torch.equal(with_gradients, plain)
            assert torch.equal(without, plain)
            assert torch.equal(outputs(model, input_ids=ids), plain)
    assert same_state(model, before)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, "FalconH1"])
def test_a_trained_bias_acts_on_routes_alike_and_can_be_disabled_and_detached(name):
    model, ids = family(name), tokens(2, 9)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # eager attention of some families takes its softmax in float32
    with torch.no_grad():
        if name in WITHOUT_SDPA:
            model.set_attn_implementation("eager")
        plain = outputs(model, input_ids=ids)
        af.bias.attach(model, GUIDANCE)
        disturb(model)
        moved = outputs(model, input_ids=ids)
        assert (moved - plain).abs().max() > 1e-3
        with disabled(model):
            assert torch.equal(outputs(model, input_ids=ids), plain)
        assert torch.equal(outputs(model, input_ids=ids), moved)
        saved = [parameter.clone() for parameter in handle_of(model).parameters()]
        handle_of(model).remove()
        assert torch.equal(outputs(model, input_ids=ids), plain)
        if name not in WITHOUT_SDPA:
            model.set_attn_implementation("eager")
            af.bias.attach(model, GUIDANCE)
            for parameter, value in zip(handle_of(model).parameters(), saved, strict=True):
                parameter.copy_(value)
            torch.testing.assert_close(outputs(model, input_ids=ids), moved, **tolerance)


@pytest.mark.parametrize("name", DECODERS)
def test_a_causal_model_stays_causal(name):
    model, ids = biased(name, ALL_KINDS), tokens(1, 9)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 40 + 3
    with torch.no_grad():
        first, second = outputs(model, input_ids=ids), outputs(model, input_ids=changed)
    torch.testing.assert_close(second[:, :5], first[:, :5], rtol=1e-12, atol=1e-12)
    assert (second[:, 5:] - first[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Phi3", "Bert", "ModernBert", "Gemma3", "GPTNeoX"])
def test_gradients_reach_every_parameter_that_softmax_can_see(name):
    """Also in the first step, for what comes last: the hidden layer waits until the output layer is not zero."""
    model, ids = family(name), tokens(2, 9)
    kinds = ALL_KINDS if name in DECODERS else [one for one in ALL_KINDS if one.kind != "cumulative"]
    af.bias.attach(model, kinds)
    outputs(model, input_ids=ids).sin().sum().backward()
    first = {name: p.grad.abs().max() for name, p in model.named_parameters() if "score_terms" in name}
    assert all(gradient.isfinite() for gradient in first.values())
    last = ("output_weight", "gain", "values", "table")
    assert all(first[name] > 0 for name in first if name.endswith(last))
    model.zero_grad()
    disturb(model)
    outputs(model, input_ids=ids).sin().sum().backward()
    for name, parameter in model.named_parameters():
        if "score_terms" in name and not name.endswith("output_bias"):
            assert parameter.grad.abs().max() > 1e-9, name
        elif "output_bias" in name:
            assert parameter.grad.abs().max() < 1e-9, name


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
    with pytest.raises(ValueError, match=r"several stacks of self-attention.*pass the one that you mean"):
        af.bias.attach(model, GUIDANCE)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = outputs(model, input_ids=ids, decoder_input_ids=targets)
        for part in (model.get_encoder(), model.get_decoder()):
            af.bias.attach(part, af.bias.KeyConfig(layers="every", hidden_dim=4), backend="reference")
            same = outputs(model, input_ids=ids, decoder_input_ids=targets)
            assert torch.equal(same, plain)
            for _, bias in layer_biases(part):
                bias._trained = True  # the path of a trained bias, whose B is still 0
            torch.testing.assert_close(outputs(model, input_ids=ids, decoder_input_ids=targets), plain)
            disturb(part)
            assert (outputs(model, input_ids=ids, decoder_input_ids=targets) - plain).abs().max() > 1e-4
            handle_of(part).remove()


def test_vision_models():
    model, pixels = ZOO["ViT"].build(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        plain = model(pixels)[0]
        af.bias.attach(model, GUIDANCE)
        assert torch.equal(model(pixels)[0], plain)
        disturb(model)
        assert (model(pixels)[0] - plain).abs().max() > 1e-4
        handle_of(model).remove()
        assert torch.equal(model(pixels)[0], plain)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "ModernBert"])
def test_an_encoder_gets_a_dense_asymmetric_map(name):
    """daa, sec. 7: B is not triangular there, and B_ij is not B_ji."""
    model, seen = biased(name), []
    bias = next(bias for _, bias in layer_biases(model))
    bias.observer = seen.append
    with torch.no_grad():
        outputs(model, input_ids=tokens(1, 7))
    (call,) = seen
    tile = call.terms[0].tile(slice(0, 7), slice(0, 7))[0, 0]
    assert call.allow.dense() is None or bool(call.allow.dense().all())
    assert (tile != 0).all()
    assert (tile - tile.T).abs().max() > 0.1
