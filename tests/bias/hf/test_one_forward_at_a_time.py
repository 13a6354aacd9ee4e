"""What would mix tensors of two forward passes, or tokens with and without the bias, is refused."""

import threading

import pytest
import torch
from transformers import DynamicCache

import attnflow as af
from attnflow.bias.kind import layer_biases
from tests.bias.hf.common import disabled, handle_of
from tests.models import tiny, tokens


def attached(name="Llama"):
    torch.manual_seed(0)
    model = tiny(name, torch.float32)
    af.bias.attach(model, af.bias.GuidanceConfig(layers="every", hidden_dim=8, init="kaiming"))
    return model


@pytest.mark.parametrize("first", ["with", "without"])
def test_a_cache_does_not_mix_tokens_with_and_without_the_bias(first):
    model, ids, cache = attached(), tokens(2, 5), DynamicCache()
    if first == "with":
        model(ids, past_key_values=cache)
        with disabled(model), pytest.raises(ValueError, match="in part with the bias and in part without"):
            model(ids[:, :1], past_key_values=cache)
    else:
        with disabled(model):
            model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="already holds 5 tokens"):
            model(ids[:, :1], past_key_values=cache)


def test_nothing_is_kept_after_a_forward_pass():
    model, ids = attached(), tokens(1, 4)
    model(ids)
    with disabled(model):
        model(ids)
    model.model.layers[0].self_attn.q_proj(torch.zeros(1, 2, 32))
    for _, bias in layer_biases(model):
        hooks = bias.hooks
        held = (hooks.outputs, hooks.hidden, hooks.positions, hooks.cache, hooks.waiting)
        assert held == ({}, None, None, None, False)


def test_a_second_thread_is_refused_rather_than_mixed_up():
    model, ids = attached(), tokens(1, 4)
    expected = model(ids, use_cache=False).logits
    inside, go_on = threading.Event(), threading.Event()
    projection = model.model.layers[0].self_attn.v_proj

    def wait(*_):
        inside.set()
        go_on.wait(20)

    handle = projection.register_forward_hook(wait)
    results = []
    other = threading.Thread(target=lambda: results.append(model(ids, use_cache=False).logits))
    other.start()
    assert inside.wait(20)
    handle.remove()
    with pytest.raises(RuntimeError, match="two threads run one model with a bias"):
        model(ids, use_cache=False)
    go_on.set()
    other.join(20)
    assert torch.equal(results[0], expected)  # the one that came first is unharmed


def test_replicas_of_data_parallel_are_refused():
    attention = attached().model.layers[0].self_attn
    replica = attention._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match=r"nn.DataParallel.*accelerate launch"):
        replica(torch.zeros(1, 2, 32), (torch.ones(1, 2, 8), torch.zeros(1, 2, 8)), None)


def test_another_last_layer_is_another_base(tmp_path):
    model = attached()
    af.bias.save(model, tmp_path)
    handle_of(model).remove()
    torch.nn.init.normal_(model.model.layers[-1].self_attn.q_proj.weight)
    with pytest.raises(af.AttnflowError, match="other weights of this architecture"):
        af.bias.load(model, tmp_path)


def test_a_custom_bias_is_compared_with_the_saved_one(tmp_path):
    model = tiny("Llama", torch.float32)

    class Pairs(torch.nn.Module):
        def forward(self, query, key):
            return (query.sum(-1)[:, None, :, None] - key.sum(-1)[:, None, None]) * 0.01

    af.bias.attach(model, af.bias.CustomConfig(lambda shape: Pairs(), name="pairs"))
    af.bias.save(model, tmp_path)
    handle_of(model).remove()
    with pytest.raises(ValueError, match=r"the saved bias has the custom parts .*unrotated"):
        af.bias.load(
            model, tmp_path, custom=[af.bias.CustomConfig(lambda shape: Pairs(), name="pairs", reference="rotated")]
        )
