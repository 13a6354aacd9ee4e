import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from attnflow import masks
from tests.catalogue_cases import MASKS
from tests.refused import refused
from tests.strategies import square_masks


@settings(max_examples=40)
@given(square_masks(9).filter(lambda mask: mask.num_queries), st.sampled_from([1, 2, 3, 4, 16]))
def test_back_from_a_block_mask(mask, block):
    assert masks.from_block_mask(mask.block_mask(block)) == mask


@pytest.mark.parametrize("mask", [mask for mask in MASKS if 0 not in mask.shape][::7], ids=str)
def test_back_from_what_torch_makes(mask):
    made = create_block_mask(mask.mask_mod, 2, 3, *mask.shape, device="cpu", BLOCK_SIZE=4)
    assert masks.from_block_mask(made) == mask


def test_skipped_blocks_that_mask_mod_allows_are_named():
    longer = masks.causal(300).block_mask()
    window = masks.sliding_window(300, 20).block_mask()
    mixed = BlockMask.from_kv_blocks(
        window.kv_num_blocks,
        window.kv_indices,
        window.full_kv_num_blocks,
        window.full_kv_indices,
        mask_mod=longer.mask_mod,
        seq_lengths=(300, 300),
    )
    with pytest.raises(
        ValueError,
        match=r"1 block contradicts the mask_mod: block \(2, 0\) of queries 256-299 and keys 0-127 is skipped, and "
        r"mask_mod allows query 256, key 0",
    ):
        masks.from_block_mask(mixed)


def test_full_blocks_that_mask_mod_forbids_are_named():
    n = 256
    full, window = masks.full(n).block_mask(64), masks.sliding_window(n, 65).block_mask(64)
    mixed = BlockMask.from_kv_blocks(
        full.kv_num_blocks,
        full.kv_indices,
        full.full_kv_num_blocks,
        full.full_kv_indices,
        BLOCK_SIZE=64,
        mask_mod=window.mask_mod,
        seq_lengths=(n, n),
    )
    with pytest.raises(
        ValueError, match=r"16 blocks contradict.*is full, and mask_mod forbids query 0, key 1.*11 more"
    ):
        masks.from_block_mask(mixed)


def test_a_block_that_is_listed_twice_is_named():
    made = masks.causal(8).block_mask(4)
    again = BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        made.kv_num_blocks,
        made.kv_indices,
        BLOCK_SIZE=4,
        mask_mod=made.mask_mod,
        seq_lengths=(8, 8),
    )
    with pytest.raises(ValueError, match="is listed twice"):
        masks.from_block_mask(again)


def test_tables_without_a_mask_mod_are_the_mask():
    made = masks.block_causal(12, 4).block_mask(4)
    bare = BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        made.full_kv_num_blocks,
        made.full_kv_indices,
        BLOCK_SIZE=4,
        seq_lengths=(12, 12),
    )
    assert masks.from_block_mask(bare) == masks.block_causal(12, 4)


def test_blocks_that_are_larger_than_the_sequence():
    table = torch.from_numpy(np.tri(5, 7, dtype=np.bool_))
    assert masks.from_block_mask(masks.from_dense(table).block_mask(128)) == masks.from_dense(table)


def test_sequences_and_heads_of_their_own():
    made = create_block_mask(lambda b, h, q, k: q >= k + h + 2 * b, 2, 2, 7, 7, device="cpu", BLOCK_SIZE=2)
    grid = masks.from_block_mask(made)
    assert grid.shape == (2, 2, 7, 7)
    for b, h in np.ndindex(2, 2):
        assert grid[b, h] == masks.from_mask_mod(lambda _, __, q, k, s=h + 2 * b: q >= k + s, 7)
    assert masks.from_block_mask(grid.block_mask(4)) == grid


def test_a_slice_has_no_mask_mod():
    with pytest.raises(ValueError, match="expected a whole BlockMask, got a slice"):
        masks.from_block_mask(masks.causal(6).block_mask(2)[:, :, 0])


def test_dense_tables_of_several_sequences():
    table = masks.butterfly(3).dense()
    assert masks.from_dense(table.expand(2, 3, 7, 7)) == masks.from_dense(table[None]) == masks.butterfly(3)


def test_what_is_no_block_mask():
    with refused(TypeError, "from_dense"):
        masks.from_block_mask(torch.ones(3, 3, dtype=torch.bool))
