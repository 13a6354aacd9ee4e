"""Float64 as a judge: what it does not show is rounding only if it is small and the module computes the same there."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attnflow.audit import check, measure
from tests.audit.common import tiny, tokens, wrapped
from tests.audit.test_cached import leaky_update
from tests.audit.test_faults import LAYER, only

MODULE = "model.layers.1.mlp"
IDS = tokens(1)


def ahead(out, hidden, strength=0.1):
    return out + strength * hidden.roll(-1, 1).to(out)


def only_in(dtype, strength=0.1):
    """A module with another code path for other types of numbers, as kernels have."""
    return lambda out, hidden: ahead(out, hidden, strength) if out.dtype == dtype else out


LEAKS = {  # the fault, the type of autocast, the model's own
    "float32 alone": (only_in(torch.float32), None, torch.float32),
    "float32 alone, and small": (only_in(torch.float32, 1e-4), None, torch.float32),
    "a type that autocast makes": (only_in(torch.bfloat16), torch.bfloat16, torch.float32),
    "bfloat16 alone": (only_in(torch.bfloat16), None, torch.bfloat16),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_that_float64_does_not_show(name, mode):
    change, narrow, dtype = LEAKS[name]
    model = tiny("Llama").to(dtype)
    with wrapped(model.model.layers[LAYER].mlp, change), torch.autocast("cpu", narrow, enabled=narrow is not None):
        report = check(model, IDS, mode=mode, both_sides=False)
    found = only(report)
    assert (found.module, found.confirmed) == (MODULE, False)
    assert found.source == found.target + 1
    assert any("float64 does not show" in note for note in report.notes)


def test_a_kernel_that_leaves_float64_to_another_one(mode):
    def fast(module, query, key, value, mask, scaling=None, dropout=0.0, **more):
        if query.dtype == torch.float64:
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout, **more)
        ahead = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=ahead, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("fast", fast)
    model = tiny("Llama")
    model.set_attn_implementation("fast")
    found = check(model, IDS, mode=mode).violations[0]
    assert (found.module, found.confirmed) == ("model.layers.0.self_attn", False)


def shaken(out, hidden):
    """Another last bit, by what stands elsewhere, as experts of another size compute."""
    return out * (1 + torch.finfo(out.dtype).eps * (hidden.double().sum() * 1e6).sin().sign().to(out))


def chosen(out, hidden):
    """A choice between two experts that the last bit of a position's own vector may turn."""
    return out + (hidden * 2e6).sin().sum(-1, keepdim=True).sign()


def test_a_choice_that_turns_on_rounding_is_no_leak(mode):
    model = tiny("Llama")
    with (
        wrapped(model.model.layers[LAYER].mlp, shaken),
        wrapped(model.model.layers[2].mlp, chosen),
    ):
        report = check(model, IDS, mode=mode, both_sides=False)
        assert report.verdict == "clean", str(report)
        assert mode == "quick" or any("rounding" in note for note in report.notes)
    last = model.model.layers[2].mlp  # and a leak behind it is found all the same
    with (
        wrapped(model.model.layers[LAYER].mlp, shaken),
        wrapped(last, lambda out, hidden: only_in(torch.float32)(chosen(out, hidden), hidden)),
    ):
        found = only(check(model, IDS, mode=mode, both_sides=False))
    assert (found.module, found.confirmed) == ("model.layers.2.mlp", False)


def test_a_change_as_small_as_rounding_where_float64_computes_something_else():
    model = tiny("Llama")

    def other(out, hidden):
        return out.flip(-1) if out.dtype == torch.float64 else shaken(out, hidden)

    with wrapped(model.model.layers[LAYER].mlp, other):
        found = only(check(model, IDS, both_sides=False))
    assert (found.module, found.confirmed) == (MODULE, False)


@pytest.mark.parametrize("by", ["layer", "output"])
def test_what_is_measured(by):
    model, leak, ids = tiny("Llama"), only_in(torch.float32, 2e-4), tokens(1, 8)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(measure(model, ids, by=by).reachability(), causal)
    with wrapped(model.model.layers[LAYER].mlp, leak):
        assert (measure(model, ids, by=by).reachability() & ~causal).any()


def test_a_cache_that_is_wrong_in_float32_alone():
    def change(keys, values, new):
        return keys, values * 1.5 if new == 1 and values.dtype == torch.float32 else values

    with leaky_update(model := tiny("Llama"), change):
        report = check(model, tokens(1, 9), cache=[7, 1, 1], passes=1, both_sides=False)
    found = only(report, kind="cache")
    assert (found.module, found.path, found.confirmed) == ("model.layers.1.self_attn", "cached", False)
    assert found.target >= 7
