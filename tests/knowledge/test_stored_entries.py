"""A converted model's entries in a store, bit for bit, where those of a layer are searched."""

import torch

import attnflow as af
from attnflow.knowledge import Store, convert
from attnflow.knowledge.layered import readers
from tests.models import outputs, tiny, tokens


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
