"""Numbers of entries: an explanation, a trace, a list of writers and the page of an entry give the same ones."""

import pytest
import torch
from torch import nn

import attnflow as af
from tests.conformance.miniature import named
from tests.explain.test_answer import IDS
from tests.models import deep

CLOSE = {"rel": 1e-4, "abs": 1e-6}  # norms compute in float32
FAMILIES = ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "Qwen2MoeForCausalLM"]


def shown(model):
    """By name and position: (the weight in the trace, number within the layer, id, head), of all entries."""
    fired = af.knowledge.trace(model, IDS, top=100_000, by="norm", promoted=0).fired()
    found = {(one.name, one.position): (one.weight, one.neuron, one.entry, one.head) for one in fired}
    assert len(found) == len(fired)
    return found


def assert_numbers_agree(model, letter):
    explained, traced = af.explain.answer(model, IDS, 17, 19), shown(model)
    seen = [source for source in explained.entries if source.letter == letter]
    for source in seen:
        weight, neuron, _, _ = traced[source.name, source.position]
        assert weight == pytest.approx(source.activation, **CLOSE)
        assert neuron == source.neuron
    for source in seen[:3]:
        _, _, id, head = traced[source.name, source.position]
        by_name = af.knowledge.entry(model, source.name)
        assert by_name == af.knowledge.entry(model, id, layer=source.layer if letter == "S" else None, head=head)
        assert (by_name.name, by_name.entry, by_name.head) == (source.name, id, head)
        assert str(by_name).startswith(f"{source.name} of ")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_give_an_entry_the_same_number(family):
    torch.manual_seed(0)
    plain = named(family).double().eval()
    assert_numbers_agree(model := af.knowledge.from_ffn(plain), "N")
    traced, explained = shown(model), af.explain.answer(plain, IDS, 17, 19)
    for source in explained.entries:  # of the plain model
        assert traced[source.name, source.position][0] == pytest.approx(source.activation, **CLOSE)
    for one in () if "Moe" in family else af.knowledge.writers(model, 17, 10).entries:  # a gate lies between
        again = af.knowledge.entry(model, one.name)
        assert (again.name, again.entry, again.layer) == (one.name, one.entry, one.layer)
        assert {near.name for near in again.near_by_value} == {
            af.knowledge.entry(model, near.entry).name for near in again.near_by_value
        }


@pytest.mark.parametrize("heads", [1, 2])
def test_entries_of_a_store_are_numbered_beside_the_neurons(heads):
    torch.manual_seed(0)
    model, ids = deep("Llama").double().eval(), [7, 12, 90, 400]
    neurons = shown(model)
    with af.knowledge.Store.open("memory", dim=8) as store:
        store.insert(embeddings=torch.eye(8)[:4], ids=ids, texts=[f"fact {id}" for id in ids])
        with af.knowledge.attach(model, store, num_heads=heads) as handle:
            for reader in handle.readers:
                nn.init.constant_(reader.gate, 0.5)
            assert_numbers_agree(model, "S")
            found = af.explain.answer(model, IDS, 17, 19).entries
    facts = [source for source in found if source.letter == "S"]
    assert len({source.neuron for source in facts}) > 1
    assert {source.neuron % 401 for source in facts} <= set(ids)
    assert max(source.neuron for source in facts) // 401 == heads - 1
    assert all(source.text == f"fact {source.neuron % 401}" for source in facts)
    first = min(source.layer for source in facts)
    for source in found:  # before the first reader nothing changed, and behind it no name
        if source.letter == "N":
            weight = neurons[source.name, source.position][0]
            assert source.layer >= first or weight == pytest.approx(source.activation, **CLOSE)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("L9N1", {}, "no entry 'L9N1': expected an id, or a name"),
        ("L0N4000", {}, "no entry 'L0N4000'"),
        ("L0F1", {}, "no entry 'L0F1'"),
        ("7", {}, "no entry '7'"),
        ("L0N7", {"layer": 0}, "L0N7 says the layer and the head"),
    ],
)
def test_a_name_that_is_not_there_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        af.knowledge.entry(deep("Llama"), name, **options)


def test_an_attribution_names_the_head_of_an_edge():
    with af.explain.reading(deep("Llama").double(), IDS) as reading:
        edge = next(edge for edge in reading.answer(17, 19).edges if edge.layer)
        assert f", layer {edge.layer} head {edge.head}, query {edge.query} " in repr(reading.why(edge))
