"""Masks by sequence and by head, against their dense tables."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from attnflow import masks
from attnflow.masks.batches import MaskGrid
from attnflow.masks.flex import allowed_of_rows, block_counts_of_rows, block_mask_of_rows
from tests.masks.test_flex import assert_same_block_mask
from tests.strategies import square_masks


@dataclass
class Rows:
    """One to three square masks of any lengths; made into a batch outside of the strategy, where beartype may draw."""

    masks: list[masks.Mask]
    heads: int
    size: int | None

    def grid(self) -> MaskGrid:
        rows = [masks.per_head([mask, ~mask][: self.heads]) for mask in self.masks]
        return masks.batch(rows, size=self.size)


grids = st.builds(
    Rows, st.lists(square_masks(9), min_size=1, max_size=3), st.sampled_from([1, 2]), st.sampled_from([None, 12])
)


def padded(grid: MaskGrid) -> torch.Tensor:
    """The definition: each mask in its corner, the pads behind it on the diagonal."""
    batch, heads, queries, _ = grid.shape
    table = torch.zeros(grid.shape, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            mask = grid[b, h]
            table[b, h, : mask.num_queries, : mask.num_keys] = mask.dense()
            if mask.num_queries == mask.num_keys:
                extra = torch.arange(mask.num_queries, queries)
                table[b, h, extra, extra] = True
    return table


@given(grids)
def test_every_form_is_the_same_relation(rows):
    grid = rows.grid()
    expected = padded(grid)
    assert torch.equal(grid.dense(), expected)
    table = grid.row_intervals()
    assert table.dtype == torch.int32
    assert table.shape[2] not in (1, grid.num_queries)
    assert torch.equal(allowed_of_rows(table, grid.num_keys), expected)
    if 0 not in grid.shape:
        places = torch.meshgrid(*(torch.arange(size) for size in grid.shape), indexing="ij")
        assert torch.equal(grid.mask_mod(*places), expected)


@given(grids, st.sampled_from([(1, 1), (2, 3), (5, 4), (16, 16)]))
def test_block_masks_are_those_of_torch(rows, blocks):
    grid = rows.grid()
    if 0 in grid.shape:
        with pytest.raises(ValueError, match="at least one query and one key"):
            grid.block_mask()
        return
    actual = grid.block_mask(blocks)
    expected = create_block_mask(grid.mask_mod, *grid.shape, device="cpu", BLOCK_SIZE=blocks)
    assert actual.shape == expected.shape
    assert_same_block_mask(actual, expected)


def test_equality_and_pickles():
    heads = masks.per_head([masks.causal(5), masks.sliding_window(5, 2)])
    batch = masks.batch([heads, masks.per_head([masks.document([1, 2]), masks.causal(3)])])
    assert batch[1, 0] == masks.document([1, 2])
    assert batch == masks.batch([heads, masks.per_head([masks.document([1, 2]), masks.full(3) & masks.causal(3)])])
    assert (heads == batch) is False
    assert heads != masks.causal(5)
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert hash(pickle.loads(pickle.dumps(batch))) == hash(batch)
    assert repr(batch).startswith("<masks of 2 sequences x 2 heads, 5 positions: causal(n=5), sliding_window(n=5")


def test_rows_of_many_intervals_and_permuted_keys():
    """Over 32 intervals a row the kernel looks up bits; a permuted mask keeps its few intervals."""
    scattered = masks.from_edges([(q, k) for q in range(80) for k in range(q % 2, 80, 2)], 80)
    grid = masks.batch([scattered, masks.causal(63)])
    assert grid.row_intervals().shape == (2, 1, 128, 80)
    permuted = masks.batch([masks.permutation_lm(np.random.default_rng(0).permutation(200)), masks.causal(127)])
    assert permuted.row_intervals().shape == (2, 1, 5, 400)
    for each in (grid, permuted):
        places = torch.meshgrid(*(torch.arange(size) for size in each.shape), indexing="ij")
        assert torch.equal(each.mask_mod(*places), padded(each))
        expected = create_block_mask(each.mask_mod, *each.shape, device="cpu", BLOCK_SIZE=16)
        assert_same_block_mask(each.block_mask(16), expected)


def test_room_for_intervals_comes_in_powers_of_two_and_is_never_the_number_of_queries():
    assert masks.batch([masks.document([2, 3]), masks.causal(4)]).row_intervals().shape == (2, 1, 2, 5)
    assert masks.batch([masks.causal(5)]).row_intervals(min_width=3).shape == (1, 1, 8, 5)
    assert masks.batch([masks.causal(2)]).row_intervals().shape == (1, 1, 4, 2)
    assert masks.batch([masks.block_two_stream(4, 2)]).row_intervals().shape == (1, 1, 4, 12)


def test_masks_that_are_not_square():
    """Cross-attention: a pad attends to nothing, and nothing attends to it."""
    grid = masks.batch([masks.full(2)[:1, :], masks.from_edges([(1, 2), (0, 0)], 2, 3)])
    assert grid.shape == (2, 1, 2, 3)
    assert torch.equal(grid.dense(), padded(grid))
    assert torch.equal(allowed_of_rows(grid.row_intervals(), 3), grid.dense())
    permuted = masks.batch([grid[1, 0].permute([1, 0], keys=[2, 0, 1])])
    assert torch.equal(allowed_of_rows(permuted.row_intervals(), 3), permuted.dense())


def test_block_counts_at_length_take_no_table_of_pairs():
    grid = masks.batch([masks.causal(32768), masks.document([1000] * 32), masks.sliding_window(30000, 500)])
    counts = block_counts_of_rows(grid.row_intervals(), 32768)
    for b in range(3):
        assert counts[b, 0].sum() == grid[b, 0].nnz + 32768 - grid[b, 0].num_queries
    assert block_mask_of_rows(grid.row_intervals(), 32768).kv_num_blocks[0, 0].tolist() == [1] * 256
