"""Attribution on released models: each head of a layer adds up, to the weights that the model itself reports."""

from __future__ import annotations

import pytest
import torch

import attnflow as af

pytestmark = pytest.mark.slow
TEXT = "The old lighthouse keeper climbed the stairs every evening, lit the lamp, and watched the ships pass."
LAYERS = {"smollm2-135m": 20, "minilm": 5}


@pytest.mark.parametrize("name", LAYERS)
def test_every_head_of_a_layer_adds_up(name):
    loaded, layer = af.load_model(name, dtype="float32"), LAYERS[name]
    whole = af.geometry.attribute(loaded, TEXT, layer)
    assert str(whole.components[-1]) == f"layer {layer - 1} feed-forward"
    assert len(whole.components) == 2 * layer + 1
    assert whole.model == name
    span = (whole.scores.amax(-1) - whole.scores.amin(-1))[:, None]
    assert ((whole.raw.sum((-1, -2)) + whole.constant - whole.scores).abs() <= 1e-5 * span).all()
    assert whole.error < 1e-5
    middle = whole.query // 2
    some = af.geometry.attribute(loaded, TEXT, layer, head=1, query=middle, key=[2, middle, 4])
    assert some.keys == (2, middle, 4)
    model = loaded.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**loaded.tokenizer(TEXT, return_tensors="pt"), output_attentions=True).attentions[layer][0]
    torch.testing.assert_close(whole.weights.float(), weights[:, -1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(some.weights.float(), weights[1, middle, list(some.keys)], atol=1e-5, rtol=1e-4)
