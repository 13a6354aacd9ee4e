"""The plain path from the stream to queries and keys gives what differentiation of the held pass gives."""

from functools import partialmethod
from importlib import import_module

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import attnflow as af
from attnflow.models.passes.stream import ResidualStream
from tests.models import tiny

parts = import_module("attnflow.geometry.parts")  # the package's `attribute` is the function
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
IDS = [5, 9, 3, 7, 11, 2, 8]
# Rotations of halves, of neighbours and of a part of the head; none; joined projections; norms of queries and keys;
# LayerNorm with its mean; grouped heads; parallel blocks.
PLAIN = ["Llama", "GPTNeoX", "GPT2", "Qwen3", "Gemma", "StableLm", "OPT"]
CENTRED = PhiConfig(**SMALL, qk_layernorm=True)  # whose queries and keys are no rotation


def both(monkeypatch, model, **arguments):
    """The attribution by the direct path, which must hold, and by differentiation."""
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_differentiated", lambda *_: pytest.fail("the direct path does not hold"))
        direct = af.geometry.attribute(model, IDS, **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_direct", lambda *_: None)
        return direct, af.geometry.attribute(model, IDS, **arguments)


@pytest.mark.parametrize("head", [2, None])
@pytest.mark.parametrize("family", [*PLAIN, CohereConfig(**SMALL), CENTRED])  # Cohere rotates neighbours
def test_both_ways_agree(monkeypatch, family, head):
    model = (
        tiny(family, torch.float64) if isinstance(family, str) else AutoModelForCausalLM.from_config(family).double()
    )
    direct, slow = both(monkeypatch, model, layer=1, head=head, query=-2)
    assert set(slow.components) <= set(direct.components)
    columns = [direct.components.index(name) for name in slow.components]
    torch.testing.assert_close(direct.raw[..., columns, :][..., columns], slow.raw, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(direct.constant, slow.constant, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(direct.raw.sum(), slow.raw.sum(), rtol=1e-6, atol=1e-9)


def test_autocast_changes_nothing(monkeypatch):
    model = tiny("Llama", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        direct, _ = both(monkeypatch, model, layer=1, head=2)
    torch.testing.assert_close(direct.raw, af.geometry.attribute(model, IDS, layer=1, head=2).raw, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=80)),
        (CohereForCausalLM, CohereConfig(**SMALL, head_dim=80)),  # neighbours
        # 32 of 80 entries, so that the step of 16 does not fill the head
        (PhiForCausalLM, PhiConfig(**(SMALL | {"hidden_size": 320, "partial_rotary_factor": 0.4}))),
    ],
)
def test_a_rotation_takes_few_backward_passes(monkeypatch, kind, config):
    model = kind(config).double()
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    result = af.geometry.attribute(model, IDS, layer=1, head=0)
    assert result.error < 1e-12
    assert model.model.layers[0].self_attn.head_dim == 80
    assert len(calls) <= 16  # of 80 entries of the query and of the key


@pytest.mark.parametrize("side", ["q_norm", "k_norm"])
def test_a_gain_of_zero(side):
    """Then the query or the key depends on no component."""
    model = tiny("Qwen3", torch.float64)
    torch.nn.init.zeros_(getattr(model.model.layers[1].self_attn, side).weight)
    result = af.geometry.attribute(model, IDS, layer=1, head=0)
    assert not result.raw.any()
    assert not result.scores.any()


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert", "DeepseekV3"])
def test_a_long_pass_keeps_no_outputs_and_gives_the_same(monkeypatch, family):
    model = tiny(family, torch.float64)
    whole = af.geometry.attribute(model, IDS, layer=1, head=1)
    monkeypatch.setattr(ResidualStream, "record", partialmethod(ResidualStream.record, limit=4.0))
    found = af.geometry.attribute(model, IDS, layer=1, head=1)
    assert found.components == whole.components
    torch.testing.assert_close(found.raw, whole.raw, rtol=1e-9, atol=1e-12)


def test_a_long_pass_holds_no_output_of_the_width(monkeypatch):
    monkeypatch.setattr(ResidualStream, "record", partialmethod(ResidualStream.record, limit=4.0))
    monkeypatch.setattr(ResidualStream, "held_pass", lambda _: pytest.fail("all outputs were recorded again"))
    af.geometry.attribute(tiny("Llama", torch.float64), IDS, layer=1, head=1)  # it projects each output when it comes


@pytest.mark.parametrize("family", ["scaled", "Gemma2", "Bert"])
def test_a_stream_that_is_more_than_a_sum_has_no_direct_path(monkeypatch, family):
    config = GraniteConfig(**SMALL, residual_multiplier=0.5)
    model = GraniteForCausalLM(config).double() if family == "scaled" else tiny(family, torch.float64)
    taken = []
    differentiated = parts._differentiated
    monkeypatch.setattr(parts, "_differentiated", lambda *a: taken.append(1) or differentiated(*a))
    af.geometry.attribute(model, IDS, layer=1, head=0)
    assert taken
