"""The forms of a mask for one attention call: dense crops and block masks, against their definitions."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import attnflow as af
from attnflow.masks.hf.attention import Positions
from attnflow.masks.hf.forms import GridForms, Span
from attnflow.models.passes.mask_request import MaskRequest
from tests.strategies import square_masks

TABLES = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "full_q_num_blocks"]
CPU = torch.device("cpu")


@st.composite
def calls(draw, max_size=8):
    """(mask, first query, queries, keys, padding or None): a call of a model with a dynamic or static cache."""
    mask = draw(square_masks(max_size).filter(lambda mask: mask.num_queries > 0))
    size = draw(st.integers(1, mask.num_queries))
    first = draw(st.integers(0, size - 1))
    keys = size + draw(st.integers(0, 3))
    batch = draw(st.integers(1, 3))
    rows = st.lists(st.booleans(), min_size=keys, max_size=keys)
    padding = draw(st.none() | st.lists(rows, min_size=batch, max_size=batch))
    return mask, first, size - first, keys, None if padding is None else torch.tensor(padding)


def expected(mask, first, queries, keys, padding):
    """From the definition, one pair at a time."""
    batch = 1 if padding is None else len(padding)
    result = np.zeros((batch, queries, keys), dtype=bool)
    for b in range(batch):
        real = np.ones(keys, dtype=bool) if padding is None else padding[b].numpy()
        left = keys if not real.any() else int(real.argmax())
        if padding is None or real[: first + queries].all():
            left = 0
        for q in range(queries):
            for k in range(min(first + queries, keys)):  # later slots are not written
                query, key = first + q - left, k - left
                if real[k] and query >= 0 and key >= 0 and key < mask.num_keys and query < mask.num_queries:
                    result[b, q, k] = mask.allows(query, key)
    return result


def native(call, implementation, dtype=torch.float64):
    mask, first, queries, keys, padding = call
    request = MaskRequest(1 if padding is None else len(padding), queries, keys, first, 0, padding)
    return Positions(request).native(GridForms.of(mask), False, True, implementation, CPU, dtype)


@given(calls())
@example((af.masks.full(4), 0, 2, 4, torch.tensor([[False, True, True, True]])))  # a real key in a slot not written
def test_dense_forms(call):
    wanted = torch.from_numpy(expected(*call))
    for implementation in ("sdpa", "eager"):
        found, empty = native(call, implementation)
        allowed = found if implementation == "sdpa" else found == 0
        shut = torch.zeros(len(allowed), call[2], dtype=torch.bool) if empty is None else empty[:, 0]
        assert torch.equal((allowed[:, 0] & ~shut[..., None]).expand_as(wanted), wanted)
        assert torch.equal(shut.expand(wanted.shape[:2]), ~wanted.any(dim=-1))
        assert allowed.any(dim=-1).all()  # no softmax over nothing
        assert (found.dtype, found.shape[1]) == ((torch.bool, 1) if implementation == "sdpa" else (torch.float64, 1))


@settings(max_examples=30)  # torch takes 0.3 s for its block mask
@given(calls())
def test_block_masks_are_those_of_torch(call):
    _, _, queries, keys, _ = call
    wanted = torch.from_numpy(expected(*call))
    ours, empty = native(call, "flex_attention")
    assert empty is None  # FlexAttention gives 0 there itself
    size = len(wanted)
    oracle = create_block_mask(lambda b, h, q, k: wanted[b, q, k], size, None, queries, keys, device="cpu")
    assert ours.shape[-2:] == (queries, keys)
    for name in TABLES:
        found, right = getattr(ours, name), getattr(oracle, name)
        assert torch.equal(found.expand_as(right), right), name
    b, q, k = torch.meshgrid(torch.arange(size), torch.arange(queries), torch.arange(keys), indexing="ij")
    assert torch.equal(ours.mask_mod(b, torch.zeros_like(b), q, k), wanted)


def test_block_masks_of_longer_padded_batches_are_exact():
    mask, n = af.masks.sliding_window(300, 70), 260
    padding = torch.ones(3, n, dtype=torch.bool)
    padding[1, :131] = False
    padding[2, 140:] = False
    call = (mask, 0, n, n, padding)
    wanted = torch.zeros(3, n, n, dtype=torch.bool)
    dense = mask.dense()
    wanted[0], wanted[1, 131:, 131:] = dense[:n, :n], dense[:129, :129]
    wanted[2] = dense[:n, :n] & padding[2]
    ours, _ = native(call, "flex_attention")
    oracle = create_block_mask(lambda b, h, q, k: wanted[b, q, k], 3, None, n, n, device="cpu")
    for name in TABLES:
        assert torch.equal(getattr(ours, name), getattr(oracle, name)), name
    assert int(oracle.full_kv_num_blocks.sum()) < int(oracle.kv_num_blocks.sum())


def test_flex_attention_never_builds_a_table_of_all_pairs():
    forms = GridForms.of(af.masks.butterfly(10_000))  # 900 MB as a table
    size = forms.mask.num_queries
    found = forms.block_mask(Span(0, size, 0, size, size), CPU)
    assert found.shape[-2:] == (size, size)
    assert forms.parts[0][0]._dense == {}
    assert forms.block_mask(Span(0, size, 0, size, size), CPU) is found  # kept
    padding = torch.ones(1, size, dtype=torch.bool)
    padding[0, size - 5 :] = False
    padded = forms.padded_block_mask(Span(0, size, 0, size, size), padding, (0,), False, CPU)
    assert padded.shape[-2:] == (size, size)
