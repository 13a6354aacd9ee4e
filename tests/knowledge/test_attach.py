"""Models on a store: the same function as on their own entries, edits that the next token sees, and the way back."""

import threading

import pytest
import torch

import attnflow as af
from attnflow.knowledge import ModularConfig, ModularForCausalLM, Retrieval, Store
from attnflow.knowledge.layered import readers

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])


def modular(**settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_entries": 60}
    model = ModularForCausalLM(ModularConfig(**{**sizes, "num_knowledge_heads": 2, **settings})).eval()
    move(model)
    return model


def move(model):
    """Away from the initial values, thresholds too."""
    for layer in readers(model):
        for parameter in layer.attention.parameters():
            torch.nn.init.normal_(parameter, std=0.5)


def store_of(model):
    store = Store.open("memory", dim=16, num_thresholds=model.config.threshold_columns)
    store.insert(embeddings=model.knowledge(), texts=[f"entry {i}" for i in range(60)], encoder="of its own")
    return store


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def read(model, retrieval):
    for layer in readers(model):
        layer.retrieval = retrieval


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("threshold", ["mlp", "coordinate"])
@pytest.mark.parametrize("retrieval", [None, Retrieval(k=7, search="exact"), Retrieval(threshold=0.1)])
def test_reading_a_store_is_reading_the_models_own_entries(retrieval, threshold, gated):
    model = modular(threshold=threshold, gated=gated)
    read(model, retrieval)
    own = logits(model)
    handle = af.knowledge.attach(model, store_of(model), write=True)
    torch.testing.assert_close(logits(model), own, rtol=1e-4, atol=1e-5)
    handle.remove()
    assert torch.equal(logits(model), own)
    model.knowledge.reset_parameters()
    assert not torch.allclose(logits(model), own, atol=1e-3)


def test_an_edit_is_seen_by_the_next_token():
    model = modular()
    store = store_of(model)
    source = af.knowledge.attach(model, store, write=True)
    read(model, Retrieval(k=5, search="exact"))
    before, name = logits(model), store.snapshot()
    new = source.insert(embeddings=torch.randn(3, 16) * 8, texts=["a", "b", "c"])
    inserted = logits(model)
    assert not torch.allclose(inserted, before, atol=1e-3)
    source.upsert(ids=new, embeddings=torch.randn(3, 16) * 8)
    assert not torch.allclose(logits(model), inserted, atol=1e-3)
    assert [entry.text for entry in store.get(new)] == ["a", "b", "c"]
    store.delete(new)
    torch.testing.assert_close(logits(model), before)
    store.delete([int(key) for key in store.ids()[:30]])
    assert not torch.allclose(logits(model), before, atol=1e-3)
    store.restore(name)
    torch.testing.assert_close(logits(model), before)


def test_thresholds_of_another_model_are_refused_until_they_are_written():
    model = modular()
    store = store_of(model)
    with pytest.raises(ValueError, match=r"60 of 60 entries differ from this model's: .*write=True"):
        af.knowledge.attach(model, store)
    source = af.knowledge.attach(model, store, write=True)
    assert {(entry.version, entry.encoder) for entry in store.get(store.ids())} == {(2, "of its own")}
    assert not len(source.readers[0].model.source.stale())
    source.remove()
    move(model)
    with pytest.raises(ValueError, match=r"60 of 60 entries differ from this model's"):
        af.knowledge.attach(model, store)


def test_entries_may_be_deleted_while_a_model_reads():
    model = modular()
    store = store_of(model)
    source = af.knowledge.attach(model, store, write=True)
    read(model, Retrieval(k=9, search="exact"))
    stop, failures = threading.Event(), []

    def edit():
        try:
            while not stop.is_set():
                store.delete(source.insert(embeddings=torch.full((4, 16), 3.0)))
        except Exception as error:
            failures.append(error)

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        for _ in range(20):
            assert logits(model).isfinite().all()
    finally:
        stop.set()
        editor.join()
    assert not failures


def test_an_empty_store_and_one_that_shrinks_below_k():
    model = modular()
    store = Store.open("memory", dim=16, num_thresholds=model.config.threshold_columns)
    source = af.knowledge.attach(model, store)
    read(model, Retrieval(k=4, search="exact"))
    empty = logits(model)
    assert empty.isfinite().all()
    ids = source.insert(embeddings=model.knowledge().detach())
    assert not torch.allclose(logits(model), empty, atol=1e-3)
    store.delete(ids[2:])
    assert logits(model).isfinite().all()
    store.delete(ids[:2])
    torch.testing.assert_close(logits(model), empty)


def test_there_is_no_reader_to_save():
    model = modular()
    handle = af.knowledge.attach(model, store_of(model), write=True)
    with pytest.raises(ValueError, match="own layers read the store"):
        handle.save("nowhere")


def test_a_retrieval_is_set_and_taken_back():
    model = modular()
    store, own = store_of(model), logits(model)
    with af.knowledge.attach(model, store, write=True, retrieval=Retrieval(k=3, search="exact")) as handle:
        assert all(reader.retrieval == Retrieval(k=3, search="exact") for reader in handle.readers)
        assert not torch.equal(logits(model), own)
    assert torch.equal(logits(model), own)
    assert not any(reader.retrieval for reader in readers(model))
