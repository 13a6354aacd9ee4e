import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from attnflow import masks
from tests.catalogue_cases import MASKS
from tests.strategies import dense_masks, square_masks


@settings(max_examples=40)
@given(square_masks(9).filter(lambda mask: mask.num_queries), st.sampled_from([1, 2, 3, 4, 16]))
def test_back_from_a_block_mask(mask, block):
    assert masks.from_block_mask(mask.block_mask(block)) == mask


@pytest.mark.parametrize("mask", [mask for mask in MASKS if 0 not in mask.shape][::7], ids=str)
def test_back_from_what_torch_makes(mask):
    made = create_block_mask(mask.mask_mod, 2, 3, *mask.shape, device="cpu", BLOCK_SIZE=4)
    assert masks.from_block_mask(made) == mask


def mixed(tables, mask_mod, block=64, twice=False):
    """The tables of one mask with the `mask_mod` of another; with `twice` each partial block is listed as full, too."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    chosen = [getattr(tables, name) for name in ((*names[:2], *names[:2]) if twice else names)]
    return BlockMask.from_kv_blocks(*chosen, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=tables.seq_lengths)


CAUSAL, WINDOW, FULL = (
    mask.block_mask(64) for mask in (masks.causal(300), masks.sliding_window(300, 20), masks.full(256))
)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (mixed(WINDOW, CAUSAL.mask_mod), r"block \(2, 0\) .* is skipped, but mask_mod allows query 128, key 0"),
        (mixed(FULL, WINDOW.mask_mod), r"block \(0, 0\) .* is full, but mask_mod forbids query 0, key 1"),
        (mixed(CAUSAL, CAUSAL.mask_mod, twice=True), r"block \(0, 0\) of sequence 0, head 0 is listed twice"),
        (masks.causal(6).block_mask(2)[:, :, 0], "expected a whole BlockMask, got a slice"),
    ],
)
def test_blocks_that_contradict_their_mask_mod_are_named(made, message):
    with pytest.raises(ValueError, match=message):
        masks.from_block_mask(made)


def test_tables_without_a_mask_mod_are_the_mask():
    mask = masks.block_causal(12, 4)
    assert masks.from_block_mask(mixed(mask.block_mask(4), None, 4)) == mask


def test_sequences_and_heads_of_their_own():
    made = create_block_mask(lambda b, h, q, k: q >= k + h + 2 * b, 2, 2, 7, 7, device="cpu", BLOCK_SIZE=2)
    grid = masks.from_block_mask(made)
    assert grid.shape == (2, 2, 7, 7)
    for b, h in np.ndindex(2, 2):
        assert grid[b, h] == masks.from_mask_mod(lambda _, __, q, k, s=h + 2 * b: q >= k + s, 7)
    assert masks.from_block_mask(grid.block_mask(4)) == grid


def test_dense_tables_of_several_sequences():
    table = masks.butterfly(3).dense()
    assert masks.from_dense(table.expand(2, 3, 7, 7)) == masks.from_dense(table[None]) == masks.butterfly(3)


@given(dense_masks(9), st.sampled_from([1, 2, 3, 128]))
def test_block_sparsity_is_that_of_the_block_mask(mask, block):
    counted = mask.block_sparsity(block)
    if 0 in mask.shape:
        assert (counted.total, counted.skipped, counted.used) == (0, 0.0, 0.0)
        return
    made = mask.block_mask(block)
    full, partial = int(made.full_kv_num_blocks.sum()), int(made.kv_num_blocks.sum())
    assert (counted.full, counted.partial, counted.computed) == (full, partial, full + partial)
    assert counted.total == made.kv_indices.numel()
    assert counted.skipped == pytest.approx(1 - (full + partial) / counted.total)
    assert counted.used == (mask.nnz / ((full + partial) * block**2) if full + partial else 0.0)
