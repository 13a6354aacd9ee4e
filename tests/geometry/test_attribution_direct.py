"""The plain path from the stream to queries and keys gives what differentiation of the held pass gives."""

from functools import partialmethod
from importlib import import_module

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

import attnflow as af
from attnflow.models.stream import ResidualStream
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


def both(monkeypatch, model, **arguments):
    """The attribution by the direct path, which must hold, and by differentiation."""
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_differentiated", lambda *_: pytest.fail("the direct path does not hold"))
        direct = af.geometry.attribute(model, IDS, **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_direct", lambda *_: None)
        return direct, af.geometry.attribute(model, IDS, **arguments)


@pytest.mark.parametrize("head", [2, None])
@pytest.mark.parametrize("family", [*PLAIN, "Cohere"])  # which rotates neighbours
def test_both_ways_agree(monkeypatch, family, head):
    model = CohereForCausalLM(CohereConfig(**SMALL)).double() if family == "Cohere" else tiny(family, torch.float64)
    direct, slow = both(monkeypatch, model, layer=1, head=head, query=-2)
    assert set(slow.components) <= set(direct.components)
    columns = [direct.components.index(name) for name in slow.components]
    torch.testing.assert_close(direct.raw[..., columns, :][..., columns], slow.raw, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(direct.constant, slow.constant, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(direct.raw.sum(), slow.raw.sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert", "DeepseekV3"])
def test_a_long_pass_keeps_no_outputs_and_gives_the_same(monkeypatch, family):
    model = tiny(family, torch.float64)
    whole = af.geometry.attribute(model, IDS, layer=1, head=1)
    removed = whole.ablate(whole.components[1])
    monkeypatch.setattr(ResidualStream, "record", partialmethod(ResidualStream.record, limit=4.0))
    found = af.geometry.attribute(model, IDS, layer=1, head=1)
    assert found.components == whole.components
    torch.testing.assert_close(found.raw, whole.raw, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.ablate(whole.components[1]).total, removed.total)


def test_a_long_pass_holds_no_output_of_the_width(monkeypatch):
    kept = []
    monkeypatch.setattr(ResidualStream, "record", partialmethod(ResidualStream.record, limit=4.0))
    complete = ResidualStream.complete
    monkeypatch.setattr(ResidualStream, "complete", lambda self: kept.append(1) or complete(self))
    af.geometry.attribute(tiny("Llama", torch.float64), IDS, layer=1, head=1)
    assert not kept  # the second pass projects each output when it comes


@pytest.mark.parametrize("family", ["scaled", "Gemma2", "Bert"])
def test_a_stream_that_is_more_than_a_sum_has_no_direct_path(monkeypatch, family):
    config = GraniteConfig(**SMALL, residual_multiplier=0.5)
    model = GraniteForCausalLM(config).double() if family == "scaled" else tiny(family, torch.float64)
    taken = []
    differentiated = parts._differentiated
    monkeypatch.setattr(parts, "_differentiated", lambda *a: taken.append(1) or differentiated(*a))
    af.geometry.attribute(model, IDS, layer=1, head=0)
    assert taken
