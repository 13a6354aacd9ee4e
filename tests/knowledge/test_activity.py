"""Active entries of models' forward passes, against hooks of one's own."""

import pytest
import torch

from attnflow.knowledge import Retrieval
from attnflow.knowledge.hf.convert import from_ffn
from attnflow.knowledge.hf.modular import ModularConfig, ModularForCausalLM
from attnflow.knowledge.layered import readers
from attnflow.knowledge.usage import activity
from tests.models import tiny, tokens

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_entries": 24}


def gates(model, **inputs):
    """Positive gate scores of the second layer of a plain tiny Llama, [batch, tokens, neurons]."""
    seen = []
    hook = model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda _, __, out: seen.append(out > 0))
    model(**inputs)
    hook.remove()
    return torch.cat([one.flatten(0, 1) for one in seen]).view(seen[0].shape)


def test_a_converted_model_is_counted_as_its_gates_open():
    source, ids = tiny("Llama"), tokens(2, 7)
    opened = gates(source, input_ids=ids).flatten(0, 1)
    model = from_ffn(source)
    with activity(model) as seen:
        model(input_ids=ids)
        model(input_ids=ids)
    found, counts = seen.fired(1)
    assert found.tolist() == list(range(48, 96))
    assert counts.tolist() == (2 * opened.sum(dim=0)).tolist()
    layer = seen.report().layers[1]
    assert (layer.layer, layer.tokens, layer.entries) == (1, 28, 48)
    assert layer.mean == pytest.approx(float(opened.sum(dim=1).double().mean()))
    assert layer.dead == int((opened.sum(dim=0) == 0).sum())
    assert all(reader.observer is None for reader in readers(model))


def test_padding_does_not_count_and_generated_tokens_do():
    source, ids = tiny("Llama"), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    opened = gates(source, input_ids=ids, attention_mask=mask)[mask.bool()]
    model = from_ffn(source)
    with activity(model) as seen:
        model(ids, mask)  # by position
        assert seen.fired(1)[1].tolist() == opened.sum(dim=0).tolist()
        assert seen.report().layers[1].tokens == 10
    with activity(model) as seen:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert seen.report().layers[0].tokens == 10 + 2 * 3


def test_an_encoder_decoder_counts_both_sides():
    model = from_ffn(tiny("Bart"))
    with activity(model) as seen:
        model(input_ids=tokens(1, 5), attention_mask=torch.ones(1, 5).long(), decoder_input_ids=tokens(1, 3))
    assert [layer.tokens for layer in seen.report().layers] == [5, 5, 3, 3]


@pytest.mark.parametrize("retrieval", [None, Retrieval(k=4, search="exact"), Retrieval(threshold=0.0)])
def test_a_modular_model(retrieval):
    torch.manual_seed(0)
    model = ModularForCausalLM(ModularConfig(**SIZES)).eval()
    for reader in readers(model):
        reader.retrieval = retrieval
    ids = tokens(2, 8)
    with activity(model) as seen, torch.no_grad():
        model(input_ids=ids)
    report = seen.report()
    assert [layer.tokens for layer in report.layers] == [16, 16]
    assert [layer.entries for layer in report.layers] == [24, 24]
    assert [layer.read_all for layer in report.layers] == [retrieval is None] * 2
    if retrieval is not None and retrieval.k:
        assert all(layer.maximum <= 4 for layer in report.layers)
        assert len(report.dead) > 0
    else:
        full = [seen.fired(layer)[1].tolist() for layer in (0, 1)]
        for reader in readers(model):
            reader.retrieval = None
        with activity(model) as everything, torch.no_grad():
            model(input_ids=ids)
        assert [everything.fired(layer)[1].tolist() for layer in (0, 1)] == full


def test_a_block_that_fails_leaves_the_model_as_it_was():
    model = ModularForCausalLM(ModularConfig(**SIZES))
    with activity(model), pytest.raises(ValueError, match="layer 0 are being watched already"), activity(model):
        pass
    with pytest.raises(RuntimeError, match="stop"), activity(model):
        raise RuntimeError("stop")
    assert all(reader.observer is None for reader in readers(model))
    with pytest.raises(ValueError, match="reads no knowledge base"), activity(tiny("Llama")):
        pass
