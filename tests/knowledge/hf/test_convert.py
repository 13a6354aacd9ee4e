"""Feed-forward layers as entries and back: the same function, the same weights, an untouched original."""

import copy

import pytest
import torch

import attnflow as af
from attnflow.knowledge.layered import EntryScores, EntryValues
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
    with pytest.raises(ValueError, match="layers now have 48 to 49 entries"):
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


def test_what_cannot_be_converted_says_why():
    with pytest.raises(
        af.UnsupportedArchitecture, match=r"no feed-forward layers that are known .* nothing was converted"
    ):
        af.knowledge.from_ffn(tiny("Mamba2", torch.float32))
    with pytest.raises(ValueError, match=r"not exact: .* has rank .* entries have width d_E = 32"):
        af.knowledge.from_ffn(tiny("GPT2", torch.float32), entry_dim=32)
    for name in ("Llama", "Phi3"):  # separate maps, and one for both keys
        with pytest.raises(
            ValueError, match=r"first gated layer is not exact: \[W_gate\^T \| W_up\^T \| W_2\] has rank"
        ):
            af.knowledge.from_ffn(tiny(name, torch.float32), entry_dim=32)
        with pytest.raises(ValueError, match=r"\[W_gate \| W_up\] has rank \d+, but keys have width d_k = 3"):
            af.knowledge.from_ffn(tiny(name, torch.float32), key_dim=3)
    converted = af.knowledge.from_ffn(tiny("Llama", torch.float32))
    with pytest.raises(ValueError, match="reads a knowledge base already"):
        af.knowledge.from_ffn(converted)
    with pytest.raises(ValueError, match="reads no knowledge base"):
        af.knowledge.to_ffn(tiny("Llama", torch.float32))
    converted.knowledge.update([0], torch.ones(1, converted.knowledge.entry_dim))
    with pytest.raises(ValueError, match="has no bias, but its entries were given thresholds"):
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
