"""bf16, fp16 and autocast, dropout, checkpointing, copies and weights: what surrounds attention in training."""

import copy

import pytest
import torch

import attnflow as af
from tests.bias.hf.common import EVERY_OTHER_KIND, GUIDANCE, biased, disabled, disturb, family, outputs, tokens

KINDS = (*GUIDANCE, *EVERY_OTHER_KIND)


def gradients(model, ids, **inputs):
    model.zero_grad()
    loss = outputs(model, input_ids=ids, **inputs).float().sin().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["Llama", "Bert"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
def test_low_precision_is_as_close_to_float64_as_the_base_model(name, dtype, autocast):
    kinds = [one for one in KINDS if name != "Bert" or one.kind != "cumulative"]
    exact, ids = biased(name, kinds), tokens(2, 9)
    low = copy.deepcopy(exact).to(torch.float32 if autocast else dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
        error = (outputs(low, input_ids=ids) - outputs(exact, input_ids=ids)).abs().mean()
        with disabled(low), disabled(exact):
            base = (outputs(low, input_ids=ids) - outputs(exact, input_ids=ids)).abs().mean()
    assert error < 4 * base
    with torch.autocast("cpu", dtype, enabled=autocast):
        _, found = gradients(low, ids)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32 if autocast else dtype}
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert all(found[key].abs().max() > 0 for key in found if key.endswith(("weight", "gain", "table", "values")))


def test_autocast_leaves_a_new_bias_exact_and_its_scores_in_float32():
    model, ids, calls = family("Llama", torch.float32), tokens(2, 9), []
    with torch.autocast("cpu", torch.bfloat16):
        plain = outputs(model, input_ids=ids)
        af.bias.attach(model, KINDS)
        assert torch.equal(outputs(model, input_ids=ids), plain)
        disturb(model)
        bias = model.model.layers[0].self_attn.score_terms
        bias.observer = calls.append
        outputs(model, input_ids=ids)
    (call,) = calls
    assert {call.query.dtype, call.key.dtype, call.value.dtype} == {torch.bfloat16}
    assert all(term.tile(slice(0, 9), slice(0, 9)).dtype == torch.float32 for term in call.terms)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_dropout_acts_on_weights_and_only_in_training(name, implementation):
    model = family(name, torch.float32, **({"attn_pdrop": 0.5} if name == "GPT2" else {"attention_dropout": 0.5}))
    model.set_attn_implementation(implementation)
    af.bias.attach(model, KINDS)
    disturb(model)
    ids = tokens(2, 9)
    with torch.no_grad():
        evaluated = outputs(model, input_ids=ids)
        assert torch.equal(outputs(model, input_ids=ids), evaluated)
        for module in model.modules():  # of attention alone
            if isinstance(module, torch.nn.Dropout) and module.p != 0.5:
                module.p = 0.0
        model.train()
        torch.manual_seed(3)
        first, second = outputs(model, input_ids=ids), outputs(model, input_ids=ids)
        torch.manual_seed(3)
        assert torch.equal(outputs(model, input_ids=ids), first)
        assert (first - second).abs().max() > 1e-3
