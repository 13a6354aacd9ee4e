"""What queries and keys are made of: the probe against the registry, and against the attention interface itself."""

from __future__ import annotations

import pytest
import torch

from attnflow.models.attention import attention_places
from attnflow.models.interception import intercept
from attnflow.models.probe import Columns, Projections, probe
from attnflow.models.sites import find_sites, models_around
from tests.models import ZOO, tiny, tokens

REGISTERED = ["Llama", "GPT2", "GPTNeoX", "Phi3", "OPT", "Qwen3", "Gemma2", "Qwen3Next", "FalconH1", "Bert", "Albert"]
LATENT = ["DeepseekV3", "DeepseekV3FullQuery", "DeepseekV2"]


def self_attention(model):
    return [site for site in find_sites(model) if site.kind == "self"]


def of_registry(place, rows):
    return Columns.of_rows(rows.tensor.removeprefix(f"{place.name}.").removesuffix(".weight"), rows)


@pytest.mark.parametrize("name", REGISTERED)
def test_it_sees_what_the_registry_says(name):
    model = ZOO[name].build().eval()
    sites, places = self_attention(model), attention_places(model)
    probed = probe(model, sites)
    assert sites
    for site in sites:
        seen, place = probed[site.name], places[site.name]
        assert isinstance(seen, Projections)
        assert (seen.num_heads, seen.num_kv_heads, seen.head_dim) == (
            place.num_heads,
            place.num_kv_heads,
            place.head_dim,
        )
        for side, rows in ((seen.query, place.query_rows), (seen.key, place.key_rows)):
            expected = of_registry(place, rows)
            assert side.paths == expected.paths
            assert torch.equal(side.index, expected.index)


@pytest.mark.parametrize("name", LATENT)
def test_products_are_what_attention_sees_at_position_zero(name):
    model = ZOO[name].build().double().eval()
    sites = self_attention(model)
    probed = probe(model, sites)
    outputs = {site.name: {} for site in sites}
    calls = {}

    def note(site, path):
        return lambda module, args, output: outputs[site].update({path: output})

    def watch(call, proceed):
        calls[call.module] = call.query, call.key
        return proceed(call)

    for site in sites:
        for path in {*probed[site.name].query.paths, *probed[site.name].key.paths}:
            site.module.get_submodule(path).register_forward_hook(note(site.name, path))
    intercept(models_around(model, sites), {site.module: watch for site in sites}, role="mask")
    with torch.no_grad():
        model(tokens(3, 1))
    for site in sites:
        seen = probed[site.name]
        parts = {path: output.reshape(3, 1, -1) for path, output in outputs[site.name].items()}
        for columns, heads in zip((seen.query, seen.key), calls[site.module], strict=True):
            # rotations are computed in float32, at position 0 too
            torch.testing.assert_close(columns.take(parts), heads.transpose(1, 2).flatten(2), rtol=1e-6, atol=1e-6)


def test_the_model_is_as_it_was():
    model = tiny("DeepseekV3").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation, state = model.config._attn_implementation, torch.get_rng_state()
    probe(model, self_attention(model))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_does_not_read_tokens_says_so():
    model = ZOO["ViT"].build().eval()
    for why in probe(model, self_attention(model)).values():
        assert "did not run on one token" in why
