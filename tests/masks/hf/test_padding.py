"""A padded batch gives each row what it gives alone: leading pads do not count as positions, pads are never keys."""

import pytest
import torch

import attnflow as af
from tests.models import outputs, tiny, tokens

LENGTHS = (9, 6, 1)
SIZE = max(LENGTHS)
MASKS = {
    "causal": af.masks.causal(SIZE),
    "window": af.masks.sliding_window(SIZE, 3),
    "sink": af.masks.attention_sink(SIZE, 2, 2),
    "full": af.masks.full(SIZE),
    "prefix": af.masks.prefix_lm(SIZE, 4),
    "longformer": af.masks.longformer(SIZE, 2, [1]),
    "permuted": af.masks.causal(SIZE).permute([3, 1, 4, 0, 5, 8, 2, 6, 7]),
}


def padded(rows, side, extra=0):
    """(ids, attention mask, position ids) of a batch padded to the longest row plus `extra`."""
    width = SIZE + extra
    ids, real = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, where], real[i, where] = row, 1
    return ids, real, (real.cumsum(dim=1) - 1).clamp(min=0)


@pytest.mark.parametrize("name", ["Llama", "Bert", "GPT2", "LayoutLM"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", MASKS)
def test_each_row_is_what_it_is_alone(name, implementation, side, kind):
    model, mask = tiny(name), MASKS[kind]
    rows = [tokens(1, n)[0] for n in LENGTHS]
    ids, real, positions = padded(rows, side)
    with torch.no_grad(), af.masks.attach(model, mask, backend=implementation, crop=True):
        batch = outputs(model, input_ids=ids, attention_mask=real, position_ids=positions)
        for i, row in enumerate(rows):
            alone = outputs(model, input_ids=row[None])[0]
            torch.testing.assert_close(batch[i][real[i].bool()], alone, rtol=1e-6, atol=1e-6)
    assert batch.isfinite().all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_beyond_the_mask_is_allowed_and_tokens_are_not(side):
    model, mask = tiny("Llama"), af.masks.full(SIZE)
    rows = [tokens(1, n)[0] for n in LENGTHS]
    ids, real, positions = padded(rows, side, extra=3)
    with torch.no_grad(), af.masks.attach(model, mask, crop=True):
        batch = outputs(model, input_ids=ids, attention_mask=real, position_ids=positions)
        alone = outputs(model, input_ids=rows[1][None])[0]
        torch.testing.assert_close(batch[1][real[1].bool()], alone)
        with pytest.raises(ValueError, match=r"12 positions, but full.* covers 9"):
            outputs(model, input_ids=ids, attention_mask=torch.ones_like(ids))


def test_right_padding_needs_no_crop():
    """A padded batch is as long as its mask; that a row has fewer tokens is said by the attention mask."""
    model = tiny("Bert")
    rows = [tokens(1, n)[0] for n in LENGTHS]
    ids, real, positions = padded(rows, "right")
    with torch.no_grad(), af.masks.attach(model, af.masks.full(SIZE)):
        ours = outputs(model, input_ids=ids, attention_mask=real, position_ids=positions)
    with torch.no_grad():
        plain = outputs(model, input_ids=ids, attention_mask=real, position_ids=positions)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_a_long_mask_over_a_short_padded_batch():
    model, n = tiny("Llama"), 200_000  # 40 GB as a dense table
    rows = [tokens(1, length)[0] for length in LENGTHS]
    ids, real, positions = padded(rows, "left")
    with torch.no_grad():
        with af.masks.attach(model, MASKS["sink"]):
            expected = outputs(model, input_ids=ids, attention_mask=real, position_ids=positions)
        with af.masks.attach(model, af.masks.attention_sink(n, 2, 2)):
            assert torch.equal(outputs(model, input_ids=ids, attention_mask=real, position_ids=positions), expected)


def test_holes_keep_their_positions():
    """Only leading pads shift; a pad in the middle is a position that nobody reads."""
    model, ids = tiny("Llama"), tokens(1, SIZE)
    real = torch.ones_like(ids)
    real[0, 4] = 0
    mask = af.masks.sliding_window(SIZE, 3)
    table = mask.dense()
    table[:, 4] = False
    with torch.no_grad():
        with af.masks.attach(model, mask):
            ours = outputs(model, input_ids=ids, attention_mask=real)
        with af.masks.attach(model, af.masks.from_dense(table)):
            torch.testing.assert_close(ours, outputs(model, input_ids=ids))


def test_a_row_of_padding_alone_is_finite():
    model, ids = tiny("Llama"), tokens(2, SIZE)
    real = torch.ones_like(ids)
    real[1] = 0
    for implementation in ("sdpa", "eager"):
        with torch.no_grad(), af.masks.attach(model, MASKS["causal"], backend=implementation):
            assert outputs(model, input_ids=ids, attention_mask=real).isfinite().all()


def test_a_padded_row_is_refused_where_it_would_be_alone():
    """Its prefix is not there yet in a first chunk, or at all: without padding the same row raises, too."""
    model, ids = tiny("Llama"), torch.randint(1, 40, (2, 20))
    real = torch.ones_like(ids)
    real[0, :6] = 0
    with af.masks.attach(model, af.masks.prefix_lm(40, 4)):
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        whole = model.generate(ids, attention_mask=real, **options)
        assert torch.equal(model.generate(ids, attention_mask=real, prefill_chunk_size=10, **options), whole)
        with pytest.raises(ValueError, match=r"a sequence has only 2 positions so far, padding aside; pass more of it"):
            model.generate(ids, attention_mask=real, prefill_chunk_size=8, **options)
        for side in (real[:, :8], real[:, :8].flip(1)):
            with pytest.raises(ValueError, match="has only 2 positions"):
                model(ids[:, :8], attention_mask=side)
        with pytest.raises(ValueError, match="the sequence has only 2 positions"):
            model(ids[:1, :2])
    with af.masks.attach(model, af.masks.prefix_lm(40, 4), crop=True):
        model(ids[:, :8], attention_mask=real[:, :8])
