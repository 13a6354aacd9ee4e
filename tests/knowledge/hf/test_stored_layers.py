"""A converted model's entries in a store and back, bit for bit; edits in the store act in the model."""

import pytest
import torch

from attnflow.knowledge import Store
from attnflow.knowledge.hf.convert import from_ffn, to_ffn
from attnflow.knowledge.hf.stored_layers import layer_thresholds, load_entries, save_entries
from attnflow.knowledge.layered import readers
from attnflow.models import MODELS, load_model
from tests.models import outputs, tiny, tokens


def converted(name="Llama", dtype=torch.float32):
    return from_ffn(tiny(name, dtype))


def store_for(model):
    return Store.open("memory", model.knowledge.entry_dim, num_thresholds=model.knowledge.num_layers)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_bitwise(name, dtype):
    model, ids = converted(name, dtype), tokens(2, 9)
    before, logits = model.knowledge.entries.detach().clone(), outputs(model, input_ids=ids)
    with store_for(model) as store:
        save_entries(model, store)
        with torch.no_grad():
            model.knowledge.entries.normal_()
        load_entries(model, store)
    assert torch.equal(model.knowledge.entries, before)
    assert torch.equal(outputs(model, input_ids=ids), logits)


def test_entries_say_where_they_come_from():
    model = converted()
    with store_for(model) as store:
        save_entries(model, store, name="tiny")
        entry = store.get([50])[0]
        assert (entry.source, entry.encoder, entry.version) == ("layer 1", "from_ffn:tiny", 1)
        assert torch.equal(entry.thresholds, layer_thresholds([1], 2)[0])
        assert torch.equal(entry.embedding, model.knowledge.get([50])[0])


def test_a_search_finds_the_entries_of_a_layer_that_a_token_activates():
    model, readings = converted(), []
    base = model.knowledge
    reader = readers(model)[1]
    reader.observer = readings.append
    hidden = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0, -1]))
    outputs(model, input_ids=tokens(1, 5))
    query = torch.zeros(base.entry_dim)
    query[base.layout.key("gate")] = hidden[0].detach()
    query[base.layout.threshold("gate")] = 1.0
    scores = readings[0].scores[0, 0, -1, 0]
    with store_for(model) as store:
        save_entries(model, store)
        found = store.search(query, 5, threshold_column=1)
    assert found.ids.tolist() == reader.ids(scores.topk(5).indices).tolist()
    torch.testing.assert_close(found.scores, scores.topk(5).values)


def test_edits_of_the_store_act_in_the_model():
    source = tiny("Llama", torch.float32)
    model, plain = from_ffn(source), from_ffn(source)
    width = model.knowledge.entry_dim
    with store_for(model) as store:
        save_entries(model, store)
        store.delete([3, 60])
        changed, new = torch.randn(1, width), torch.randn(2, width)
        changed[:, -2:] = new[:, -2:] = 0  # the plain model has no biases
        store.upsert(ids=[7], embeddings=changed)
        store.insert(embeddings=new[:1], ids=[400], thresholds=layer_thresholds([0], 2))
        store.insert(embeddings=new[1:], thresholds=layer_thresholds([1], 2))
        load_entries(model, store)
    plain.knowledge.delete([3, 60])
    plain.knowledge.update([7], changed)
    plain.knowledge.insert(0, new[:1])
    plain.knowledge.insert(1, new[1:])
    assert torch.equal(model.knowledge.entries, plain.knowledge.entries)
    assert model.knowledge.layer_of([400, 401]) == [0, 1]
    ids = tokens(1, 6)
    assert torch.equal(outputs(model, input_ids=ids), outputs(plain, input_ids=ids))
    assert torch.equal(outputs(to_ffn(model), input_ids=ids), outputs(to_ffn(plain), input_ids=ids))
    assert int(model.knowledge.insert(0, new[:1])) == 402  # ids are not given out again


def test_saving_again_writes_what_has_changed_and_goes_on_after_an_interruption(monkeypatch):
    monkeypatch.setattr("attnflow.knowledge.hf.stored_layers._BATCH", 20)
    model = converted()
    with store_for(model) as store:

        def stop(done, total, what):
            if done >= 40:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            save_entries(model, store, progress=stop)
        assert len(store) == 40
        save_entries(model, store)
        assert len(store) == model.knowledge.num_entries
        model.knowledge.update([5], torch.randn(1, model.knowledge.entry_dim))
        model.knowledge.delete([6])
        save_entries(model, store)
        assert store.stats().versions == {1: len(store) - 1, 2: 1}
        assert torch.equal(store.vectors(), model.knowledge.get(store.ids()))


def test_an_entry_can_move_to_another_layer():
    model = converted()
    with store_for(model) as store:
        save_entries(model, store)
        store.upsert(ids=[0], embeddings=store.vectors([0]), thresholds=layer_thresholds([1], 2))
        load_entries(model, store)
    assert model.knowledge.layer_of([0]) == [1]
    assert model.knowledge.counts.tolist() == [47, 49]


def test_mistakes_change_nothing():
    model = converted()
    before = model.knowledge.entries.detach().clone()
    with store_for(model) as store:
        save_entries(model, store)
        store.insert(embeddings=torch.randn(1, store.dim), ids=[500])
        with pytest.raises(ValueError, match="entry 500 does not say which one layer"):
            load_entries(model, store)
        store.delete(range(48))
        store.delete([500])
        with pytest.raises(ValueError, match="layer 0 would be left without entries"):
            load_entries(model, store)
    assert torch.equal(model.knowledge.entries, before)
    assert model.knowledge.ids.tolist() == list(range(96))
    with Store.open("memory", 8) as other:
        for act in (save_entries, load_entries):
            with pytest.raises(ValueError, match="need a store with dim=98 and num_thresholds=2, got dim=8"):
                act(model, other)
    with Store.open("memory", 98, num_thresholds=2) as texts:
        texts.insert(embeddings=torch.randn(1, 98), texts=["a cat"], encoder="minilm@1")
        with pytest.raises(ValueError, match=r"holds entries made by \[minilm@1\], which would be lost"):
            save_entries(model, texts)
        with pytest.raises(ValueError, match="convert model"):
            save_entries(converted(dtype=torch.float64), texts)
        with pytest.raises(ValueError, match="LlamaForCausalLM is not converted"):
            save_entries(tiny("Llama"), texts)


@pytest.mark.slow
def test_smollm2(tmp_path):
    if MODELS["smollm2-135m"].find() is None:
        pytest.skip("the package of smollm2-135m is not installed")
    model = from_ffn(load_model("smollm2-135m", tokenizer=False).model)
    base = model.knowledge
    # An approximate index, which a store of this size would build, takes longer than all the rest.
    widths = {"dim": base.entry_dim, "num_thresholds": base.num_layers}
    with Store.open(tmp_path / "store", **widths) as store:
        save_entries(model, store)
    before = base.entries.detach().clone()
    with torch.no_grad():
        base.entries.zero_()
    with Store.open(tmp_path / "store") as store:
        load_entries(model, store)
    assert torch.equal(base.entries, before)
