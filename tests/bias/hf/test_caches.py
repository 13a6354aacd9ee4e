"""What a bias remembers of each key goes where the key goes: crops, beams, windows, resets, quantisation."""

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

import attnflow as af
from attnflow.bias.hf.cache import ColumnsLayer
from tests.bias.hf.common import BIASES, GUIDANCE, biased, disabled, disturb, family, handle_of, outputs, tokens
from tests.conformance.miniature import Architecture, build


def pieces(model, ids, sizes, cache, **inputs):
    """Logits of the sequence given in pieces."""
    parts, start = [], int(cache.get_seq_length())
    with torch.no_grad():
        for size in sizes:
            parts.append(model(ids[:, start : start + size], past_key_values=cache, use_cache=True, **inputs).logits)
            start += size
    return torch.cat(parts, dim=1)


def whole(model, ids):
    with torch.no_grad():
        return outputs(model, input_ids=ids, use_cache=False)


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


CACHED = [
    (name, cache)
    for name in ("Llama", "Mistral", "Gemma3", "GPT2", "DeepseekV3")
    for cache in ("dynamic", "unconfigured", "static")
]


@pytest.mark.parametrize(("name", "cache"), [*CACHED, ("FalconH1", "dynamic")])
@pytest.mark.parametrize("kind", BIASES)
def test_pieces_through_a_cache_are_the_whole_sequence(name, kind, cache):
    model, ids = biased(name, BIASES[kind]), tokens(2, 12)
    make = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "unconfigured": DynamicCache,
        "static": lambda: StaticCache(config=model.config, max_cache_len=20),
    }[cache]
    found = pieces(model, ids, [5, 1, 1, 3, 2] if name != "FalconH1" else [5, 1, 1, 1, 1, 1, 1, 1], made := make())
    tolerance = 1e-5 if name in ("FalconH1", "Gemma3", "DeepseekV3") else 1e-9  # whose own kernels compute in float32
    torch.testing.assert_close(found, whole(model, ids), rtol=tolerance, atol=tolerance)
    made.reset()
    if cache == "static" or (name in ("Llama", "GPT2") and not made.get_seq_length()):  # older releases keep zeros
        again = pieces(model, ids.flip(1), [7, 5], made)
        torch.testing.assert_close(again, whole(model, ids.flip(1)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reference", ["unrotated", "rotated", "hidden"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ZambaForCausalLM", "zamba"),  # layers that share their weights, and read twice the width of the model
        ("Zamba2ForCausalLM", "zamba2"),
        ("UnlimitedOcrForConditionalGeneration", "unlimited_ocr"),  # a window beside the prompt, which stays
    ],
)
def test_caches_of_unusual_layers(name, kind, reference):
    model, ids, mask = build(Architecture(kind, name, "decoder")).double(), tokens(2, 12), {}
    model = model.get_decoder()
    af.bias.attach(model, af.bias.GuidanceConfig(layers="every", hidden_dim=8, reference=reference))
    disturb(model)
    if kind == "unlimited_ocr":
        query, key = torch.arange(12)[:, None], torch.arange(12)
        allow = (key <= query) & ((key < 5) | (key > query - model.config.sliding_window))
        mask = {"attention_mask": {"reference_sliding_attention": allow.expand(2, 1, 12, 12)}}
        fixed = StaticCache(config=model.config, max_cache_len=20)
        with pytest.raises(af.UnsupportedArchitecture, match=r"outside its window.*use the model's dynamic cache"):
            model(ids, past_key_values=fixed, use_cache=True)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache, use_cache=True)[0] for part in ids.split([5, *[1] * 7], dim=1)]
        full = model(ids, use_cache=False, **mask)[0]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BIASES)
def test_crop_reorder_repeat_and_select(kind):
    model, ids = biased("Llama", BIASES[kind]), tokens(3, 12)
    cache = DynamicCache(config=model.config)
    pieces(model, ids, [8], cache)
    cache.crop(-3)
    other = torch.cat([ids[:, :5], tokens(3, 7)], dim=1)
    close(pieces(model, other, [2, 1], cache), whole(model, other)[:, 5:8])
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    close(pieces(model, other[order], [2], cache), whole(model, other[order])[:, 8:10])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    last = other[order][[1, 1]]
    close(pieces(model, last, [2], copy.deepcopy(cache)), whole(model, last)[:, 10:])
    close(pieces(model, last, [2], cache), whole(model, last)[:, 10:])


@pytest.mark.parametrize("kind", BIASES)
def test_a_window_that_records_its_past_can_be_rolled_back(kind):
    model, ids = biased("Mistral", BIASES[kind]), tokens(1, 12)
    cache = DynamicCache(config=model.config)
    pieces(model, ids, [6], cache)
    cache.activate_past_recording()
    pieces(model, torch.cat([ids[:, :6], tokens(1, 4)], dim=1), [4], cache)
    cache.crop(-4)
    close(pieces(model, ids, [3, 3], cache), whole(model, ids)[:, 6:])


@pytest.mark.parametrize("kind", ["guidance", "others"])
def test_a_quantised_cache_keeps_the_bias_exact(kind):
    """Keys and values are rounded to 8 bits; the columns of a bias are not (if it does not read rotated keys)."""
    model, ids = biased("Llama", BIASES[kind], torch.float32), tokens(2, 10)
    try:
        cache = QuantizedCache("fp8", config=model.config)
    except ValueError:
        pytest.skip("this release of transformers has no fp8 cache")
    found = pieces(model, ids, [6, 1, 3], cache)
    exact = pieces(model, ids, [6, 1, 3], reference := DynamicCache(config=model.config))
    columns = [(ours.keys, theirs.keys) for ours, theirs in zip(cache.layers[2:], reference.layers[2:], strict=True)]
    assert len(columns) == 2
    assert all(type(layer) is ColumnsLayer for layer in cache.layers[2:])
    torch.testing.assert_close(*columns[0])  # the second layer's own input has passed through rounded keys
    torch.testing.assert_close(found[:, :6], exact[:, :6])
    cache.reorder_cache(torch.tensor([1, 0]))
    pieces(model, torch.cat([ids, tokens(2, 1)], dim=1), [1], cache)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_the_bias_has_not_seen_in_full_is_an_error(name, kind):
    model, ids = biased(name), tokens(1, 12)

    def new():
        return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, 20)

    with disabled(model):
        pieces(model, ids, [5], cache := new())
    with pytest.raises(ValueError, match=r"already holds 5 tokens of layer 0 that the bias has not seen: start from"):
        pieces(model, ids, [1], cache)
    pieces(model, ids, [5], cache := new())

    def on_and_off():
        with disabled(model):
            pieces(model, ids, [1], cache)
        pieces(model, ids, [1], cache)

    with pytest.raises((ValueError, RuntimeError), match="filled partly"):
        on_and_off()


def test_an_offloaded_cache_fetches_the_first_layer_after_the_last(monkeypatch):
    """Offloading itself needs an accelerator; the order in which layers are asked for does not."""
    model, ids = biased("Llama", num_hidden_layers=3), tokens(1, 6)
    cache = DynamicCache(config=model.config)
    fetched = []
    monkeypatch.setattr(DynamicLayer, "prefetch", lambda layer: fetched.append(layer))

    class Stream:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def wait_stream(self, other):
            return None

    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, False, Stream()
    close(pieces(model, ids, [4, 1, 1], cache), whole(model, ids))
    assert [cache.layers.index(layer) for layer in fetched[3:]] == [1, 2, 0, 1, 2, 0]


def test_both_halves_of_an_encoder_decoder_model():
    model, ids, targets = family("Bart"), tokens(2, 7), tokens(2, 6)
    with torch.no_grad():
        plain = outputs(model, input_ids=ids, decoder_input_ids=targets)
        af.bias.attach(model.get_decoder(), BIASES["others"])
        af.bias.attach(model.get_encoder(), GUIDANCE)
        disturb(model)
        moved = outputs(model, input_ids=ids, decoder_input_ids=targets)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        states = model.get_encoder()(ids)
        parts = []
        for token in targets.split(1, dim=1):
            step = model(encoder_outputs=states, decoder_input_ids=token, past_key_values=cache, use_cache=True)
            parts.append(step.logits)
        close(torch.cat(parts, dim=1), moved)
        handle_of(model.get_decoder()).remove()  # the older one first
        encoder_alone = outputs(model, input_ids=ids, decoder_input_ids=targets)
        assert (encoder_alone - plain).abs().max() > 1e-3
        assert (encoder_alone - moved).abs().max() > 1e-3
        handle_of(model).remove()
        assert torch.equal(outputs(model, input_ids=ids, decoder_input_ids=targets), plain)
    assert (moved - plain).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_another_bias_has_used_is_taken_over_when_it_is_empty(kind):
    model, ids = biased("Llama"), tokens(1, 8)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, 20)
    pieces(model, ids, [8], cache)
    handle_of(model).remove()
    af.bias.attach(model, af.bias.GuidanceConfig(layers="every", hidden_dim=5))
    disturb(model)
    with pytest.raises(ValueError, match="8 tokens of layer 0 that the bias has not seen"):
        pieces(model, torch.cat([ids, ids], dim=1), [1], cache)
    cache.reset()
    if not int(cache.get_seq_length()):
        close(pieces(model, ids, [5, 3], cache), whole(model, ids))
