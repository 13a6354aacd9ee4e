"""Gradients under attach against an explicit additive mask, in float64; and queries that may attend to nothing."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import attnflow as af
from tests.models import outputs, tiny, tokens

BLOCK, BUTTERFLY = af.masks.block_two_stream(4, 2), af.masks.butterfly(5)
LAYOUTS = {
    "block two-stream": (BLOCK, [*range(6), *range(2, 8)]),
    "butterfly": (BUTTERFLY, [*range(4), *range(1, 5), *range(5)]),
    "causal": (af.masks.causal(9), list(range(9))),
    "random": (af.masks.from_dense(torch.rand(11, 11, generator=torch.Generator().manual_seed(0)) < 0.3), [*range(11)]),
}
EMPTY = af.masks.causal(8) & ~af.masks.from_intervals([[(0, 8)] if q in (0, 3, 7) else [] for q in range(8)])


def additive(mask):
    table = torch.zeros(mask.shape, dtype=torch.float64)
    return table.masked_fill(~mask.dense(), -torch.inf)[None, None]


def gradients(model, ids, positions=None, **inputs):
    """Loss and its gradient with respect to every parameter."""
    model.zero_grad()
    where = {} if positions is None else {"position_ids": torch.tensor([positions]).expand(len(ids), -1)}
    logits = outputs(model, input_ids=ids, **where, **inputs)
    loss = cross_entropy(logits.flatten(0, 1), ids.flatten() % logits.shape[-1])
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, expected, tolerance=1e-11):
    torch.testing.assert_close(ours[0], expected[0], rtol=tolerance, atol=tolerance)
    assert ours[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=tolerance, atol=tolerance * max(1, gradient.abs().max())
        )


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama"])
def test_gradients_are_those_of_an_explicit_additive_mask(kind, implementation, name):
    model, (mask, positions) = tiny(name), LAYOUTS[kind]
    if mask.row_counts().min() == 0:
        pytest.fail("the oracle needs a key for every query")
    ids = tokens(2, mask.num_queries)
    oracle = copy.deepcopy(model)
    # BERT and GPT-2 compute eager attention in float64 throughout; the others take the softmax in float32.
    oracle.set_attn_implementation("sdpa" if name == "Llama" else "eager")
    expected = gradients(oracle, ids, positions, attention_mask=additive(mask).expand(2, -1, -1, -1))
    with af.masks.attach(model, mask, backend=implementation):
        ours = gradients(model, ids, positions)
    assert_same(ours, expected, 1e-5 if (name, implementation) == ("Llama", "eager") else 1e-11)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Bert", "GptOss", "GPT2"])
def test_a_query_with_nothing_allowed_gets_zero_from_attention_and_gives_zero_gradients(name, implementation):
    model = tiny(name)
    if name == "GptOss":
        implementation = "eager"
    ids, seen = tokens(2, 8), []
    with af.masks.attach(model, EMPTY, backend=implementation):
        for where, module in model.named_modules():
            if where.endswith(("o_proj", "attn.c_proj", "attention.output.dense")):
                module.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        loss, found = gradients(model, ids)
    assert len(seen) == 2
    for output in seen:
        assert (output[:, [0, 3, 7]] == 0).all()
        assert (output[:, [1, 2, 4, 5, 6]] != 0).any()
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, (mask, positions) = tiny("Llama"), LAYOUTS["butterfly"]
    masks = [mask, mask & ~af.masks.from_edges([(12, 0)], 13)]
    ids = tokens(2, mask.num_queries)
    with af.masks.attach(model, per_layer=masks):
        expected = gradients(model, ids, positions)
        model.train()
        # Renamed in 5.23, where the old name warns.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
            {"use_reentrant": reentrant}
        )
        model.enable_input_require_grads()
        ours = gradients(model, ids, positions, use_cache=False)
        # Recomputation happens in the backward pass: another forward pass in between must not disturb it.
        first = outputs(model, input_ids=ids, use_cache=False).sum()
        outputs(model, input_ids=tokens(1, mask.num_queries), use_cache=False)
        model.zero_grad()
        first.backward()
        again = model.model.embed_tokens.weight.grad.clone()
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        model.zero_grad()
        outputs(model, input_ids=ids).sum().backward()
    assert_same(ours, expected)
    torch.testing.assert_close(again, model.model.embed_tokens.weight.grad)
