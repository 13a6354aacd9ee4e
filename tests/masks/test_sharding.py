import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow.masks.sharding import ShardPlan
from tests.masks import sharded_run
from tests.refused import refused
from tests.strategies import square_masks

SHARDINGS = ["contiguous", "head-tail", "document", "greedy"]


@settings(max_examples=60)
@given(square_masks(9), st.integers(1, 4), st.sampled_from(SHARDINGS))
def test_work_and_communication_pair_by_pair(mask, ranks, sharding):
    plan = masks.plan(mask, ranks, sharding, block_size=2)
    table = mask.dense().numpy()
    assert sorted(position for held in plan.positions for position in held) == list(range(mask.num_queries))
    needed = [np.flatnonzero(table[list(held)].any(axis=0)) for held in plan.positions]
    for each in plan.ranks:
        held = plan.positions[each.rank]
        own = set(held)
        assert each.queries == len(held)
        assert each.pairs == table[list(held)].sum()
        assert plan.keys(each.rank).tolist() == needed[each.rank].tolist()
        assert each.keys == len(needed[each.rank])
        assert each.received == len(set(needed[each.rank].tolist()) - own)
        others = [keys for rank, keys in enumerate(needed) if rank != each.rank]
        assert each.sent == sum(len(own & set(keys.tolist())) for keys in others)
        local = plan.local(each.rank).dense().numpy()
        assert np.array_equal(local, table[np.ix_(list(held), needed[each.rank])])
    assert plan.received == sum(each.sent for each in plan.ranks)
    if sharding == "document":
        assert plan.received == 0
    again = ShardPlan.from_json(plan.to_json())
    assert (again.positions, again.ranks, again.mask) == (plan.positions, plan.ranks, mask)


def test_what_each_sharding_is_good_for():
    n = 4096
    causal = {how: masks.plan(masks.causal(n), 4, how) for how in SHARDINGS}
    assert causal["contiguous"].imbalance == pytest.approx(1.75, rel=1e-3)
    assert causal["head-tail"].imbalance == 1.0
    assert causal["greedy"].imbalance < 1.05
    assert causal["document"].imbalance == 4.0
    window = {how: masks.plan(masks.sliding_window(n, 65), 4, how) for how in SHARDINGS}
    assert window["contiguous"].received == 3 * 64
    assert window["contiguous"].received < window["head-tail"].received < window["greedy"].received
    packed = masks.document([700, 300, 800, 200, 1000, 600, 496])
    assert max(each.pairs for each in masks.plan(packed, 4, "document").ranks) == 1000 * 1001 // 2
    assert {each.queries for each in causal["greedy"].ranks} == {n // 4}


def test_long_masks():
    for how in SHARDINGS:
        plan = masks.plan(masks.longformer(65_536, 512), 8, how)
        assert sum(each.pairs for each in plan.ranks) == plan.mask.nnz


def test_bad_arguments():
    with pytest.raises(ValueError, match="expected a square mask"):
        masks.plan(masks.full(2, 3), 2)
    with refused(ValueError, "sharding must be one of contiguous, head-tail, document, greedy, got 'ring'"):
        masks.plan(masks.causal(4), 2, "ring")
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        masks.plan(masks.causal(4), 0)
    with refused(TypeError, "from_dense"):
        masks.plan(masks.causal(4).dense(), 2)
    saved = masks.plan(masks.causal(4), 2).to_dict()
    with pytest.raises(ValueError, match="each of 4 positions at one rank"):
        ShardPlan.from_dict({**saved, "positions": [[0, 1], [2]]})


@pytest.mark.parametrize("sharding", ["head-tail", "document"])
def test_a_sharded_run_is_the_whole_run(sharding, tmp_path):
    """Two processes on this machine; each sees NaN where its plan says that it needs nothing."""
    mask = masks.document([9, 14, 8]) if sharding == "document" else masks.block_diffusion(4, 4)
    plan = masks.plan(mask, 2, sharding)
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "tests.masks.sharded_run"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "plan.json"), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], errors
    layers, inputs = sharded_run.layers_and_inputs(mask.num_queries)
    out, gradients = sharded_run.run(layers, inputs, mask.dense(), lambda held: held)
    for rank in range(2):
        saved = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        torch.testing.assert_close(saved["out"], out[list(plan.positions[rank])])
        for gradient, whole in zip(saved["gradients"], gradients, strict=True):
            torch.testing.assert_close(gradient, whole)
