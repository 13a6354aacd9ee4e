"""With a key-value cache, row i of the mask is the i-th token since the cache was empty."""

import pytest
import torch
from transformers import DynamicCache

import attnflow as af
from tests.models import outputs, tiny, tokens

LENGTH = 12
AUTOREGRESSIVE = {
    "window": af.masks.sliding_window(LENGTH, 3),
    "sink": af.masks.attention_sink(LENGTH, 2, 3),
    "dilated": af.masks.dilated_window(LENGTH, 3, 2),
    "tree": af.masks.tree([-1, *(i // 2 for i in range(LENGTH - 1))]),
    "documents": af.masks.document([5, 7]),
    "blocks": af.masks.block_causal(LENGTH, 4),  # the chunks below end with its blocks
}


def chunks(model, ids, sizes, cache):
    """Logits of the sequence given in pieces."""
    parts, start = [], 0
    for size in sizes:
        result = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
        parts.append(result.logits)
        start += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen3", "OPT", "GPTNeoX", "Phi3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_prefill_then_decode_is_one_pass(name, implementation, kind):
    model, ids, mask = tiny(name), tokens(2, LENGTH), AUTOREGRESSIVE[kind]
    sizes = [8, 4] if kind == "blocks" else [5, 1, 1, 3, 2]
    with torch.no_grad(), af.masks.attach(model, mask, backend=implementation):
        whole = outputs(model, input_ids=ids)
        pieces = chunks(model, ids, sizes, DynamicCache(config=None))
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-6)  # eager attention takes its softmax in float32


def test_generate_under_a_window_is_the_windowed_model():
    model, ids = tiny("Mistral"), tokens(2, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(ids, **options)  # its cache keeps the window of 4 only
    with af.masks.attach(model, af.masks.sliding_window(20, 4)):
        assert torch.equal(model.generate(ids, **options), plain)


def test_a_cache_that_dropped_needed_keys_is_an_error():
    model, ids = tiny("Mistral"), tokens(1, 9)
    with torch.no_grad(), af.masks.attach(model, af.masks.causal(LENGTH)):
        with pytest.raises(ValueError, match=r"query 8 attend to key 0.*kept only keys from 5 on.*DynamicCache"):
            chunks(model, ids, [8, 1], DynamicCache(config=model.config))
        whole = outputs(model, input_ids=ids)
        torch.testing.assert_close(chunks(model, ids, [8, 1], DynamicCache()), whole)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_sequence_longer_than_the_mask_is_an_error(implementation):
    model = tiny("Llama")
    with torch.no_grad(), af.masks.attach(model, af.masks.causal(6), backend=implementation):
        cache = DynamicCache()
        chunks(model, tokens(1, 6), [5, 1], cache)
        with pytest.raises(ValueError, match=r"7 positions, but causal\(n=6\) covers 6"):
            model(tokens(1, 1), past_key_values=cache)
        with pytest.raises(ValueError, match="8 positions"):
            model(tokens(1, 8))


def test_a_shorter_sequence_runs_under_the_leading_part_if_it_loses_no_key():
    model, ids = tiny("Llama"), tokens(1, 5)
    layout = af.masks.block_two_stream(3, 2)  # 4 content positions, then two mask blocks of 2
    with torch.no_grad():
        with af.masks.attach(model, layout[:4, :4]):
            expected = outputs(model, input_ids=ids[:, :4])
        with af.masks.attach(model, layout):
            assert torch.equal(outputs(model, input_ids=ids[:, :4]), expected)
            with pytest.raises(
                ValueError, match=r"query 4 attend to key 5.*only 5 positions so far; pass more.*crop=True"
            ):
                outputs(model, input_ids=ids)
        with af.masks.attach(model, layout[:5, :5]):
            expected = outputs(model, input_ids=ids)
        with af.masks.attach(model, layout, crop=True):
            assert torch.equal(outputs(model, input_ids=ids), expected)


def test_a_cropped_query_that_loses_its_only_key_is_empty_not_nan():
    model, ids = tiny("Llama"), tokens(1, 3)
    mask = af.masks.from_edges([(0, 4), (1, 1), (2, 2), (3, 3), (4, 4)], 5)
    with torch.no_grad():
        with af.masks.attach(model, mask, crop=True):
            ours = outputs(model, input_ids=ids)
        with af.masks.attach(model, af.masks.from_edges([(1, 1), (2, 2)], 3)):
            assert torch.equal(ours, outputs(model, input_ids=ids))
    assert ours.isfinite().all()
