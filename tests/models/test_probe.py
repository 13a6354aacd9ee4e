"""What queries and keys consist of: by the probe, with weights and without, and at the attention interface itself."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

from attnflow.models.anatomy.sites import find_sites, models_around
from attnflow.models.passes.interception import intercept
from attnflow.models.weights.attention import projections
from attnflow.models.weights.probe import Projections
from tests.models import ZOO, tokens

FAMILIES = ["Llama", "GPT2", "GPTNeoX", "Phi3", "OPT", "Qwen3", "Gemma2", "Qwen3Next", "FalconH1", "Bert", "Albert"]
LATENT = ["DeepseekV3", "DeepseekV3FullQuery", "DeepseekV2"]


def self_attention(model):
    return [site for site in find_sites(model) if site.kind == "self"]


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("name", "sharded"), [*((name, False) for name in FAMILIES), ("Llama", True), ("GPT2", True)])
def test_it_sees_the_same_where_the_weights_are_not_here(name, sharded, one_process):
    model = ZOO[name].build().eval()
    sites = self_attention(model)
    probed = projections(model, sites)
    empty = fully_shard(model, mesh=one_process) if sharded else model.to("meta")
    without = projections(empty, self_attention(empty))
    assert sites
    assert list(probed) == list(without)
    for seen, said in zip(probed.values(), without.values(), strict=True):
        assert isinstance(seen, Projections)
        assert isinstance(said, Projections)
        assert (seen.num_heads, seen.num_kv_heads, seen.head_dim) == (said.num_heads, said.num_kv_heads, said.head_dim)
        for ours, theirs in ((seen.query, said.query), (seen.key, said.key)):
            assert ours.paths == theirs.paths
            assert torch.equal(ours.index, theirs.index)


@pytest.mark.parametrize("name", LATENT)
def test_products_are_what_attention_sees_at_position_zero(name):
    model = ZOO[name].build().double().eval()
    sites = self_attention(model)
    probed = projections(model, sites)
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
    intercept(models_around(sites), {site.module: watch for site in sites}, role="mask")
    with torch.no_grad():
        model(tokens(3, 1))
    for site in sites:
        seen = probed[site.name]
        parts = {path: output.reshape(3, 1, -1) for path, output in outputs[site.name].items()}
        for columns, heads in zip((seen.query, seen.key), calls[site.module], strict=True):
            # rotations are computed in float32, at position 0 too
            torch.testing.assert_close(columns.take(parts), heads.transpose(1, 2).flatten(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["ViT", "Detr"])
def test_what_does_not_read_tokens_is_called_alone(name):
    model = ZOO[name].build().eval()
    found = projections(model, self_attention(model)).values()
    assert found
    for one in found:
        assert isinstance(one, Projections)
        heads, width = model.config.num_attention_heads, model.config.hidden_size
        assert (one.num_heads, one.head_dim) == (heads, width // heads)
