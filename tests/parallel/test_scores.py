"""Scores of sharded models of many families, on a mesh of one rank: those of the same model in one piece."""

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import attnflow as af
from tests.models import ZOO

# fused, interleaved and grouped queries and keys; norms after, of heads, of a layer before; two towers; latent
FAMILIES = ["Llama", "GPT2", "GPTNeoX", "Phi3", "Qwen3", "Gemma2", "Olmo2", "Bert", "Albert", "T5", "DeepseekV2"]
TABLES = ["Llama", "GPT2", "GPTNeoX", "Phi3", "Qwen3", "Bert", "Olmo2"]  # which say the norms before attention


@pytest.fixture
def mesh() -> Generator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards of each parameter, without FSDP: no pass of the model runs."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))
    return model


def gained(name: str) -> nn.Module:
    model = ZOO[name].build().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) / 2)
    return model


def numbers(scores: Any) -> list[float]:
    return [number for row in scores for number in (row.symmetry, row.directionality, row.norm)]


@pytest.mark.parametrize(
    ("name", "shard", "fold"),
    [
        *((name, fully_shard, True) for name in FAMILIES),
        *((name, split, False) for name in FAMILIES),
        *((name, split, True) for name in TABLES),
    ],
)
def test_a_sharded_model_has_the_scores_of_the_whole_one(name, shard, fold, mesh):
    whole = af.geometry.score(gained(name), attention="all", fold=fold)
    got = af.geometry.score(shard(gained(name), mesh=mesh), attention="all", fold=fold)
    assert got.model == whole.model
    assert got.notes == whole.notes
    assert [(row.name, row.head, row.flags) for row in got] == [(row.name, row.head, row.flags) for row in whole]
    assert numbers(got) == pytest.approx(numbers(whole), rel=2e-5, abs=1e-6)  # gains that a pass shows


def test_norms_that_no_table_names_and_no_pass_shows_are_not_folded(mesh):
    found = af.geometry.score(split(gained("OPT"), mesh))
    assert found.notes[0].startswith("not folded: tensor parallelism leaves no process a whole pass, and no table says")
    assert numbers(found) == pytest.approx(numbers(af.geometry.score(gained("OPT"), fold=False)))
