import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow.masks import export
from attnflow.masks.export import NotExpressible
from tests.masks.export import decoders
from tests.strategies import square_masks

PACKED = [masks.causal(4), masks.document([2, 1]), masks.causal(1)]


def blocks(parts):
    return torch.block_diag(*(part.dense().int() for part in parts)).bool()


@pytest.mark.parametrize("make", [export.varlen, export.xformers, export.magi])
def test_a_batch_is_laid_end_to_end(make):
    form = make(masks.batch(PACKED))
    assert torch.equal(form.to_mask().dense(), blocks(PACKED))


def test_requests_of_several_lengths():
    """Chunks of prompts: each has fewer queries than keys, aligned at the last."""
    parts = [masks.causal(9)[6:, :], masks.causal(4), masks.causal(5)[4:, :]]
    form = export.varlen(masks.batch(parts))
    assert form.cu_seqlens_q.tolist() == [0, 3, 7, 8]
    assert form.cu_seqlens_k.tolist() == [0, 9, 13, 18]
    table = decoders.varlen(form.cu_seqlens_q.tolist(), form.cu_seqlens_k.tolist(), form.causal, form.window_size)
    assert np.array_equal(table, blocks(parts).numpy())
    with pytest.raises(NotExpressible, match="varlen cannot say 2 sequences end to end"):
        export.varlen(masks.batch([masks.sliding_window(9, 3)[6:, :], masks.causal(9)[2:, :]]))


@settings(max_examples=40)
@given(st.lists(square_masks(6).filter(lambda mask: mask.num_queries), min_size=2, max_size=3))
def test_any_batch(parts):
    grid = masks.batch(parts)
    form = export.flashinfer(grid)
    sizes = [-(-(part.num_queries**2) // 8) for part in parts]
    bits = np.split(form.packed_custom_mask.numpy(), np.cumsum(sizes)[:-1])
    for part, own in zip(parts, bits, strict=True):
        assert np.array_equal(np.packbits(part.dense().numpy().ravel(), bitorder="little"), own)
    assert form.to_mask() == grid
    assert torch.equal(export.magi(grid).to_mask().dense(), blocks(parts))
    try:
        rows = export.flashmask(grid)
    except NotExpressible:
        return
    assert torch.equal(rows.to_mask().dense(), grid.dense())
    for b, part in enumerate(grid.dense()):
        bounds = rows.startend_row_indices[b, 0].tolist()
        assert np.array_equal(decoders.flashmask(bounds, rows.causal, rows.num_queries), part[0].numpy())


@pytest.mark.parametrize(
    ("parts", "width", "causal"),
    [
        ([masks.causal(6), masks.sliding_window(6, 3)], 1, True),
        ([masks.causal(6), masks.causal(6) & ~masks.from_edges([(3, 1)], 6)], 2, True),
        ([masks.causal(6), masks.full(6)], 2, False),
        ([masks.prefix_lm(6, 3), masks.longformer(6, 2)], 4, False),
    ],
)
def test_heads_of_flashmask(parts, width, causal):
    heads = masks.per_head(parts)
    form = export.flashmask(heads)
    assert form.startend_row_indices.shape == (1, 2, 6, width)
    assert form.causal == causal
    assert form.to_mask() == heads
    assert torch.equal(type(form).from_json(form.to_json()).to_mask().dense(), heads.dense())
    with pytest.raises(ValueError, match="expected one mask, got"):
        masks.from_json(form.to_json())


@pytest.mark.parametrize("make", [export.varlen, export.xformers, export.magi, export.flashinfer])
def test_heads_that_share_a_mask_are_refused_where_they_differ(make):
    with pytest.raises(NotExpressible, match="query 2, key 0, but another head of sequence 0"):
        make(masks.per_head([masks.causal(4), masks.sliding_window(4, 2)]))


HEADS = [masks.causal(8), masks.sliding_window(8, 3), masks.full(8), masks.butterfly(4)[:8, :8]]


def test_splash_takes_a_mask_for_each_head():
    grid = masks.per_head(HEADS)
    form = export.splash(grid)
    assert form.to_mask() == grid
    assert str(form) == "SplashMask: MultiHeadMask of CausalMask, LocalMask, FullMask, NumpyMask"
    again = export.SplashMask.from_json(form.to_json())
    assert again.to_mask() == grid
    assert export.splash(masks.batch([grid, grid])).to_mask() == grid
    assert export.splash(masks.batch([HEADS[0]] * 2)).kind == "CausalMask"
    with pytest.raises(NotExpressible, match="sequence 0 does not agree with sequence 1") as refusal:
        export.splash(masks.batch([HEADS[0], HEADS[1]]))
    assert refusal.value.pair == HEADS[1].difference(HEADS[0], limit=1)[0]
    with pytest.raises(ValueError, match="these masks are for 4 heads, one each, got num_heads=3"):
        form.build(3)


def test_transformer_engine_takes_tables_by_sequence_and_by_head():
    for grid in (masks.per_head(HEADS), masks.batch(PACKED), masks.batch([masks.per_head(HEADS[:2])] * 3)):
        form = export.te(grid)
        assert form.attn_mask_type == "arbitrary"
        assert torch.equal(~form.attention_mask, grid.dense())
        assert torch.equal(form.to_mask().dense(), grid.dense())
        assert torch.equal(export.EngineMask.from_json(form.to_json()).attention_mask, form.attention_mask)
    assert export.te(masks.batch([HEADS[0]])).attn_mask_type == "causal"
