"""A compiled model with a bias computes what it computes uncompiled: forward, training step, static cache."""

from dataclasses import replace

import pytest
import torch
from transformers import StaticCache

import attnflow as af
from tests.bias.cases import Additive
from tests.bias.hf.common import (
    EVERY_OTHER_KIND,
    GUIDANCE,
    ROTATED,
    biased,
    disabled,
    family,
    handle_of,
    outputs,
    tokens,
)

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's own, at compilation
]
KINDS = tuple(replace(one, layers=[0]) for one in (*GUIDANCE, *EVERY_OTHER_KIND))
SMALL = {"num_hidden_layers": 1}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_forward_and_training_step_in_one_graph(name):
    kinds = [one for one in KINDS if name != "Bert" or one.kind != "cumulative"]
    model = biased(name, kinds, torch.float32, **SMALL)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    use = {} if name == "Bert" else {"use_cache": False}
    found = []
    for call in (model, compiled):
        model.zero_grad()
        logits = outputs(call, input_ids=(ids := torch.arange(3, 19).view(2, 8)), **use)
        logits.sin().mean().backward()
        found.append(
            (logits.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        )
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    assert found[0][1].keys() <= found[1][1].keys()  # compiled, what is not used gets zeros
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(
            found[1][1][key], gradient, rtol=1e-3, atol=1e-3 * max(float(gradient.abs().max()), 1e-2)
        )
    with torch.no_grad(), disabled(model):
        torch.testing.assert_close(
            outputs(compiled, input_ids=ids, **use), outputs(model, input_ids=ids, **use), **CLOSE
        )


def test_a_new_bias_compiles_to_the_base_model_up_to_rounding_and_learns():
    model, ids = family("Llama", torch.float32, **SMALL), tokens(2, 8)
    plain = outputs(model, input_ids=ids, use_cache=False)
    af.bias.attach(model, GUIDANCE)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = outputs(compiled, input_ids=ids, use_cache=False)
    torch.testing.assert_close(found, plain, **CLOSE)
    found.sin().sum().backward()
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if name.endswith("output_weight"))


def test_inductor_compiles_the_whole_model():
    model, ids = biased("Llama", GUIDANCE, torch.float32, **SMALL), tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        expected = outputs(model, input_ids=ids, use_cache=False)
        torch.testing.assert_close(outputs(compiled, input_ids=ids, use_cache=False), expected, **CLOSE)


@pytest.mark.parametrize("kinds", [KINDS, ROTATED], ids=["all", "rotated"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_compiled_decoding_with_a_static_cache(name, kinds):
    model, ids = biased(name, kinds, torch.float32, **SMALL), tokens(2, 10)
    with torch.no_grad():
        expected = outputs(model, input_ids=ids, use_cache=False)
        cache = StaticCache(config=model.config, max_cache_len=16)
        parts = [model(ids[:, :6], past_key_values=cache).logits]
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for i in range(6, 10):
            where = torch.full((2, 1), i)
            parts.append(compiled(ids[:, i : i + 1], past_key_values=cache, position_ids=where).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


def test_training_goes_on_in_the_same_graph():
    """Values of the bias change from step to step, from zero on: nothing is compiled again for that."""
    from torch._dynamo.testing import CompileCounter

    model, ids, counter = family("Llama", torch.float32, **SMALL), tokens(2, 8), CompileCounter()
    af.bias.attach(model, GUIDANCE)
    compiled, losses = torch.compile(model, backend=counter), []
    for _ in range(3):
        losses.append(outputs(compiled, input_ids=ids, use_cache=False).sin().sum())
        losses[-1].backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad.clamp(-1, 1))
        model.zero_grad()
    assert counter.frame_count == 1
    assert losses[0] > losses[1] > losses[2]


def test_tiles_are_not_compiled():
    """Their blocks follow the values of a mask: "auto" leaves them out, and asked for by name they say so."""
    heads, bias = torch.randn(1, 2, 200, 8), [Additive(torch.randn(1, 2, 200))]
    auto, tiled = (
        torch.compile(lambda q, b=backend: af.bias.attention(q, q, q, bias, backend=b)[0], backend="eager")
        for backend in ("auto", "tiled")
    )
    torch.testing.assert_close(auto(heads), af.bias.attention(heads, heads, heads, bias, backend="tiled")[0])
    with pytest.raises(Exception, match=r"torch\.compile cannot trace"):
        tiled(heads)


def test_a_compiled_model_on_a_padded_batch_under_a_mask():
    model, mask, ids = biased("Llama", GUIDANCE, torch.float32, **SMALL), af.masks.attention_sink(8, 2, 3), tokens(2, 8)
    real = torch.ones_like(ids)
    real[1, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": real, "position_ids": (real.cumsum(dim=1) - 1).clamp(min=0)}
    with torch.no_grad(), af.masks.attach(model, mask):
        expected = outputs(model, **inputs, use_cache=False)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(outputs(compiled, **inputs, use_cache=False), expected, **CLOSE)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Bert"])
def test_fused_attention_in_one_graph(name):
    """Columns go through torch's own attention, whose mask is a flag, a window, or everything."""
    kinds = [one for one in KINDS if one.kind in ("key", "lowrank") or (one.kind == "alibi" and name != "Bert")]
    model = biased(
        name, [replace(one, layers=[0]) for one in kinds], torch.float32, **SMALL, max_position_embeddings=160
    )
    compiled, ids = torch.compile(model, backend="aot_eager", fullgraph=True), tokens(1, 150)
    found = []
    for call in (model, compiled):
        model.zero_grad()
        use = {} if name == "Bert" else {"use_cache": False}
        logits = outputs(call, input_ids=ids, **use)
        logits.sin().mean().backward()
        found.append(
            (logits.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        )
    assert set(handle_of(model).backend.values()) == {"fused"}
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(
            found[1][1][key], gradient, rtol=1e-3, atol=1e-3 * max(float(gradient.abs().max()), 1e-2)
        )


def test_a_compiled_call_with_rows_that_see_nothing():
    q, bias = torch.randn(2, 4, 200, 8), torch.randn(2, 2, 200)
    k, allow = torch.randn(2, 2, 200, 8), torch.rand(2, 1, 200, 200) > 0.7
    allow[:, :, ::9] = False
    leaves = [t.requires_grad_() for t in (q, k, bias)]

    def attend(backend):
        return lambda q, k, bias: af.bias.attention(q, k, k, [Additive(bias)], allow, backend=backend)[0]

    found, true = (
        torch.compile(attend("fused"), backend="aot_eager", fullgraph=True)(*leaves),
        attend("reference")(*leaves),
    )
    torch.testing.assert_close(found, true, **CLOSE)
    assert (found[:, :, ::9] == 0).all()
    upstream = torch.randn_like(found)
    gradients = (torch.autograd.grad(output, leaves, upstream) for output in (found, true))
    torch.testing.assert_close(*gradients, **CLOSE)
    with pytest.raises(Exception, match="no sinks beside fused attention"):
        torch.compile(
            lambda q: af.bias.attention(q, k, k, [], sinks=torch.zeros(4), backend="fused")[0], backend="eager"
        )(q)
