"""Encoder-decoder models: a mask for each half and one between them."""

import inspect

import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

import attnflow as af
from tests.masks.hf.test_architectures import closure, random_mask
from tests.models import tiny, tokens

SOURCE, TARGET = 7, 6
T5_TAKES_THE_INTERFACE = "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(T5Attention)
MODELS = [
    "Bart",
    "SeamlessM4T",  # whose halves are named text_encoder and text_decoder
    pytest.param("T5", marks=pytest.mark.skipif(not T5_TAKES_THE_INTERFACE, reason="T5 of this version does not")),
]


def moved(model, source, target, which):
    """moved[i, j]: whether decoder logits (or encoder states) at i change with token j of the source or target."""
    length = (source if which == "source" else target).shape[1]
    sources, targets = source.expand(length + 1, -1).clone(), target.expand(length + 1, -1).clone()
    changed = sources if which == "source" else targets
    for j in range(length):
        changed[j, j] = (changed[j, j] + 7) % 47 + 3
    with torch.no_grad():
        result = model(input_ids=sources, decoder_input_ids=targets, use_cache=False)

    def differ(values):
        return ((values[:length] - values[length:]).abs().amax(dim=-1) > 1e-10).T.numpy()

    return differ(result.logits), differ(result.encoder_last_hidden_state)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_each_part_follows_its_mask(name, implementation):
    model, source, target = tiny(name), tokens(1, SOURCE), tokens(1, TARGET)
    encoder, decoder = random_mask(SOURCE, SOURCE), random_mask(TARGET, TARGET)
    cross = random_mask(TARGET, SOURCE)
    with af.masks.attach(model, {"encoder": encoder, "decoder": decoder, "cross": cross}, backend=implementation):
        logits, states = moved(model, source, target, "source")
        assert np.array_equal(states, closure(encoder, encoder))
        into, self_step = (
            cross.dense().numpy() @ closure(encoder, encoder),
            decoder.dense().numpy() | np.eye(TARGET, dtype=bool),
        )
        # A target reads the source in layer 1 or 2; what was read in layer 1 passes on in layer 2.
        assert np.array_equal(logits, (self_step @ into) | into)
        logits, _ = moved(model, source, target, "target")
        assert np.array_equal(logits, closure(decoder, decoder))


def test_a_mask_for_each_layer_of_a_part():
    model, source, target = tiny("Bart"), tokens(1, SOURCE), tokens(1, TARGET)
    masks = [random_mask(TARGET, TARGET), random_mask(TARGET, TARGET)]
    with af.masks.attach(model, per_layer={"decoder": masks}) as handle:
        assert list(handle.masks.values()) == masks
        logits, _ = moved(model, source, target, "target")
    assert np.array_equal(logits, closure(*masks))


@pytest.mark.parametrize("name", MODELS)
def test_parts_without_a_mask_keep_their_own(name):
    model, source, target = tiny(name), tokens(2, SOURCE), tokens(2, TARGET)
    real = torch.ones_like(source)
    real[1, 5:] = 0
    inputs = {"input_ids": source, "attention_mask": real, "decoder_input_ids": target}
    with torch.no_grad():
        plain = model(**inputs).logits
        for masks in (
            {"decoder": af.masks.causal(TARGET)},
            {"encoder": af.masks.full(SOURCE)},
            {"cross": af.masks.full(TARGET, SOURCE)},
            {"encoder": af.masks.full(SOURCE), "decoder": af.masks.causal(TARGET)},
        ):
            with af.masks.attach(model, masks):
                torch.testing.assert_close(model(**inputs).logits, plain, rtol=1e-10, atol=1e-10)
        with af.masks.attach(model.get_decoder(), af.masks.causal(TARGET)):
            torch.testing.assert_close(model(**inputs).logits, plain, rtol=1e-10, atol=1e-10)
        with af.masks.attach(model, {"encoder": af.masks.sliding_window(SOURCE, 1)}):
            assert not torch.allclose(model(**inputs).logits, plain)
        assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, cache):
    model, source = tiny(name, eos_token_id=None), tokens(2, SOURCE)
    options = {"attention_mask": torch.ones_like(source), "max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    options |= {"cache_implementation": cache, "disable_compile": True}
    plain = model.generate(source, **options)
    with af.masks.attach(model, {"encoder": af.masks.full(SOURCE), "decoder": af.masks.causal(10)}):
        assert torch.equal(model.generate(source, **options), plain)
    with (
        af.masks.attach(model, {"cross": af.masks.full(TARGET, SOURCE)}),
        pytest.raises(ValueError, match=r"cross mask needs all its queries in one call.*use_cache=False"),
    ):
        model.generate(source, **options)


def test_what_encoder_decoder_models_ask_for():
    model, causal = tiny("Bart"), af.masks.causal(TARGET)
    for message, masks, options in (
        (r'takes a dict of masks with any of "encoder".*got Mask', causal, {}),
        (r"got \['self'\]", {"self": causal}, {}),
        ("got none", {}, {}),
        ("one mask per attention module, 2, got 3", None, {"per_layer": {"decoder": [causal] * 3}}),
        (r'one mask for each layer is per_layer=\{"decoder": \[...\]\}', {"decoder": [causal] * 2}, {}),
        ("layers= goes with one mask on one stack", {"decoder": causal}, {"layers": [0]}),
        ("square", {"encoder": af.masks.full(2, 3)}, {}),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            inspect.unwrap(af.masks.attach)(model, masks, **options)


@pytest.mark.skipif(T5_TAKES_THE_INTERFACE, reason="this T5 takes the interface")
def test_older_t5_is_refused():
    with pytest.raises(af.UnsupportedArchitecture, match="its attention: T5Attention"):
        af.masks.attach(tiny("T5"), {"decoder": af.masks.causal(TARGET)})
