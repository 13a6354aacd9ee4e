"""Every catalogue mask is the relation that its docstring states."""

import numpy as np
import pytest
import torch

from attnflow import masks
from attnflow.masks.registry import named_masks
from tests.catalogue_cases import CASES, IDS, big_bird_blocks


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_mask_is_its_definition(case):
    assert case.mask.shape == case.size
    expected = case.table()
    assert np.array_equal(case.mask.dense().numpy(), expected)
    assert case.mask.nnz == expected.sum()
    assert case.mask.row_counts().tolist() == expected.sum(axis=1).tolist()
    for q in range(case.size[0]):
        assert case.mask.keys(q).tolist() == np.flatnonzero(expected[q]).tolist()
        assert all(case.mask.allows(q, k) == expected[q, k] for k in range(case.size[1]))


def test_every_maker_of_the_catalogue_has_a_case():
    assert {case.mask.name for case in CASES} == set(named_masks())
    assert set(named_masks()) <= set(masks.__all__)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_repr_rebuilds_the_mask(case):
    mask = case.mask
    if "..." not in repr(mask):
        assert eval(repr(mask), {name: getattr(masks, name) for name in masks.__all__}) == mask


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "block", "num_global", "num_window", "num_random"), [(12, 2, 1, 1, 2), (10, 1, 0, 3, 4)])
def test_big_bird_draws_random_blocks_beside_the_fixed_ones(n, block, num_global, num_window, num_random, seed):
    mask = masks.big_bird(n, block, num_global, num_window, num_random, seed)
    fixed = big_bird_blocks(block, num_global, num_window)
    count = n // block
    drawn_rows = set()
    for row in range(count):
        allowed = {k // block for k in mask.keys(row * block).tolist()}
        kept = {k for k in range(count) if fixed(row * block, k * block)}
        assert kept <= allowed
        assert len(allowed - kept) == min(num_random, count - len(kept))
        drawn_rows.add(frozenset(allowed - kept))
        for q in range(row * block, (row + 1) * block):  # whole blocks
            assert mask.keys(q).tolist() == [k * block + i for k in sorted(allowed) for i in range(block)]
    assert len(drawn_rows) > 2


def test_special_cases_are_one_another():
    assert masks.sliding_window(6, 6) == masks.causal(6) == masks.document([6]) == masks.block_causal(6, 1)
    assert masks.prefix_lm(6, 6) == masks.full(6) == masks.block_causal(6, 6) == masks.document([6], inner="full")
    assert masks.prefix_lm(6, 0) == masks.causal(6) == masks.tree([-1, 0, 1, 2, 3, 4])
    assert masks.attention_sink(6, 0, 3) == masks.sliding_window(6, 3) == masks.dilated_window(6, 3, 1)
    assert masks.look_ahead(6, 1) == masks.causal(6)
    assert masks.longformer(6, 2, []) == masks.sliding_window(6, 2, causal=False)


def test_sequences_may_be_arrays_or_tensors():
    parents = [-1, 0, 0, 1]
    assert masks.tree(np.array(parents)) == masks.tree(torch.tensor(parents)) == masks.tree(tuple(parents))
    assert masks.document(torch.tensor([2, 1])) == masks.document(range(2, 0, -1))


@pytest.mark.parametrize(("num_blocks", "block"), [(2, 1), (3, 2), (4, 3)])
def test_block_two_stream_is_block_diffusion_without_first_noised_and_last_clean_block(num_blocks, block):
    diffusion = masks.block_diffusion(num_blocks, block)
    clean = torch.arange(num_blocks * block, (2 * num_blocks - 1) * block)
    noised = torch.arange(block, num_blocks * block)
    kept = torch.cat([clean, noised])
    assert masks.from_dense(diffusion.dense()[kept][:, kept]) == masks.block_two_stream(num_blocks, block)
