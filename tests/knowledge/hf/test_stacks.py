"""Layers of several widths and forms in one base: text and images, encoders and decoders, dense and expert layers."""

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

import attnflow as af
from attnflow.knowledge.base import EntryLayout, LayeredKnowledge
from attnflow.knowledge.hf.layer_forms import LinearLayer
from attnflow.models.evaluation import precision
from tests.models import tokens


def llava():
    """A plain image tower of width 16 below a gated decoder of width 32."""
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"hidden_size": 16, "intermediate_size": 24, "image_size": 8, "patch_size": 4, **heads}
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, **heads}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "initializer_range": 0.5, **vision},
        text_config={"model_type": "llama", "initializer_range": 0.3, **text},
        image_token_index=63,
    )
    return LlavaForConditionalGeneration(config).double().eval()


IDS = torch.cat([torch.full((1, 4), 63), tokens(1, 5)], dim=1)


def logits(model):
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with precision(model, torch.float64), torch.no_grad():
        return model(input_ids=IDS, pixel_values=pixels).logits


def test_two_stacks_share_a_base():
    model = llava()
    before, expected = model.state_dict(), logits(model)
    opened = af.knowledge.from_ffn(model)
    base = opened.knowledge
    images, texts = EntryLayout(16, gated=False, padding=98 - 33), EntryLayout(32, gated=True)
    assert sorted(base.layouts, key=str) == sorted([images] * 2 + [texts] * 2, key=str)
    assert sorted(base.counts.tolist()) == [24, 24, 40, 40]
    torch.testing.assert_close(logits(opened), expected, rtol=1e-10, atol=1e-12)
    for layer, layout in enumerate(base.layouts):
        rows = base.entries[base.rows(layer)]
        used = torch.zeros(base.entry_dim, dtype=torch.bool)
        for part in layout.parts:
            used[layout.key(part)] = used[layout.threshold(part)] = True
        used[layout.value] = True
        assert int(used.sum()) == base.entry_dim - layout.padding
        assert not bool(rows[:, ~used].any())
    back = af.knowledge.to_ffn(opened)
    assert all(torch.equal(value, before[path]) for path, value in back.state_dict().items())
    assert torch.equal(logits(back), expected)
    with pytest.raises(ValueError, match=r"layers differ in their layout: read \.layouts\[layer\]"):
        _ = base.layout


@pytest.mark.parametrize("gated", [False, True])
def test_an_edit_acts_in_its_own_stack(gated):
    model = llava()
    opened = af.knowledge.from_ffn(model)
    base = opened.knowledge
    layer = next(one for one, layout in enumerate(base.layouts) if layout.gated == gated)
    block = model.model.language_model.layers[0] if gated else model.model.vision_tower.encoder.layers[0]
    out = block.mlp.down_proj if gated else block.mlp.fc2
    entry = base.get(base.ids[base.rows(layer)][3:4])
    entry[:, base.layouts[layer].value] *= -2
    base.update(base.ids[base.rows(layer)][3:4], entry)
    expected = logits(model)
    with torch.no_grad():
        out.weight[:, 3] *= -2
    assert not torch.allclose(logits(model), expected)
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-10, atol=1e-12)


def test_a_trace_of_a_text_is_of_the_layers_that_read_it():
    opened = af.knowledge.from_ffn(llava().float())
    result = af.knowledge.trace(opened, tokens(1, 5))
    assert [one.num_entries for one in result.layers] == [40, 40]


def test_entries_of_a_narrow_layer_hold_zeros_where_it_reads_nothing():
    layouts = [EntryLayout(2, gated=False, padding=3), EntryLayout(2, gated=True)]
    base = LayeredKnowledge(torch.zeros(4, 8), [1, [2, 1]], layouts)
    assert (base.num_thresholds, base.expert_of([0, 1, 2, 3])) == (3, [None, 0, 0, 1])
    assert [base.rows(1, expert) for expert in (0, 1)] == [slice(1, 3), slice(3, 4)]
    with pytest.raises(ValueError, match=r"columns 4 to 6 of layer 0 are read by nobody"):
        base.insert(0, torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"columns 4 to 6 of layer 0 are read by nobody"):
        base.update([1, 0], torch.ones(2, 8))
    base.insert(1, torch.ones(1, 8), expert=1)


def test_a_layer_that_no_token_reaches_is_compared_by_itself(monkeypatch):
    model = llava()
    true = LinearLayer.entries

    def wrong(self, model, layout):
        return true(self, model, layout) * (1.0 if self.site.gated else 1.01)

    monkeypatch.setattr(LinearLayer, "entries", wrong)
    with pytest.raises(af.UnsupportedArchitecture, match=r"vision_tower\.encoder\.layers\.0\.mlp, was not converted"):
        af.knowledge.from_ffn(model)
