"""Entries taken out: sequences of one batch as the real module computes them with that neuron's column at zero."""

import pytest
import torch
from transformers import BertForMaskedLM

import attnflow as af
from attnflow.knowledge.layered import readers
from attnflow.knowledge.reading.ablation import LocatedEntry, logits_without, without
from attnflow.models.passes.evaluation import precision
from tests.knowledge.test_experts import IDS, NAMES, columns, expert_readers, logits
from tests.knowledge.test_experts import made as experts_of
from tests.knowledge.test_trace import GATED, PLAIN, made
from tests.models import tiny, tokens

DOWN = {  # the weight of the last map of layer 1, [model_dim, neurons]
    "GPT2": lambda model: model.transformer.h[1].mlp.c_proj.weight.T,
    "GPTNeoX": lambda model: model.gpt_neox.layers[1].mlp.dense_4h_to_h.weight,
    "OPT": lambda model: model.model.decoder.layers[1].fc2.weight,
    **{name: (lambda model: model.model.layers[1].mlp.down_proj.weight) for name in GATED},
}


def zeroed(model, column, inputs):
    """Logits of the untouched model with a column of a weight at zero."""
    before = column.detach().clone()
    with torch.no_grad():
        column.zero_()
        logits = model(**inputs).logits
        column.copy_(before)
    return logits


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_it_is_the_real_module_with_that_column_at_zero(name):
    torch.manual_seed(0)
    model, ids = tiny(name), tokens(1, 7)
    opened, inputs = af.knowledge.from_ffn(model), {"input_ids": ids}
    reader, found = readers(opened)[1], af.knowledge.trace(opened, ids)
    for position in (6, 2):
        places = [one.entry - int(reader.ids(torch.tensor([0]))) for one in found.fired(position, layer=1, count=3)]
        plain, changed = logits_without(opened, inputs, [LocatedEntry(reader, place) for place in places], position)
        with torch.no_grad():
            expected = model(**inputs).logits[0, position]
        torch.testing.assert_close(plain, expected, rtol=1e-6, atol=1e-6)
        for place, row in zip(places, changed, strict=True):
            by_hand = zeroed(model, DOWN[name](model)[:, place], inputs)[0, position]
            torch.testing.assert_close(row - plain, by_hand - expected, rtol=1e-9, atol=1e-9)
            assert (row - plain).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["OPT", "Llama"])
def test_each_sequence_of_a_padded_batch_lacks_its_own_entry(name):
    torch.manual_seed(0)
    model, ids = tiny(name), tokens(3, 7)
    opened = af.knowledge.from_ffn(model)
    mask = torch.tensor([[1] * 7, [0, 0, *[1] * 5], [*[1] * 4, 0, 0, 0]])
    inputs, reader = {"input_ids": ids, "attention_mask": mask}, readers(opened)[1]
    with torch.no_grad(), without([LocatedEntry(reader, 5), None, LocatedEntry(reader, 2)]):
        found = opened(**inputs).logits
    expected = [zeroed(model, DOWN[name](model)[:, 5], inputs), model(**inputs).logits]
    expected.append(zeroed(model, DOWN[name](model)[:, 2], inputs))
    for row, each in enumerate(expected):
        seen = mask[row].bool()
        torch.testing.assert_close(found[row][seen], each[row][seen].detach(), rtol=1e-6, atol=1e-6)
    assert not any(module._forward_hooks for module in opened.modules())


@pytest.mark.parametrize("name", sorted({*NAMES} - {"GraniteMoe"}))  # whose tiny model has no logits
def test_experts_lose_the_entry_wherever_they_are_chosen(name):
    model = experts_of(name)
    opened, inputs = af.knowledge.from_ffn(model), {"input_ids": IDS[:1]}
    reader = expert_readers(opened)[0]
    fired = af.knowledge.trace(opened, IDS[:1], top=4, by="norm").fired(-1, count=99)
    entry = next(one.entry for one in fired if one.reader == reader.layer)
    place = int((reader.ids(reader.every()) == entry).nonzero()[0])
    expert, base = opened.knowledge.expert_of([entry])[0], opened.knowledge
    column = place - (base.rows(reader.layer, expert).start - base.rows(reader.layer).start)
    module = model.get_submodule(next(path for path, one in opened.named_modules() if one is reader))
    table, index = columns(name, module, column)[1]
    with precision(opened, torch.float64):
        plain, changed = logits_without(opened, inputs, [LocatedEntry(reader, place)], 8)
    expected = logits(model, IDS[:1])[0, 8]
    with torch.no_grad():
        table[(expert, *index)] = 0
    by_hand = logits(model, IDS[:1])[0, 8]
    torch.testing.assert_close(plain, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(changed[0], by_hand, rtol=1e-9, atol=1e-9)
    assert (by_hand - expected).abs().max() > 1e-6


def test_entries_of_an_attached_store():
    torch.manual_seed(0)
    model = tiny("Llama", torch.float32, num_hidden_layers=4)
    with af.knowledge.Store.open("memory", dim=8) as store:
        store.insert(embeddings=torch.eye(8), ids=torch.arange(8) * 3 + 7)
        handle = af.knowledge.attach(model, store)
        with torch.no_grad():
            for one in handle.readers:
                one.gate.fill_(1.0)
        reader, inputs = handle.readers[0], {"input_ids": tokens(1, 6)}
        plain, changed = logits_without(model, inputs, [LocatedEntry(reader, 13)], 5)
        # the same scores and so the same weights, with the value of row 2 at zero
        attention, rows = reader.attention, store.rows(store.ids())

        def hand(module, args, output):
            weights = attention.activation(attention.score(args[0], rows, attention.thresholds(rows))[0])
            values = reader.values(store.ids())
            weights[..., 2] = 0
            return torch.einsum("...he,hed->...d", weights, values)

        with torch.no_grad():
            hook = reader.register_forward_hook(hand)
            expected = model(**inputs).logits[0, 5]
            hook.remove()
        torch.testing.assert_close(changed[0], expected, rtol=1e-4, atol=1e-4)
        assert (changed[0] - plain).abs().max() > 1e-4


def test_a_long_text_runs_as_several_batches(monkeypatch):
    model, inputs = made("Llama"), {"input_ids": tokens(1, 7)}
    some = [LocatedEntry(reader, place) for reader in readers(model) for place in range(5)]
    whole = logits_without(model, inputs, some, 6)
    monkeypatch.setattr("attnflow.knowledge.reading.ablation._TOKENS", 21)
    parts = logits_without(model, inputs, some, 6)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_bidirectional_models_and_inputs_that_are_no_batch():
    torch.manual_seed(0)
    model = BertForMaskedLM(tiny("Bert").config).double().eval()
    opened, inputs = af.knowledge.from_ffn(model), {"input_ids": tokens(1, 6)}
    reader = readers(opened)[0]
    _, changed = logits_without(opened, inputs, [LocatedEntry(reader, 4)], 2)
    weight = model.bert.encoder.layer[0].output.dense.weight
    by_hand = zeroed(model, weight[:, 4], inputs)[0, 2]
    torch.testing.assert_close(changed[0], by_hand, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="the first axis of position_ids is not the batch"):
        logits_without(opened, {**inputs, "position_ids": torch.arange(6)}, [LocatedEntry(reader, 4)], 2)
    encoder = af.knowledge.from_ffn(tiny("Bert"))
    with pytest.raises(af.UnsupportedArchitecture, match="returns no logits"):
        logits_without(encoder, inputs, [LocatedEntry(readers(encoder)[0], 4)], 2)
