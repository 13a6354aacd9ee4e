"""Masks that come with each batch: values and gradients of each sequence alone, on every backend; and bad input."""

import copy

import pytest
import torch

import attnflow as af
from tests.masks.hf.test_gradients import assert_same, gradients
from tests.models import outputs, tiny, tokens

masks = af.masks
CASES = {
    "odd lengths": masks.batch([masks.sliding_window(63, 5), masks.causal(1), masks.document([3, 8, 20])]),
    "numbered anew": masks.batch(
        [masks.permutation_lm([4, 0, 3, 1, 2, 5]), masks.butterfly(4), masks.tree([-1, 0, 0, 1])]
    ),
    "by head": masks.batch(
        [
            masks.per_head([masks.causal(9), masks.full(9), masks.sliding_window(9, 2), masks.prefix_lm(9, 4)]),
            masks.per_head([masks.causal(7) if head % 2 else masks.attention_sink(7, 1, 2) for head in range(4)]),
        ]
    ),
    "heads of all sequences": masks.per_head([masks.sliding_window(8, 1 + head) for head in range(4)]),
    "one for all": masks.batch([masks.block_two_stream(3, 2)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_values_and_gradients_are_those_of_dense_masks(case, backend, name):
    model, grid = tiny(name), CASES[case]
    ids = tokens(3 if grid.shape[0] == 1 else grid.shape[0], grid.num_queries)
    positions = torch.arange(grid.num_queries).expand(len(ids), -1)
    oracle = copy.deepcopy(model)
    # GPT-2 computes eager attention in float64 throughout; Llama takes the softmax in float32.
    oracle.set_attn_implementation("sdpa" if name == "Llama" else "eager")
    dense = torch.zeros(grid.shape, dtype=torch.float64).masked_fill(~grid.dense(), -torch.inf)
    heads = model.config.num_attention_heads
    dense = dense.expand(len(ids), heads if grid.shape[1] > 1 else 1, -1, -1)
    expected = gradients(oracle, ids, position_ids=positions, attention_mask=dense)
    with masks.attach(model, "batch", backend=backend):
        ours = gradients(model, ids, position_ids=positions, attention_mask=grid.row_intervals())
    assert_same(ours, expected, 1e-5 if (name, backend) == ("Llama", "eager") else 1e-11)


def test_queries_that_may_attend_to_nothing_give_zero_as_alone():
    model = tiny("Llama")
    empty = masks.from_intervals([[(0, 1)], [], [(1, 3)]], 3)
    ids = tokens(2, 4)
    for backend in ("sdpa", "eager"):
        with torch.no_grad(), masks.attach(model, "batch", backend=backend):
            rows = masks.batch([empty, masks.causal(4)]).row_intervals()
            together = outputs(model, input_ids=ids, attention_mask=rows)
        with torch.no_grad(), masks.attach(model, empty, backend=backend):
            alone = outputs(model, input_ids=ids[:1, :3])
        torch.testing.assert_close(together[0, :3], alone[0], rtol=1e-6, atol=1e-7)


def test_other_calls_run_under_the_models_own_mask_to_the_bit():
    model, ids = tiny("Llama", eos_token_id=None), tokens(2, 6)
    real = torch.ones_like(ids)
    real[1, :2] = 0
    options = {"attention_mask": real, "max_new_tokens": 3, "do_sample": False}
    expected = outputs(model, input_ids=ids, attention_mask=real), model.generate(ids, **options)
    with masks.attach(model, "batch") as handle:
        assert torch.equal(outputs(model, input_ids=ids, attention_mask=real), expected[0])
        assert torch.equal(model.generate(ids, **options), expected[1])
        assert handle.masks == {}
        assert str(handle) == "the masks of each batch on 2 attention modules of LlamaForCausalLM, computed by sdpa"


def test_new_values_in_the_same_tensor_are_seen():
    model, ids = tiny("Llama"), tokens(1, 6)
    rows, others = (masks.batch([mask]).row_intervals() for mask in (masks.causal(6), masks.full(6)))
    with torch.no_grad(), masks.attach(model, "batch"):
        expected = outputs(model, input_ids=ids, attention_mask=others)
        assert not torch.equal(outputs(model, input_ids=ids, attention_mask=rows), expected)
        rows.copy_(others)
        assert torch.equal(outputs(model, input_ids=ids, attention_mask=rows), expected)


def test_new_queries_behind_a_cache():
    """Masks over more keys than queries: what a decoder feeds after its cache."""
    model, ids, whole = tiny("Llama"), tokens(2, 9), masks.attention_sink(9, 2, 3)
    with torch.no_grad(), masks.attach(model, "batch"):
        expected = outputs(model, input_ids=ids, attention_mask=masks.batch([whole]).row_intervals())
        first = model(ids[:, :6], attention_mask=masks.batch([whole[:6, :6]]).row_intervals(), use_cache=True)
        cache = first.past_key_values
        rows = masks.batch([whole[6:, :]] * 2).row_intervals()
        again = model(ids[:, 6:], attention_mask=rows, past_key_values=cache).logits
        torch.testing.assert_close(again, expected[:, 6:], rtol=1e-6, atol=1e-7)
        cache.crop(-4)
        with pytest.raises(ValueError, match="from 3 queries to 8 keys, but its masks reach to key 8"):
            model(ids[:, 6:], attention_mask=rows, past_key_values=cache)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_without_attach_a_model_fails_on_row_intervals(backend):
    """It must never take them for a mask of pairs."""
    model = tiny("Llama")
    model.set_attn_implementation(backend)
    for size in (1, 2, 4, 5, 8, 9):
        rows = masks.batch([masks.causal(size)] * 2).row_intervals()
        with pytest.raises(RuntimeError):
            model(tokens(2, size), attention_mask=rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (masks.batch([masks.causal(9)]).row_intervals(), "masks over 9 positions for 6; pad masks as tokens are"),
        (masks.batch([masks.causal(6)] * 3).row_intervals(), "masks of 3 sequences for 2 sequences"),
        (masks.per_head([masks.causal(6)] * 2).row_intervals(), "masks for 2 heads, but its queries have 4"),
        (masks.batch([masks.causal(6)]).row_intervals().float(), r"float32 mask \[1, 1, 2, 6\] .* must stay int32"),
        (torch.ones(2, 1, 6, 6, dtype=torch.int32), r"an int32 mask \[2, 1, 6, 6\]; make a mask of pairs bool"),
    ],
)
def test_bad_row_intervals(rows, message):
    model = tiny("Llama")
    with masks.attach(model, "batch"), pytest.raises(ValueError, match=message):
        model(tokens(2, 6), attention_mask=rows)


def test_models_of_two_stacks_are_refused():
    with pytest.raises(ValueError, match="one half of the encoder-decoder model"):
        masks.attach(tiny("T5"), "batch")


FIXED = masks.batch([masks.sliding_window(9, 3), masks.document([2, 4]), masks.permutation_lm([2, 0, 1, 3])])
HEADS = masks.per_head([masks.sliding_window(12, 1 + 2 * head) for head in range(4)])


def left_and_right(lengths, size):
    """Pads of each side, mixed: every other sequence has one at each end, the others theirs behind."""
    real = torch.zeros(len(lengths), size, dtype=torch.int64)
    for b, length in enumerate(lengths):
        start = (size - length) // 2 if b % 2 else 0
        real[b, start : start + length] = 1
    return real


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_mask_for_each_sequence_gives_each_what_it_gives_alone(backend):
    """With the pads of a 2D mask in front, behind, or on both sides."""
    model, size = tiny("Llama"), 12
    lengths = [mask[0].num_queries for mask in FIXED.masks]
    ids, real = tokens(3, size), left_and_right(lengths, size)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        with masks.attach(model, FIXED, backend=backend):
            together = outputs(model, input_ids=ids, attention_mask=real, position_ids=positions)
        for b in range(3):
            with masks.attach(model, FIXED[b, 0], backend=backend):
                alone = outputs(model, input_ids=ids[b : b + 1, real[b] == 1])
            torch.testing.assert_close(together[b, real[b] == 1], alone[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_mask_for_each_head(backend):
    model, ids = tiny("Llama", eos_token_id=None), tokens(2, 12)
    rows = HEADS.row_intervals()
    with torch.no_grad():
        with masks.attach(model, "batch", backend=backend):
            expected = outputs(model, input_ids=ids, attention_mask=rows)
            alike = outputs(model, input_ids=ids, attention_mask=masks.batch([HEADS[0, 3]]).row_intervals())
        with masks.attach(model, HEADS, backend=backend) as handle:
            assert torch.equal(outputs(model, input_ids=ids), expected)
            assert not torch.allclose(expected, alike)
            past = model(ids[:, :7], use_cache=True).past_key_values
            again = model(ids[:, 7:], past_key_values=past).logits
            torch.testing.assert_close(again, expected[:, 7:], rtol=1e-6, atol=1e-7)
            generated = model.generate(ids[:, :4], max_new_tokens=5, do_sample=False)
            again = model.generate(ids[:, :4], max_new_tokens=5, do_sample=False, use_cache=False)
            assert torch.equal(generated, again)
            assert "<masks of 1 sequence x 4 heads, 12 positions" in str(handle)


@pytest.mark.parametrize(
    ("mask", "inputs", "message"),
    [
        (FIXED, {"input_ids": tokens(2, 9)}, "attends with 2 sequences, but its masks are for 3"),
        (masks.per_head([masks.causal(4)] * 3), {"input_ids": tokens(1, 4)}, "with 4 heads, but its masks are for 3"),
        (FIXED, {"input_ids": tokens(3, 9)}, r"has 9 positions, but document\(lengths=\[2, 4\].* covers 6"),
    ],
)
def test_bad_calls_under_fixed_masks(mask, inputs, message):
    model = tiny("Llama")
    with masks.attach(model, mask), pytest.raises(ValueError, match=message):
        model(**inputs)
