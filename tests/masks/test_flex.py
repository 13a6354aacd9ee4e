"""Compilation to FlexAttention: the same `mask_mod` and the same `BlockMask` as torch, without n x n."""

import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnflow import masks
from tests.catalogue_cases import MASKS
from tests.memory import PEAK
from tests.strategies import square_masks

NON_EMPTY = [mask for mask in MASKS if 0 not in mask.shape]
LARGER = [
    masks.causal(300),
    masks.full(257, 130),
    masks.sliding_window(300, 70),
    masks.dilated_window(257, 40, 3),
    masks.dilated_window(300, 300, 2, causal=False),
    masks.document(cu_seqlens=[0, 1, 101, 101, 256, 300]),
    masks.prefix_lm(260, 129),
    masks.global_tokens(200, [3, 150]),
    masks.longformer(200, 20, [0, 63, 64]),
    masks.big_bird(256, 16),
    masks.tree([-1, *(i // 2 for i in range(299))]),
    masks.tree([-1, *range(299)]),
    masks.permutation_lm([(7 * i) % 150 for i in range(150)]),
    masks.butterfly(90),
    masks.block_two_stream(9, 16, predict_first=True),
    masks.look_ahead(60, 4),
    masks.causal(300).permute([(7 * i) % 300 for i in range(300)]),
    masks.full(130, 257)[3:, 5:].permute(range(126, -1, -1)),
]
TABLES = [f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]


def grid(mask):
    """q, k index tensors that broadcast to the whole table."""
    return torch.arange(mask.num_queries)[:, None], torch.arange(mask.num_keys)[None, :]


def blocks_of(counts, indices):
    """The block numbers listed in each row, as sets: torch gives no meaning to their order or to what follows them."""
    return [
        set(row[:count].tolist()) for count, row in zip(counts.flatten().tolist(), indices.flatten(0, 2), strict=True)
    ]


def assert_same_block_mask(ours, theirs):
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for counts, indices in zip(TABLES[::2], TABLES[1::2], strict=True):
        mine, expected = ([getattr(m, counts), getattr(m, indices)] for m in (ours, theirs))
        for a, b in zip(mine, expected, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
        assert torch.equal(mine[0], expected[0])
        assert blocks_of(*mine) == blocks_of(*expected)


@pytest.mark.parametrize("mask", NON_EMPTY + LARGER, ids=lambda m: repr(m)[:60])
def test_mask_mod_is_the_relation(mask):
    zero = torch.zeros((), dtype=torch.int64)
    q, k = grid(mask)
    assert torch.equal(mask.mask_mod(zero, zero, q, k).expand(mask.shape), mask.dense())
    assert masks.from_mask_mod(mask.mask_mod, *mask.shape) == mask


@pytest.mark.parametrize("block_size", [128, 32, (64, 16), (1, 7)], ids=str)
@pytest.mark.parametrize("mask", NON_EMPTY[::3] + LARGER, ids=lambda m: repr(m)[:60])
def test_block_mask_is_torchs_where_blocks_do_not_divide_the_sequence(mask, block_size):
    theirs = create_block_mask(mask.mask_mod, None, None, *mask.shape, device="cpu", BLOCK_SIZE=block_size)
    assert_same_block_mask(mask.block_mask(block_size), theirs)


@given(square_masks(), st.integers(1, 9), st.integers(1, 9))
def test_block_mask_of_any_mask_is_torchs(mask, q_block, k_block):
    if mask.num_queries:
        theirs = create_block_mask(mask.mask_mod, None, None, *mask.shape, device="cpu", BLOCK_SIZE=(q_block, k_block))
        assert_same_block_mask(mask.block_mask((q_block, k_block)), theirs)


def many_intervals(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, n, generator=generator) < 0.5


@pytest.mark.parametrize("relabel", [False, True])
def test_rows_of_many_intervals_are_looked_up_bit_by_bit(relabel):
    allow = many_intervals(201)
    allow[5], allow[7] = True, False
    mask = masks.from_dense(allow)
    if relabel:
        order = torch.randperm(201)
        mask, allow = mask.permute(order), allow[order][:, order]
    zero = torch.zeros((), dtype=torch.int64)
    assert mask.mask_mod.__name__ == "look_up"
    assert torch.equal(mask.mask_mod(zero, zero, *grid(mask)), allow)
    assert inspect.getclosurevars(mask.mask_mod).nonlocals["bits"].nbytes == 201 * 26
    theirs = create_block_mask(mask.mask_mod, None, None, 201, 201, device="cpu")
    assert_same_block_mask(mask.block_mask(), theirs)


@pytest.mark.parametrize(
    "mask", [*NON_EMPTY, *LARGER, masks.from_dense(many_intervals(60))], ids=lambda m: repr(m)[:40]
)
def test_mask_mod_captures_tensors_and_no_numbers(mask):
    """A captured int is a constant of the compiled kernel: every new value would be a new compilation."""
    captured = inspect.getclosurevars(mask.mask_mod).nonlocals
    assert captured
    for name, value in captured.items():
        assert value is None or isinstance(value, torch.Tensor), (name, value)


def test_masks_on_one_device_share_their_captured_tensors():
    mask = masks.causal(8)
    assert mask.mask_mod is mask.mask_mod
    assert mask.block_mask(4).mask_mod is mask.mask_mod


@pytest.mark.parametrize(
    "mask", [masks.butterfly(20), masks.tree([-1, 0, 0, 1, 2, 2]), masks.block_two_stream(3, 5)], ids=lambda m: m.name
)
def test_flex_attention_under_the_block_mask_is_attention_under_the_relation(mask):
    n = mask.num_queries
    q, k, v = (torch.randn(1, 2, n, 8) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises, once per process, to compile
        actual = flex_attention(q, k, v, block_mask=mask.block_mask(16))
    torch.testing.assert_close(actual, expected)


LIMITED = f"""
{PEAK}
from torch.nn.attention import flex_attention
from attnflow.masks import *

n = 131072
for mask in (
    causal(n),
    sliding_window(n, 4096),
    dilated_window(n, 64, 2),
    prefix_lm(n, n // 2),
    document([1000] * 131),
    big_bird(n),
    longformer(n, 256, [0, 7]),
    butterfly(n // 3),
    tree([-1, *(i // 2 for i in range(n - 1))]),
    permutation_lm(range(n // 2)),
    block_diffusion(n // 64, 32),
    causal(n) & ~sliding_window(n, 9),
):
    block = mask.block_mask()
    assert int(block.kv_num_blocks.sum() + block.full_kv_num_blocks.sum()) > 0
print(peak())
"""


@pytest.mark.slow
def test_structured_masks_of_131072_tokens_never_become_a_table():
    """A table would take 17 GB; the process may not take 1 GB, torch included."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1024
