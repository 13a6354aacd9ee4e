import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow import masks
from attnflow.masks.costs import Calibration
from tests.refused import refused
from tests.strategies import dense_masks

FAST = Calibration("cpu", 64, eager=3e-9, sdpa=2e-9, flex=1e-9, flex_start=1e-4)


@given(dense_masks(9), st.sampled_from([1, 2, 3, 128]))
def test_blocks_and_work_are_those_of_the_block_mask(mask, block):
    result = masks.cost(mask, num_heads=3, head_dim=8, block_size=block)
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
    memory = {each.backend: each.memory for each in masks.cost(mask, num_heads=heads, bytes_per_value=2).backends}
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


def test_where_flex_begins_to_pay():
    causal = masks.cost(masks.causal(4096), calibrate=FAST)
    assert causal.seconds == pytest.approx(1e-4 + 1e-9 * causal.chosen.pairs)
    assert masks.cost(masks.causal(4096), "sdpa", calibrate=FAST).seconds == pytest.approx(2e-9 * 4096**2)
    assert causal.calibration == FAST
    n = causal.flex_pays_from
    assert n**2 * 2e-9 == pytest.approx(1e-4 + 1e-9 * n**2 * (1 - causal.skipped))
    assert causal.flex_pays_below == 1.0
    slow = Calibration("cpu", 64, eager=3e-9, sdpa=1e-9, flex=4e-9, flex_start=0.0)
    assert masks.cost(masks.causal(4096), calibrate=slow).flex_pays_from == float("inf")
    assert masks.cost(masks.causal(4096), calibrate=slow).flex_pays_below == 0.25
    assert masks.cost(masks.sliding_window(4096, 128), calibrate=slow).flex_pays_from == 0.0
    uncalibrated = masks.cost(masks.causal(9))
    assert (uncalibrated.seconds, uncalibrated.flex_pays_from, uncalibrated.flex_pays_below) == (None, None, None)


def test_bad_arguments():
    mask = masks.causal(4)
    with refused(ValueError, "backend must be one of eager, sdpa, flex, got 'flash'"):
        masks.cost(mask, "flash")
    with pytest.raises(ValueError, match="head_dim 32, got one for 64"):
        masks.cost(mask, head_dim=32, calibrate=FAST)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        masks.cost(mask, num_heads=0)
    with pytest.raises(ValueError, match="device must be one of"):
        masks.cost(mask, calibrate=True, device="tpu")
    with refused(TypeError, "from_dense"):
        masks.cost(mask.dense())


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch, at compilation
def test_a_short_run_on_this_machine():
    result = masks.cost(masks.sliding_window(2048, 64), calibrate=True)
    assert all(each.seconds > 0 for each in result.backends)
    again = masks.cost(masks.causal(2048), calibrate=result.calibration)
    assert again.calibration is result.calibration
    assert type(result).from_json(result.to_json()) == result


PARTS = [masks.causal(300), masks.sliding_window(300, 20), masks.document([100, 200])]


@pytest.mark.parametrize("grid", [masks.batch(PARTS), masks.per_head(PARTS)], ids=["batch", "heads"])
def test_masks_of_a_batch_and_of_heads_are_added_up(grid):
    heads = 1 if grid.shape[0] > 1 else 3
    fast = Calibration("cpu", 8, 3e-9, 2e-9, 1e-9, 0.0)
    options = {"head_dim": 8, "block_size": 64, "calibrate": fast}
    whole, parts = masks.cost(grid, **options), [masks.cost(part, **options) for part in PARTS]
    assert (whole.num_heads, whole.num_sequences) == (heads, 3 // heads)
    assert whole.allowed_pairs == sum(part.allowed_pairs for part in parts)
    assert whole.blocks.full == sum(part.blocks.full for part in parts)
    assert whole.blocks.used == pytest.approx(whole.allowed_pairs / (whole.blocks.computed * 64**2))
    for number, each in enumerate(whole.backends):
        own = [part.backends[number] for part in parts]
        assert (each.pairs, each.flops) == (sum(one.pairs for one in own), sum(one.flops for one in own))
        assert each.seconds == pytest.approx(sum(one.seconds for one in own))
        if each.backend != "flex":
            assert each.memory == sum(one.memory for one in own)
    made = grid.block_mask(64)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    tables = [getattr(made, name) for name in names]
    tables += [made.q_num_blocks, made.q_indices, made.full_q_num_blocks, made.full_q_indices]
    captured = [cell.cell_contents for cell in made.mask_mod.__closure__ if torch.is_tensor(cell.cell_contents)]
    assert masks.cost(grid, block_size=64).memory == sum(tensor.nbytes for tensor in (*tables, *captured))
    assert masks.cost(grid, num_heads=3, head_dim=8, block_size=64).flops == whole.flops * (3 // heads)


def test_padding_is_computed_and_not_allowed():
    grid = masks.batch([masks.causal(200), masks.causal(50)])
    result = masks.cost(grid, block_size=64)
    assert result.allowed_pairs == masks.causal(200).nnz + masks.causal(50).nnz
    made = grid.block_mask(64)
    assert result.blocks.computed == int(made.full_kv_num_blocks.sum() + made.kv_num_blocks.sum())


def test_heads_other_than_those_of_the_masks_are_refused():
    with refused(ValueError, "these masks are for 3 heads, one each, got num_heads=4"):
        masks.cost(masks.per_head(PARTS), num_heads=4)
    with refused(TypeError, "a plan is of one sequence and one mask"):
        masks.plan(masks.batch(PARTS), 2)
