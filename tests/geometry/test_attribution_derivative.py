"""Centred terms against differences of the model's own weights; the head that is chosen; ablation of one head."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import attnflow as af
from attnflow.models.anatomy.sites import find_sites, models_around
from attnflow.models.passes.evaluation import precision
from attnflow.models.passes.interception import intercept
from tests.models import deep

IDS = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(1))
STEP = 1e-4


def disturbed(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)
    return model


def biased(model, config):
    torch.manual_seed(1)
    af.bias.attach(model, config)
    return model


GUIDED = af.bias.GuidanceConfig(hidden_dim=8, init="kaiming")
ALIBI = af.bias.AlibiConfig()
DECODER = {"input_ids": IDS[:, :6], "decoder_input_ids": IDS}
CASES = {  # the model, its inputs, its constants
    "grouped heads": (lambda: deep("Llama", num_key_value_heads=2), IDS, ()),
    "a softcap": (lambda: deep("Gemma2", attn_logit_softcapping=1.5), IDS, ()),
    "sinks": (lambda: disturbed(deep("GptOss")), IDS, ("biases",)),
    "biases": (lambda: disturbed(deep("GPT2")), IDS, ("biases",)),
    "relative positions": (lambda: deep("T5"), DECODER, ("positions",)),
    "an attached bias": (lambda: biased(deep("Llama", num_key_value_heads=2), GUIDED), IDS, ("attached bias",)),
    "ALiBi": (lambda: biased(deep("Llama", num_key_value_heads=2), ALIBI), IDS, ("attached bias",)),
    "ALiBi after a softcap": (
        lambda: biased(deep("Gemma2", attn_logit_softcapping=1.5), ALIBI), IDS, ("attached bias",)
    ),
}  # fmt: skip
QUERY, HEAD = 5, 3


@cache
def case(what):
    model, inputs, _ = CASES[what][0]().double().eval(), *CASES[what][1:]
    model.set_attn_implementation("eager")
    return model, inputs, af.geometry.attribute(model, inputs, layer=-1, head=HEAD, query=QUERY)


class _Seen(Exception):
    pass


def weights(model, inputs, result, added: Tensor | None = None) -> Tensor:
    """The model's own weights of the row, with something added to its scores before a softcap."""
    sites = find_sites(model)
    site = [site for site in sites if site.kind == result.attention and site.part in ("", "decoder")][-1]
    keys, found = list(result.keys), []

    def look(call, proceed):
        count = call.key.shape[2]
        scaling = call.kwargs.get("scaling")
        scaling = call.query.shape[-1] ** -0.5 if scaling is None else scaling
        entry = torch.zeros_like(call.query[..., :1])  # one more entry of queries and keys holds what is added
        entry[0, HEAD, QUERY] = 1
        more = torch.zeros(count).double()
        more[keys] = 0.0 if added is None else added / scaling
        changed = call.replace(
            query=torch.cat([call.query, entry], dim=-1),
            key=torch.cat([call.key, more[:, None].expand(*call.key.shape[:3], 1)], dim=-1),
            value=torch.eye(count).double().expand(*call.key.shape[:2], -1, -1),
            kwargs={**call.kwargs, "scaling": scaling},
        )
        found.append(proceed(changed)[0][0, QUERY, HEAD, keys])
        raise _Seen

    handle = intercept(models_around(sites), {site.module: look}, role="pool", implementation="eager")
    try:
        with torch.no_grad(), precision(model, torch.float64), pytest.raises(_Seen):
            model(**(inputs if isinstance(inputs, dict) else {"input_ids": inputs}))
    finally:
        handle.remove()
    return found[0]


def derivative(model, inputs, result, added: Tensor) -> Tensor:
    """The derivative of the logarithms of the weights by the size of what is added."""
    up, down = (weights(model, inputs, result, sign * STEP * added).log() for sign in (1, -1))
    return (up - down) / (2 * STEP)


@pytest.mark.parametrize("what", CASES)
def test_centred_terms_are_derivatives(what):
    model, inputs, whole = case(what)
    torch.testing.assert_close(weights(model, inputs, whole), whole.weights, atol=1e-12, rtol=1e-10)
    assert not any(one.requires_grad for one in (whole.raw, whole.weights, whole.expected, *whole.constants.values()))
    some = af.geometry.attribute(model, inputs, layer=-1, head=HEAD, query=QUERY, key=[-5, 3])
    columns = [whole.keys.index(key) for key in some.keys]
    places = {(term.query_component, term.key_component) for term in whole.top(3)}
    for first, second in sorted({*places, (whole.components[0], whole.key_components[-1])}, key=str):
        c, d = whole.components.index(first), whole.key_components.index(second)
        slope = derivative(model, inputs, whole, whole.raw[:, c, d])
        torch.testing.assert_close(whole.centred[:, c, d], slope, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(some.centred[:, c, d], slope[columns], atol=1e-6, rtol=1e-6)
        assert slope.abs().max() > 1e-3
    for name in CASES[what][2]:
        added = whole.constants[name] / (1.0 if name == "biases" else whole.slope)  # the others are not under the cap
        slope = derivative(model, inputs, whole, added)
        torch.testing.assert_close(whole.centred_constants[name], slope, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(some.centred_constants[name], slope[columns], atol=1e-6, rtol=1e-6)
        assert slope.abs().max() > 1e-3


def test_cap_and_sinks_take_part():
    """Else the cases above would not show whether they are read."""
    *_, capped = case("a softcap")
    *_, with_sinks = case("sinks")
    assert float(capped.slope.min()) < 0.9
    assert float(with_sinks.weights.sum()) < 0.9


# -------- the head that is chosen

LEFT = {"input_ids": torch.cat([IDS[:, :3], IDS], dim=1), "attention_mask": torch.tensor([[0] * 3 + [1] * 9])}


@pytest.mark.parametrize(("inputs", "first", "query"), [(IDS, 0, -1), (IDS, 0, 4), (LEFT, 3, -1), (LEFT, 3, 8)])
def test_the_head_with_most_weight_elsewhere(inputs, first, query):
    model = deep("Gemma2", num_key_value_heads=2, sliding_window=64)
    model.set_attn_implementation("eager")
    named = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    with torch.no_grad():
        row = model(**named, output_attentions=True).attentions[1][0, :, query].clone()
    row[:, [first, query % row.shape[-1]]] = 0
    if query != -1:
        row[:, query:] = 0
    assert af.geometry.reading(model, inputs).telling_head(1, query) == int(row.amax(1).argmax())


def test_a_single_token_has_a_head():
    with af.geometry.reading(deep("Llama").double().eval(), [5]) as reading:
        result = reading.explain(1, reading.telling_head(1))
    assert result.keys == (0,)
    assert result.weights.tolist() == [1.0]


def test_one_head_of_cross_attention():
    model = deep("Bart").double().eval()
    head = af.geometry.reading(model, DECODER).telling_head(-1, 3, attention="cross")
    everything = af.geometry.attribute(model, DECODER, -1, query=3, attention="cross")
    assert head == int(everything.weights.amax(1).argmax())
