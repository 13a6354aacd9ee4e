"""Feed-forward layers as entries and back: the same function, every matrix accounted for, several widths in a base."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

import attnflow as af
from attnflow.knowledge import Store, convert
from attnflow.knowledge.base import EntryLayout, LayeredKnowledge
from attnflow.knowledge.convert import LinearLayer
from attnflow.knowledge.layered import EntryScores, EntryValues, readers
from attnflow.models.anatomy.feed_forward import find_feed_forward, uncovered
from attnflow.models.passes.evaluation import precision
from tests.conformance.miniature import Architecture, build
from tests.models import BIDIRECTIONAL, CAUSAL, outputs, tiny, tokens


def run(model, ids):
    return outputs(model, input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))


def same_state(a, b):
    return all(
        name == other and torch.equal(x, y)
        for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    )


@pytest.mark.parametrize("name", [*CAUSAL, *BIDIRECTIONAL, "Bart", "T5", "XLNet"])
def test_round_trip(name):
    torch.manual_seed(0)
    model, ids = tiny(name, torch.float32), tokens(2, 9)
    before, expected = copy.deepcopy(model), run(model, ids)
    converted = af.knowledge.from_ffn(model)
    torch.testing.assert_close(
        run(converted, ids), expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max())
    )
    back = af.knowledge.to_ffn(converted)
    assert same_state(back, model)
    assert torch.equal(run(back, ids), expected)
    assert same_state(model, before)
    assert back.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Phi3"])
def test_gradients_reach_the_entries(name):
    torch.manual_seed(0)
    model, ids = tiny(name), tokens(2, 7)
    converted = af.knowledge.from_ffn(model)
    for one in (model, converted):
        run(one, ids).square().mean().backward()
    entry = converted.knowledge.entries.grad[converted.knowledge.rows(1)]
    layer = model.get_decoder().layers[1] if name != "GPT2" else model.transformer.h[1]
    down = layer.mlp.c_proj.weight.grad if name == "GPT2" else layer.mlp.down_proj.weight.grad.T
    torch.testing.assert_close(entry[:, converted.knowledge.layout.value], down, rtol=1e-9, atol=1e-12)


def test_edits_take_effect_at_once_and_survive_the_way_back():
    torch.manual_seed(0)
    model, ids = tiny("Llama", torch.float64), tokens(1, 6)
    converted = af.knowledge.from_ffn(model)
    base = converted.knowledge
    expected = run(model, ids)
    new = base.insert(0, torch.zeros(1, base.entry_dim, dtype=torch.float64))
    torch.testing.assert_close(run(converted, ids), expected, rtol=1e-12, atol=1e-12)
    entry = torch.randn(1, base.entry_dim, dtype=torch.float64)
    entry[:, -2:] = 0  # Llama has no thresholds
    base.update(new, entry)
    changed = run(converted, ids)
    assert not torch.allclose(changed, expected)
    with pytest.raises(ValueError, match="in all layers, but they now have 48 to 49"):
        af.knowledge.to_ffn(converted)
    base.insert(1, torch.zeros(1, base.entry_dim, dtype=torch.float64))
    back = af.knowledge.to_ffn(converted)
    assert back.config.intermediate_size == 49
    torch.testing.assert_close(run(back, ids), changed, rtol=1e-12, atol=1e-12)
    base.delete(new)
    torch.testing.assert_close(run(converted, ids), expected, rtol=1e-12, atol=1e-12)


def test_converted_models_generate_copy_and_train():
    torch.manual_seed(0)
    model, ids = tiny("Llama", torch.float32), tokens(2, 5)
    converted = copy.deepcopy(af.knowledge.from_ffn(model))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(converted.generate(ids, **options), model.generate(ids, **options))
    optimizer = torch.optim.SGD(converted.knowledge.parameters(), lr=0.1)
    before = converted.knowledge.entries.detach().clone()
    converted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert not torch.equal(before, converted.knowledge.entries)


def test_a_converted_layer_reads_all_its_entries_and_has_the_biases_of_the_model():
    converted = af.knowledge.from_ffn(tiny("Llama", torch.float32))
    with pytest.raises(ValueError, match="a converted layer reads all its entries"):
        readers(converted)[0].retrieval = af.knowledge.Retrieval(k=6, search="exact")
    converted.knowledge.update([0], torch.ones(1, converted.knowledge.entry_dim))
    with pytest.raises(ValueError, match="has no bias, but its entries now have thresholds"):
        af.knowledge.to_ffn(converted)


def through_cross_attention(model, activation):
    """The largest relative difference of a layer's output, and a model whose layers are the paper's cross-attention."""
    base, worst = model.knowledge, {}
    scores = [module for module in model.modules() if isinstance(module, EntryScores)]
    for values in [module for module in model.modules() if isinstance(module, EntryValues)]:
        layer, hidden = values.layer, {}
        attention = base.attention(layer, activation, values.bias)
        first = next(module for module in scores if module.layer == layer)
        first.register_forward_hook(lambda _, inputs, __, hidden=hidden: hidden.update(x=inputs[0]))

        def replaced(_, __, output, layer=layer, hidden=hidden, attention=attention):
            written = attention(hidden["x"], base.entries[base.rows(layer)])
            worst[layer] = float((written - output).detach().norm() / output.detach().norm())
            return written

        values.register_forward_hook(replaced)
    return worst, model


@pytest.mark.parametrize(
    ("name", "activation"), [("Llama", "silu"), ("Bert", "gelu"), ("OPT", "relu"), ("Phi3", "silu")]
)
def test_a_converted_layer_is_cross_attention_to_the_one_base(name, activation):
    model, ids = tiny(name), tokens(2, 7)
    expected = run(model, ids)
    worst, through = through_cross_attention(af.knowledge.from_ffn(model), activation)
    torch.testing.assert_close(run(through, ids), expected, rtol=1e-9, atol=1e-10)
    assert sorted(worst) == [0, 1]
    assert max(worst.values()) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "activation", "entries"), [("smollm2-135m", "silu", 46_080), ("minilm", "gelu", 9_216)]
)
def test_real_models_through_cross_attention(name, activation, entries):
    """In float64, eq. 1-9 on the one base compute the model that the packed rows compute: rounding of sums is all."""
    loaded = af.load_model(name, dtype="float64")
    inputs = loaded.tokenizer("Knowledge sits in the feed-forward layers.", return_tensors="pt")
    with torch.no_grad():
        expected = loaded.model(**inputs)[0]
        opened = af.knowledge.from_ffn(loaded)
        assert same_state(af.knowledge.to_ffn(opened), loaded.model)
        worst, through = through_cross_attention(opened, activation)
        found = through(**inputs)[0]
    assert opened.knowledge.num_entries == entries
    assert max(worst.values()) < 1e-12
    # Norms of transformers are in float32: its rounding, once a layer, bounds how equal the logits can be.
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_what_would_be_left_out_refuses_the_model_and_it_is_as_it_was():
    model = tiny("Llama", torch.float32)
    model.model.layers[0].adapter = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 32))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        af.UnsupportedArchitecture,
        match=r"model\.layers\.0\.adapter\.0 \(1 matrix\), model\.layers\.0\.adapter\.1 \(1 matrix\) .* \(2 matrices",
    ):
        af.knowledge.from_ffn(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model, "knowledge")
    ids = tokens(1, 5)
    partly = af.knowledge.from_ffn(model, partial=True)
    torch.testing.assert_close(outputs(partly, input_ids=ids), outputs(model, input_ids=ids), rtol=1e-5, atol=1e-6)
    assert partly.knowledge.num_entries == 96


class ConvolutionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise, self.out, self.back = nn.Conv1d(16, 16, 3, groups=16), nn.Linear(16, 8), nn.Linear(8, 16)


def test_nothing_outside_of_the_attention_layers_is_left_out_either():
    model = tiny("Llama", torch.float32, hidden_size=16)
    model.resampler = type(model.model.layers[0].mlp)(model.config)
    model.resampler.gate_proj = nn.Linear(32, 48)  # a feed-forward layer of the same kind, from another width
    model.tower = nn.Module()
    model.tower.layers = nn.ModuleList([ConvolutionLayer(), ConvolutionLayer()])
    model.head = nn.ModuleList([nn.Linear(16, 16)])
    left = r"tower\.layers\.0\.out \(1 matrix\), .* and 2 more modules cannot be converted \(5 matrices"
    with pytest.raises(af.UnsupportedArchitecture, match=left):
        af.knowledge.from_ffn(model)
    rest = uncovered(model, find_feed_forward(model))
    maps = [f"tower.layers.{layer}.{name}" for layer in (0, 1) for name in ("out", "back")]
    assert set(rest) == {f"{name}.weight" for name in [*maps, "resampler.gate_proj"]}


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_per_layer_embeddings_weigh_entries_by_the_token(name):
    model = build(Architecture(f"{name.lower()}_text", f"{name}ForCausalLM", "decoder"))
    with torch.no_grad():
        model.model.embed_tokens_per_layer.weight.normal_()
        for parameter in model.parameters():  # such as a scale that begins at 0
            parameter.copy_(parameter if parameter.any() else torch.ones_like(parameter))
    opened, ids = af.knowledge.from_ffn(model), torch.tensor([[9, 12, 30, 12, 44]])
    assert same_state(af.knowledge.to_ffn(opened), model)
    width = model.config.hidden_size_per_layer_input
    read = []
    model.model.layers[0].per_layer_projection.register_forward_pre_hook(lambda module, args: read.append(args[0]))

    def weights():
        layer = next(one for one in af.knowledge.trace(opened, ids, top=width).layers if one.letter == "P")
        found = torch.zeros(ids.shape[1], 1 + width)  # a last column for places that nothing fired at
        return found.scatter_(1, layer.ids.where(layer.ids >= 0, torch.tensor(width)), layer.weights)[:, :width]

    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, opened(input_ids=ids).logits)
        before = weights()
        torch.testing.assert_close(before, read[0][0])
        opened.get_per_layer_input_embeddings().weight[12] *= 2  # the row of one token
    assert (weights() != before).any(1).tolist() == [False, True, False, True, False]


def test_outputs_that_differ_are_refused(monkeypatch):
    model = tiny("Llama", torch.float32)
    true = LinearLayer.entries
    monkeypatch.setattr(LinearLayer, "entries", lambda *args: true(*args).mul(1.01))
    with pytest.raises(af.UnsupportedArchitecture, match="was not converted exactly: outputs differ by"):
        af.knowledge.from_ffn(model)
    assert af.knowledge.from_ffn(model, check=False).knowledge.num_entries == 96


def test_layers_that_are_not_read_are_refused():
    model = tiny("Llama", torch.float32)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    with pytest.raises(af.UnsupportedArchitecture, match="does not use its feed-forward layers"):
        af.knowledge.from_ffn(model)
    assert af.knowledge.from_ffn(model, check=False).knowledge.num_entries == 96


def test_the_check_leaves_no_trace():
    model = tiny("Llama", torch.float32).train()
    state = torch.get_rng_state()
    opened = af.knowledge.from_ffn(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert opened.training
    assert model.training
    assert torch.equal(opened.knowledge.entries, af.knowledge.from_ffn(model, check=False).knowledge.entries)


@pytest.mark.parametrize(("name", "kind"), [("ViTModel", "vit"), ("Dinov2Model", "dinov2"), ("VivitModel", "vivit")])
def test_an_image_tower_is_checked_on_an_image(name, kind):
    model = build(Architecture(kind, name, "base"))
    opened = af.knowledge.from_ffn(model)
    assert opened.knowledge.num_layers == 2
    assert same_state(model, af.knowledge.to_ffn(opened))


def test_a_model_that_does_not_run_says_how_to_go_on():
    model = tiny("Llama", torch.float32)
    model.forward = lambda pixels: pixels
    with pytest.raises(ValueError, match=r"does not run on the check's input_ids .* pass check= named inputs"):
        af.knowledge.from_ffn(model)
    with pytest.raises(ValueError, match=r"that it takes, such as pixel_values, or check=False"):
        af.knowledge.from_ffn(build(Architecture("segformer", "SegformerModel", "base")))
    model = tiny("Llama", torch.float32)
    assert af.knowledge.from_ffn(model, check={"inputs_embeds": torch.randn(1, 3, 32)}).knowledge.num_layers == 2
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="gives NaN or infinity"):
        af.knowledge.from_ffn(model)


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


IMAGE_AND_TEXT = torch.cat([torch.full((1, 4), 63), tokens(1, 5)], dim=1)


def seen(model):
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with precision(model, torch.float64), torch.no_grad():
        return model(input_ids=IMAGE_AND_TEXT, pixel_values=pixels).logits


def test_two_stacks_share_a_base():
    model = llava()
    before, expected = model.state_dict(), seen(model)
    opened = af.knowledge.from_ffn(model)
    base = opened.knowledge
    images, texts = EntryLayout(16, gated=False, padding=98 - 33), EntryLayout(32, gated=True)
    assert sorted(base.layouts, key=str) == sorted([images] * 2 + [texts] * 2, key=str)
    assert sorted(base.counts.tolist()) == [24, 24, 40, 40]
    torch.testing.assert_close(seen(opened), expected, rtol=1e-10, atol=1e-12)
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
    assert torch.equal(seen(back), expected)
    with pytest.raises(ValueError, match=r"the layers have different layouts: read \.layouts\[layer\]"):
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
    expected = seen(model)
    with torch.no_grad():
        out.weight[:, 3] *= -2
    assert not torch.allclose(seen(model), expected)
    torch.testing.assert_close(seen(opened), seen(model), rtol=1e-10, atol=1e-12)


def test_a_trace_of_a_text_is_of_the_layers_that_read_it():
    opened = af.knowledge.from_ffn(llava().float())
    result = af.knowledge.trace(opened, tokens(1, 5))
    assert [one.num_entries for one in result.layers] == [40, 40]


def test_entries_of_a_narrow_layer_hold_zeros_where_it_reads_nothing():
    layouts = [EntryLayout(2, gated=False, padding=3), EntryLayout(2, gated=True)]
    base = LayeredKnowledge(torch.zeros(4, 8), [1, [2, 1]], layouts)
    assert base.expert_of([0, 1, 2, 3]) == [None, 0, 0, 1]
    assert [base.rows(1, expert) for expert in (0, 1)] == [slice(1, 3), slice(3, 4)]
    with pytest.raises(ValueError, match=r"layer 0 does not read columns 4 to 6"):
        base.insert(0, torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"layer 0 does not read columns 4 to 6"):
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


def stored(name="Llama"):
    """A converted model, and a store of its entries."""
    torch.manual_seed(0)
    model = af.knowledge.from_ffn(tiny(name).float())
    store = Store.open("memory", dim=model.knowledge.entry_dim, num_thresholds=model.knowledge.num_layers)
    convert.save_entries(model, store, name="tiny")
    return model, store


def test_a_search_finds_the_entries_of_a_layer_that_a_token_activates(monkeypatch):
    monkeypatch.setattr(convert, "_BATCH", 20)
    (model, store), readings, hidden = stored(), [], []
    assert torch.equal(store.vectors(), model.knowledge.get(store.ids()))
    entry = store.get([50])[0]
    assert (entry.source, entry.encoder, entry.version) == ("layer 1", "from_ffn:tiny", 1)
    assert entry.thresholds.tolist() == [-1e9, 0.0]
    base, reader = model.knowledge, readers(model)[1]
    reader.observer = readings.append
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0, -1]))
    outputs(model, input_ids=tokens(1, 5))
    query = torch.zeros(base.entry_dim)
    query[base.layout.key("gate")] = hidden[0].detach()
    query[base.layout.threshold("gate")] = 1.0
    scores = readings[0].scores[0, 0, -1, 0]
    found = store.search(query, 5, threshold_column=1)
    assert found.ids.tolist() == reader.ids(scores.topk(5).indices).tolist()
    torch.testing.assert_close(found.scores, scores.topk(5).values)


def test_the_source_of_an_entry_names_its_expert():
    model, store = stored("Mixtral")
    key = int(model.knowledge.ids[model.knowledge.rows(1, 1)][0])
    assert store.get([key])[0].source == "layer 1, expert 1"
