"""The asserts for tests of one's own: what they accept, what they refuse, and what pytest shows of it."""

import re

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DataCollatorWithFlattening

import attnflow as af
from attnflow.testing import assert_batch, assert_no_leak, assert_packing_equals_alone, assert_same_mask
from tests.audit.common import inputs, tiny, tokens, wrapped
from tests.refused import refused

CAUSAL = af.masks.causal(6)


def ahead(out, hidden):
    return out + hidden.roll(-1, dims=1)


def test_a_clean_model_with_a_batch_of_its_training():
    ids = tokens()
    assert_no_leak(tiny("Llama"), {"input_ids": ids, "labels": ids, "num_items_in_batch": 3})
    assert_no_leak(tiny("Llama"), ids, cache=True)
    assert_no_leak(tiny("T5"), {"input_ids": ids, "labels": inputs("T5")["decoder_input_ids"]})
    assert_no_leak(nn.GRU(4, 4, batch_first=True), torch.randn(2, 6, 4), order=CAUSAL)


def test_a_leak_is_shown_with_its_layer_and_witness():
    model = tiny("Llama")
    with wrapped(model.model.layers[1].mlp, ahead), pytest.raises(AssertionError) as failure:
        assert_no_leak(model, tokens())
    message = str(failure.value)
    assert message.startswith("information flows against the order\nLEAK: causal")
    with wrapped(model.model.layers[1].mlp, ahead):
        first = af.audit.check(model, tokens()).violations[0]
    assert all(part in message for part in ("model.layers.1.mlp", f"{first.source}", "sequence"))
    with pytest.raises(AssertionError, match="LEAK"):
        assert_no_leak(tiny("Llama"), tokens(1, 6), order=af.masks.document([3, 3]))


def test_nothing_to_test_is_no_success():
    with pytest.raises(AssertionError, match=r"nothing was tested: .* forbids nothing"):
        assert_no_leak(tiny("Bert"), tokens(batch=1))
    assert_no_leak(tiny("Bert"), tokens(batch=2))


SAMPLES = [{"input_ids": [*range(5 + 9 * i, 5 + 9 * i + size), 2]} for i, size in enumerate((4, 6, 3))]


def padding_on(side):
    def collate(samples):
        size = max(len(sample["input_ids"]) for sample in samples)
        pads = [[0] * (size - len(sample["input_ids"])) for sample in samples]
        rows = [
            pad * (side == "left") + s["input_ids"] + pad * (side == "right")
            for pad, s in zip(pads, samples, strict=True)
        ]
        ids = torch.tensor(rows)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    return collate


def flattened(late):
    """Packs in another order; positions restart one token `late` behind the first document."""

    def collate(samples):
        rows = [sample["input_ids"] for sample in reversed(samples)]
        sizes = [len(row) for row in rows]
        if late and len(sizes) > 1:
            sizes = [sizes[0] + 1, sizes[1] - 1, *sizes[2:]]
        positions = torch.cat([torch.arange(size) for size in sizes])
        return {"input_ids": torch.cat([torch.tensor(row) for row in rows])[None], "position_ids": positions[None]}

    return collate


def cut(samples):
    return {"input_ids": torch.cat([torch.tensor(sample["input_ids"]) for sample in samples])[None, :9]}


def packing_model(name="Llama"):
    model = tiny(name, pad_token_id=0, eos_token_id=2)
    model.config.use_cache = False  # as a Trainer sets it
    return model


@pytest.mark.parametrize(
    ("name", "collate", "message"),
    [
        ("Llama", padding_on("right"), ""),
        ("Llama", padding_on("left"), ""),
        ("Llama", flattened(False), ""),
        ("Llama", DataCollatorWithFlattening(), ""),
        ("GPT2", padding_on("right"), ""),
        ("GPT2", padding_on("left"), "the positions count the padding"),
        ("Llama", flattened(True), "restart one token late"),
        (
            "Llama",
            lambda samples: {**flattened(False)(samples), "position_ids": None},
            "pass position_ids that restart",
        ),
        (
            "Mamba2",
            lambda samples: {"input_ids": flattened(False)(samples)["input_ids"]},
            "it reads the document before it",
        ),
        ("Llama", cut, "sample 1 is not in the batch in one piece"),
    ],
)
def test_samples_in_a_batch_and_alone(name, collate, message):
    if not message:
        assert_packing_equals_alone(packing_model(name), collate, SAMPLES)
        return
    with pytest.raises(AssertionError, match=message):
        assert_packing_equals_alone(packing_model(name), collate, SAMPLES)


def test_one_sample_is_no_packing():
    with refused(ValueError, "at least two samples"):
        assert_packing_equals_alone(packing_model(), cut, SAMPLES[:1])


def test_a_batch_whose_rows_are_as_alone():
    assert_batch(padding_on("right")(SAMPLES), packing_model())
    assert_batch(DataCollatorWithFlattening()(SAMPLES), packing_model())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Llama", lambda batch: {**batch, "labels": batch["input_ids"]}, "the batch is not what the model needs"),
        ("GPT2", lambda batch: batch, "alone: sequence"),
        ("Llama", lambda batch: {**batch, "pixel_values": torch.ones(5, 2)}, "nothing tested"),
    ],
)
def test_a_batch_with_a_mistake(name, change, message):
    with pytest.raises(AssertionError, match=message):
        assert_batch(change(padding_on("left")(SAMPLES)), packing_model(name))


@pytest.mark.parametrize(
    "same",
    [
        CAUSAL,
        [CAUSAL],
        [CAUSAL, CAUSAL],
        af.order.analyze([CAUSAL, CAUSAL]),
        CAUSAL.dense(),
        CAUSAL.dense().expand(2, 3, 6, 6),
        torch.where(CAUSAL.dense(), 0.0, -torch.inf),
        torch.where(CAUSAL.dense(), 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16)[None, None],
        create_block_mask(lambda b, h, q, k: q >= k, 2, None, 6, 6, device="cpu", BLOCK_SIZE=2),
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu", BLOCK_SIZE=128),
        CAUSAL.block_mask(2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_same_mask_in_any_form(same):
    assert_same_mask(same, CAUSAL)
    assert_same_mask(CAUSAL, same)


def test_what_differs_is_listed_and_drawn():
    hole = CAUSAL.dense().clone()
    hole[1, 4], hole[5, 0] = True, False
    with pytest.raises(AssertionError) as failure:
        assert_same_mask(hole, CAUSAL)
    lines = str(failure.value).splitlines()
    assert lines[:3] == [
        "masks differ in 2 of 36 pairs (query, key)",
        "extra (actual only): (1, 4)",
        "missing (expected only): (5, 0)",
    ]
    assert lines[-5:] == ["   ##..+.", "   ###...", "   ####..", "   #####.", "   -#####"]


def test_it_says_in_which_layer_sequence_and_head():
    with pytest.raises(AssertionError, match="in layer 1"):
        assert_same_mask([CAUSAL, af.masks.full(6)], [CAUSAL, CAUSAL])
    several = CAUSAL.dense().repeat(2, 3, 1, 1)
    several[1, 2, 0, 5] = True
    with pytest.raises(AssertionError, match="in sequence 1 in head 2"):
        assert_same_mask(several, CAUSAL)
    blocks = create_block_mask(lambda b, h, q, k: q - b >= k, 2, None, 6, 6, device="cpu", BLOCK_SIZE=2)
    with pytest.raises(AssertionError, match="in sequence 1 in head 0"):
        assert_same_mask(blocks, CAUSAL)


def test_blocks_that_contradict_their_function_are_seen():
    """FlexAttention computes what the blocks say: with a block left out, its pairs are masked."""
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu", BLOCK_SIZE=2)
    blocks.kv_num_blocks[0, 0, 2] = 0
    if blocks.full_kv_num_blocks is not None:
        blocks.full_kv_num_blocks[0, 0, 2] = 0
    with pytest.raises(AssertionError, match=r"missing \(expected only\): \(4, 0\)"):
        assert_same_mask(blocks, CAUSAL)


def test_a_large_mask_shows_the_place():
    large = af.masks.causal(300).dense().clone()
    large[200, 250] = True
    with pytest.raises(AssertionError, match=r"extra \(actual only\): \(200, 250\)") as failure:
        assert_same_mask(large, af.masks.causal(300))
    picture = str(failure.value).splitlines()[-24:]
    assert sum("+" in line for line in picture) == 1


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (torch.ones(6, 6).long(), TypeError, "may mean either"),
        (torch.ones(6, 6), TypeError, "not additive"),
        (torch.zeros(6).bool(), ValueError, "[..., queries, keys]"),
        (af.masks.causal(5), ValueError, "actual is [5, 5] (queries, keys), expected is [6, 6]"),
        ("causal", TypeError, "got str"),
    ],
)
def test_bad_masks(value, kind, message):
    with refused(kind, re.escape(message)):
        assert_same_mask(value, CAUSAL)
    with refused(ValueError, "actual has 2 masks and expected 3"):
        assert_same_mask([CAUSAL] * 2, [CAUSAL] * 3)
