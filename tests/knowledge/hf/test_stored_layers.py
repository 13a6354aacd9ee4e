"""A converted model's entries in a store and back, bit for bit; edits in the store act in the model."""

import copy

import pytest
import torch

import attnflow as af
from attnflow.knowledge import Store
from attnflow.knowledge.hf.stored_layers import layer_thresholds, save_entries
from attnflow.knowledge.layered import readers
from tests.models import outputs, tiny, tokens

WIDTH = 98  # of an entry of the tiny Llama


def converted(name="Llama", dtype=torch.float32):
    """A converted model, and an empty store for its entries."""
    torch.manual_seed(0)
    model = af.knowledge.from_ffn(tiny(name, dtype))
    base = model.knowledge
    return model, Store.open("memory", dim=base.entry_dim, num_thresholds=base.num_thresholds)


def written(*options):
    model, store = converted(*options)
    af.knowledge.attach(model, store, write=True).remove()
    return model, store


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_converted_model_takes_its_entries_from_a_store_and_gives_them_back(name, dtype):
    model, store = written(name, dtype)
    ids = tokens(2, 5)
    own, parameter = outputs(model, input_ids=ids), model.knowledge.entries
    before = parameter.detach().clone()
    with af.knowledge.attach(af.models.Loaded(model, None), store) as handle:
        assert torch.equal(model.knowledge.entries, before)
        assert torch.equal(outputs(model, input_ids=ids), own)
        row = torch.zeros(1, store.dim)
        handle.upsert(ids=[7], embeddings=row)
        without = outputs(model, input_ids=ids)  # by the next token
        assert not torch.equal(without, own)
        assert torch.equal(model.knowledge.get([7]), row.to(dtype))
        new = handle.insert(embeddings=torch.randn(2, store.dim), layers=[0, 1], texts=["a", "b"])
        assert model.knowledge.num_entries == len(parameter)  # and not before it
        assert not torch.equal(outputs(model, input_ids=ids), without)
        assert model.knowledge.layer_of(new) == [0, 1]
        store.delete(new)
        assert torch.equal(outputs(model, input_ids=ids), without)
        with pytest.raises(ValueError, match="reads a store already: remove that one first"):
            af.knowledge.attach(model, store)
        with pytest.raises(ValueError, match="belongs to one layer: give layers"):
            handle.insert(embeddings=row)
        assert str(handle) == f"2 layers of {type(model).__name__} read {len(parameter)} entries of memory: all of them"
    assert model.knowledge.entries is parameter
    assert torch.equal(outputs(model, input_ids=ids), own)
    assert not model._forward_pre_hooks
    store.upsert(ids=[8], embeddings=row)
    assert torch.equal(outputs(model, input_ids=ids), own)  # no longer followed
    assert str(handle).endswith("(removed)")


def test_a_search_finds_the_entries_of_a_layer_that_a_token_activates():
    (model, store), readings, hidden = written(), [], []
    entry = store.get([50])[0]
    assert (entry.source, entry.encoder, entry.version) == ("layer 1", "from_ffn:LlamaForCausalLM", 1)
    assert torch.equal(entry.thresholds, layer_thresholds([1], 2)[0])
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


def test_edits_of_the_store_are_edits_of_the_base():
    model, store = written()
    plain = copy.deepcopy(model)
    store.delete([3, 60])
    changed, new = torch.randn(1, WIDTH), torch.randn(2, WIDTH)
    changed[:, -2:] = new[:, -2:] = 0  # the plain model has no biases
    store.upsert(ids=[7], embeddings=changed)
    store.insert(embeddings=new[:1], ids=[400], thresholds=layer_thresholds([0], 2))
    store.insert(embeddings=new[1:], thresholds=layer_thresholds([1], 2))
    store.upsert(ids=[0, 90], embeddings=store.vectors([0, 90]), thresholds=layer_thresholds([1, 0], 2))  # they move
    moved = plain.knowledge.get([0, 90])
    plain.knowledge.delete([0, 3, 60, 90])
    plain.knowledge.update([7], changed)
    plain.knowledge.insert(0, torch.cat([moved[1:], new[:1]]))
    plain.knowledge.insert(1, torch.cat([moved[:1], new[1:]]))
    ids = tokens(1, 6)
    with af.knowledge.attach(model, store):
        assert torch.equal(model.knowledge.entries, plain.knowledge.entries)
        assert model.knowledge.layer_of([0, 90, 400, 401]) == [1, 0, 0, 1]
        assert torch.equal(outputs(model, input_ids=ids), outputs(plain, input_ids=ids))
        back, same = af.knowledge.to_ffn(model), af.knowledge.to_ffn(plain)
        assert torch.equal(outputs(back, input_ids=ids), outputs(same, input_ids=ids))
        assert int(model.knowledge.insert(0, new[:1])) == 402  # ids are not given out again


def test_saving_again_writes_what_has_changed(monkeypatch):
    monkeypatch.setattr("attnflow.knowledge.hf.stored_layers._BATCH", 20)
    model, store = written()
    model.knowledge.update([5], torch.randn(1, WIDTH))
    model.knowledge.delete([6])
    save_entries(model, store)
    assert store.stats().versions == {1: len(store) - 1, 2: 1}
    assert torch.equal(store.vectors(), model.knowledge.get(store.ids()))


def test_a_copy_follows_the_store_and_a_plain_model_does_not():
    model, store = written()
    ids = tokens(2, 5)
    own = outputs(model, input_ids=ids)
    handle = af.knowledge.attach(model, store)
    handle.upsert(ids=[7], embeddings=torch.zeros(1, store.dim))
    changed = outputs(model, input_ids=ids)
    plain = af.knowledge.to_ffn(model)
    assert torch.equal(outputs(plain, input_ids=ids), changed)
    handle.upsert(ids=[8], embeddings=torch.zeros(1, store.dim))
    assert torch.equal(outputs(plain, input_ids=ids), changed)
    again = copy.deepcopy(model)
    assert torch.equal(outputs(again, input_ids=ids), outputs(model, input_ids=ids))
    handle.remove()
    assert torch.equal(outputs(model, input_ids=ids), own)


def test_mistakes_change_nothing():
    model, store = written()
    before = model.knowledge.entries.detach().clone()

    def refused(match, model, store, **options):
        with pytest.raises(ValueError, match=match):
            af.knowledge.attach(model, store, **options)

    with af.knowledge.attach(model, store):
        refused("reads a store already: remove that one first", model, store)
        store.insert(embeddings=torch.randn(1, store.dim), ids=[500])
        for _ in range(2):
            with pytest.raises(ValueError, match="entry 500 does not say"):
                outputs(model, input_ids=tokens(1, 4))
    refused("entry 500 does not say which one layer", model, store)
    store.delete(range(48))
    store.delete([500])
    refused("layer 0 would be left without entries", model, store)
    assert torch.equal(model.knowledge.entries, before)
    assert model.knowledge.ids.tolist() == list(range(96))
    other = Store.open("memory", 8)
    for write in (True, False):
        refused("need a store with dim=98 and num_thresholds=2, got dim=8", model, other, write=write)
    texts = Store.open("memory", WIDTH, num_thresholds=2)
    texts.insert(embeddings=torch.randn(1, WIDTH), texts=["a cat"], encoder="minilm@1")
    refused(r"holds entries made by \[minilm@1\], which would be lost", model, texts, write=True)
    refused("convert model", *converted(dtype=torch.float64), write=True)
