"""`mask.cost` against torch's own tables, and `mask.plan` pair by pair and against a run on two processes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from tests.strategies import dense_masks, square_masks


@given(dense_masks(9), st.sampled_from([1, 2, 3, 128]))
def test_blocks_and_work_are_those_of_the_block_mask(mask, block):
    result = mask.cost(num_heads=3, head_dim=8, block_size=block)
    every = mask.num_queries * mask.num_keys
    by_name = {each.backend: each for each in result.backends}
    assert by_name["eager"].flops == by_name["sdpa"].flops == 4 * 8 * 3 * every
    if every:
        made = mask.block_mask(block)
        full, partial = int(made.full_kv_num_blocks.sum()), int(made.kv_num_blocks.sum())
        assert (result.blocks.full, result.blocks.partial) == (full, partial)
        assert result.skipped == pytest.approx(1 - (full + partial) / made.kv_indices.numel())
        assert result.flops == 4 * 8 * 3 * min((full + partial) * block**2, every)
    assert mask.nnz <= by_name["flex"].pairs <= every


def test_memory_is_that_of_the_tensors():
    n, heads = 512, 3
    mask = masks.longformer(n, 20, [0, 100])
    memory = {each.backend: each.memory for each in mask.cost(num_heads=heads, bytes_per_value=2).backends}
    scores, table = torch.empty(heads, n, n, dtype=torch.bfloat16), mask.dense()
    additive = torch.empty(n, n, dtype=torch.bfloat16)
    assert memory["eager"] == scores.nbytes + scores.float().nbytes + additive.nbytes
    assert memory["sdpa"] == table.nbytes + additive.nbytes
    made = mask.block_mask()
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    tables = [getattr(made, name) for name in names]
    tables += [made.q_num_blocks, made.q_indices, made.full_q_num_blocks, made.full_q_indices]
    captured = [cell.cell_contents for cell in made.mask_mod.__closure__ if torch.is_tensor(cell.cell_contents)]
    assert memory["flex"] == sum(tensor.nbytes for tensor in (*tables, *captured))


SHARDINGS = ["contiguous", "head-tail", "document", "greedy"]


@settings(max_examples=60)
@given(square_masks(9), st.integers(1, 4), st.sampled_from(SHARDINGS))
def test_work_and_communication_pair_by_pair(mask, ranks, sharding):
    plan = mask.plan(ranks, sharding, block_size=2)
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


def test_what_each_sharding_is_good_for():
    n = 4096
    causal = {how: masks.causal(n).plan(4, how) for how in SHARDINGS}
    assert causal["contiguous"].imbalance == pytest.approx(1.75, rel=1e-3)
    assert causal["head-tail"].imbalance == 1.0
    assert causal["greedy"].imbalance < 1.05
    assert causal["document"].imbalance == 4.0
    window = {how: masks.sliding_window(n, 65).plan(4, how) for how in SHARDINGS}
    assert window["contiguous"].received == 3 * 64
    assert window["contiguous"].received < window["head-tail"].received < window["greedy"].received
    packed = masks.document([700, 300, 800, 200, 1000, 600, 496])
    assert max(each.pairs for each in packed.plan(4, "document").ranks) == 1000 * 1001 // 2
    assert {each.queries for each in causal["greedy"].ranks} == {n // 4}


def test_long_masks():
    for how in SHARDINGS:
        plan = masks.longformer(65_536, 512).plan(8, how)
        assert sum(each.pairs for each in plan.ranks) == plan.mask.nnz
