"""The numbers of a report, against dense tables and brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks, testing
from attnflow.masks.costs import CostModel, block_sparsity, mask_memory
from attnflow.order import analyze
from attnflow.report.mask import computed_pairs
from attnflow.report.mask_picture import block_sizes, grid, square_grid, ticks
from attnflow.report.order import growth
from tests.strategies import dense_masks, permuted_masks, square_masks


@settings(max_examples=100)
@given(st.one_of(dense_masks(9), permuted_masks(9)), st.integers(1, 11), st.integers(1, 11))
def test_a_grid_counts_the_pairs_of_each_cell(mask, query_step, key_step):
    table, cells = mask.dense().numpy(), grid(mask, query_step, key_step)
    rows, columns = (-(-size // step) for size, step in zip(mask.shape, (query_step, key_step), strict=True))
    assert cells.counts.shape == (rows, columns)
    for r in range(rows):
        for c in range(columns):
            part = table[r * query_step : (r + 1) * query_step, c * key_step : (c + 1) * key_step]
            assert cells.counts[r, c] == part.sum()
            assert cells.pairs[r, c] == part.size


def test_levels_keep_nothing_and_everything_apart():
    table = torch.ones(8, 16, dtype=torch.bool)
    table[0, 0] = False  # almost all
    table[:, 8:] = False
    table[5, 9] = True  # almost nothing
    levels = square_grid(masks.from_dense(table), 2).levels(9)
    assert levels.tolist() == [[8, 1]]
    assert square_grid(masks.full(8), 2).levels(9).tolist() == [[9, 9], [9, 9]]
    assert square_grid(~masks.full(8), 2).levels(9).tolist() == [[0, 0], [0, 0]]


@given(st.integers(0, 200_000), st.integers(2, 9))
def test_ticks_are_few_and_span_the_axis(size, most):
    found = ticks(size, most)
    assert found == sorted(set(found))
    assert len(found) <= most
    assert found[:1] == [0][:size]
    assert found[-1:] == ([size - 1] if size else [])


@settings(max_examples=100)
@given(square_masks(9))
def test_growth_is_the_size_of_each_power(mask):
    flow = analyze(mask)
    if not flow.size:
        return
    sizes, positions = growth(flow)
    assert positions.tolist() == list(range(flow.size))
    assert len(sizes) in (flow.depth, flow.depth + 1)  # depth is at least 1, also where nothing ever grows
    for layers, row in enumerate(sizes):
        assert row.tolist() == testing.power(mask.dense(), layers).sum(axis=1).tolist()


def test_growth_of_a_stack_follows_its_layers():
    stack = [masks.sliding_window(12, 2), masks.causal(12), masks.sliding_window(12, 3, causal=False)]
    for layers, row in enumerate(growth(analyze(stack))[0]):
        expected = testing.product([mask.dense() for mask in stack[:layers]]) if layers else np.eye(12, dtype=bool)
        assert row.tolist() == expected.sum(axis=1).tolist()


def test_growth_of_a_long_sequence_is_sampled_from_end_to_end():
    flow = analyze(masks.sliding_window(2000, 101))
    sizes, positions = growth(flow)
    assert len(positions) < flow.size
    assert (positions[0], positions[-1]) == (0, 1999)
    assert len(sizes) - 1 == flow.depth == 20
    assert np.array_equal(sizes, np.minimum(positions[None] + 1, 1 + 100 * np.arange(21)[:, None]))


@settings(max_examples=100)
@given(st.one_of(dense_masks(9), permuted_masks(9)), st.integers(1, 10))
def test_block_sparsity_is_that_of_the_block_mask(mask, block):
    if 0 in mask.shape:
        return
    found, torch_mask = block_sparsity(mask, block), mask.block_mask(block)
    assert found.full == int(torch_mask.full_kv_num_blocks.sum())
    assert found.partial == int(torch_mask.kv_num_blocks.sum())
    assert found.total == -(-mask.num_queries // block) * -(-mask.num_keys // block)
    kept = found.full + found.partial
    assert found.used == pytest.approx(mask.nnz / (kept * block * block) if kept else 0.0)


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, [128]), (10, [128, 4]), (64, [128, 32, 16]), (1024, [128, 64, 32]), (9999, [128])]
)
def test_short_sequences_get_smaller_blocks(n, sizes):
    assert block_sizes(masks.causal(n)) == sizes


def test_prices_state_their_formula():
    model = CostModel(num_layers=3, num_heads=2, head_dim=5, bytes_per_score=4)
    pairs = sum(min(10, q + 1) for q in range(300))
    assert computed_pairs(masks.sliding_window(300, 10)) == {
        "every pair": 300 * 300,
        "causal pairs": 300 * 301 // 2,
        "this mask's pairs": pairs,
        "its blocks of 128": 5 * 128 * 128,  # three on the diagonal, two below it
    }
    assert "causal pairs" not in computed_pairs(masks.full(3, 5))
    assert (model.flops(pairs), model.score_bytes(pairs)) == (4 * 5 * 2 * 3 * pairs, 4 * 2 * pairs)
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        CostModel(head_dim=0)


def test_memory_of_a_mask():
    memory = mask_memory(masks.causal(1024))
    assert memory["intervals"] == 8 * 1025 + 4 * 1024 + 4 * 1024
    block_mask = masks.causal(1024).block_mask()
    parts = [getattr(block_mask, name) for name in dir(block_mask) if name.endswith(("num_blocks", "_indices"))]
    assert memory["blocks"] == sum(part.nbytes for part in parts if part is not None)
