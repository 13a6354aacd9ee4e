"""Rows of per-layer embeddings (Gemma 3n, 4) as entries, against the model's own code and its table."""

import pytest
import torch

import attnflow as af
from attnflow.explain.explanation import Source
from tests.conformance.miniature import Architecture, build

IDS = torch.tensor([[9, 12, 30, 12, 44]])


def gemma(name):
    torch.manual_seed(0)
    model = build(Architecture(f"{name.lower()}_text", f"{name}ForCausalLM", "decoder")).double().eval()
    with torch.no_grad():
        model.model.embed_tokens_per_layer.weight.normal_()
        for parameter in model.parameters():  # such as a scale that begins at 0
            parameter.copy_(parameter if parameter.any() else torch.ones_like(parameter))
    return model


def logit(model, ids, answer):
    row = model(input_ids=ids).logits[0, -1]
    return row[answer] - row.mean()


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_rows_of_a_table_are_entries_by_their_token(name):
    model, answer, seen = gemma(name), 11, {}
    text, width = model.model, model.config.hidden_size_per_layer_input
    for number, layer in enumerate(text.layers):
        gate, out = layer.per_layer_input_gate, layer.per_layer_projection
        gate.register_forward_hook(lambda _, given, output, n=number: seen.update({("gate", n): output[0].detach()}))
        out.register_forward_hook(lambda _, given, output, n=number: seen.update({("out", n): output}))
    value = logit(model, IDS, answer)
    slopes = torch.autograd.grad(value, [seen["out", n] for n in range(len(text.layers))])
    result = af.explain.answer(model, IDS, answer)
    rows = [source for source in result.entries if source.letter == "T"]
    places = {(s.position, s.neuron) for s in rows}  # beside the neurons of a Gemma 3n, the weakest are summed
    assert places == ({(4, 44)} if name == "Gemma3n" else set(enumerate(IDS[0].tolist())))
    assert all(s.text == str(s.neuron) for s in rows)
    for source in rows:
        at, number = source.position, source.layer
        assert source.name == f"L{number}T{source.neuron}"
        assert source.activation == 1
        table = text.embed_tokens_per_layer.weight[source.neuron].view(-1, width)[number] * width**0.5 / 2**0.5
        weights = text.layers[number].act_fn(seen["gate", number][at]) * table
        vector = text.layers[number].per_layer_projection.weight @ weights
        want = (vector * slopes[number][0, at]).sum().detach()
        assert source.effect == pytest.approx(float(want), rel=1e-4, abs=1e-9)
    assert sum(source.carried for source in result.sources) == pytest.approx(result.value, rel=1e-5)
    assert "projection" in result.beside


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_removing_the_rows_of_a_token_is_emptying_them_in_the_table(name):
    model, ids, answer = gemma(name), IDS[:, :4], 11
    layers = range(len(model.model.layers))
    rows = [Source("entry", n, at, "", 12, 0.0, 0.0, letter="T") for n in layers for at in (1, 3)]
    with af.explain.reading(model, ids) as reading:
        reading.answer(answer)
        removal = reading.remove(rows)
        with pytest.raises(ValueError, match="no score that is one product"):
            reading.entry(rows[0])
    with torch.no_grad():
        before = logit(model, ids, answer)
        model.model.embed_tokens_per_layer.weight[12] = 0
        after = logit(model, ids, answer)
    assert float((before - after).abs()) > 1e-3
    assert removal.together == pytest.approx(float(before - after), rel=1e-4)


def test_vectors_in_place_of_tokens_have_no_rows():
    model = gemma("Gemma3n")
    vectors = model.model.embed_tokens(IDS).detach()
    result = af.explain.answer(model, {"inputs_embeds": vectors}, 11)
    assert not any(source.letter == "T" for source in result.entries)
    assert sum(source.carried for source in result.sources) == pytest.approx(result.value, rel=1e-5)
