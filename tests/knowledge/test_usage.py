"""Active entries against counting by hand and against hooks of one's own; duplicates against comparing all pairs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import attnflow as af
from attnflow.knowledge import GeneralizedCrossAttention, KnowledgeBase, Retrieval, duplicates
from attnflow.knowledge.layered import readers
from attnflow.knowledge.reader import KnowledgeReader, LayerReading
from attnflow.knowledge.reading.usage import Activity
from attnflow.knowledge.retrieval import Certificate
from tests.models import modular, tiny, tokens


def reading(fires, layer=0, ids=None):
    """A reading whose weights are 1 where entries fire, [tokens, heads, read]."""
    weights = torch.tensor(fires).float()
    return LayerReading(layer, ids, weights.unsqueeze(0), weights)


def same(positions):
    return positions


def test_an_entry_is_dead_if_no_layer_reads_it():
    seen = Activity()
    seen.see(reading([[[1, 0, 0]]], layer=0), same)
    seen.see(reading([[[0, 0, 1]]], layer=1), same)
    report = seen.report()
    assert [layer.dead for layer in report.layers] == [2, 2]
    assert report.dead == (1,)
    apart = Activity()  # each layer with entries of its own
    apart.see(reading([[[1, 0, 0]]], layer=0), same)
    apart.see(reading([[[0, 0, 1]]], layer=1), lambda positions: positions + 10)
    assert apart.report().dead == (1, 2, 10, 11)


def test_retrieved_entries_are_counted_by_id():
    seen = Activity()
    seen.may_read(0, torch.arange(6))
    ids = torch.tensor([[[4, 2, -1]], [[4, 0, 1]]])
    certificate = Certificate(False, 3, 6, torch.zeros(2))
    seen.see(replace(reading([[[1, 1, 0]], [[1, 0, 1]]], ids=ids), certificate=certificate), same)
    found, counts = seen.fired(0)
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == {0: 0, 1: 1, 2: 1, 3: 0, 4: 2, 5: 0}
    report = seen.report()
    assert (report.layers[0].read_all, report.dead) == (False, (0, 3, 5))
    assert "2.0*" in str(report)
    assert "* counted among the entries that were read" in str(report)


@pytest.mark.parametrize("retrieval", [None, Retrieval(k=2, search="exact")])
def test_entries_of_a_store_are_counted_by_their_ids(retrieval):
    model, ids = tiny("Llama"), [90, 7, 400]
    with af.knowledge.Store.open("memory", dim=8) as store:
        store.insert(embeddings=torch.eye(8)[:3], ids=ids)
        with af.knowledge.attach(model, store, retrieval=retrieval) as handle, af.knowledge.activity(model) as seen:
            model(tokens(1, 5))
            found, counts = seen.fired(handle.readers[0].layer)
    assert found.tolist() == sorted(ids)
    assert int(counts.sum()) == 5 * (3 if retrieval is None else 2)
    assert seen.report().entries == 3


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "sparsemax"])
@pytest.mark.parametrize("gated", [False, True])
def test_active_is_a_positive_gate(activation, gated):
    attention = GeneralizedCrossAttention(8, 6, 5, activation=activation, gated=gated).double()
    reader, readings = KnowledgeReader(0, attention), []
    reader.observer = readings.append
    reader(torch.randn(7, 8).double(), torch.randn(20, 5).double())
    scores = readings[0].scores
    expected = attention.activation(scores[0]) > 0
    assert 0 < expected.sum() < expected.numel()
    seen = Activity()
    seen.see(readings[0], same)
    assert torch.equal(seen.fired(0)[1], expected.sum(dim=(0, 1)))
    if activation != "sparsemax":
        assert torch.equal(expected, scores[0] > 0)


def test_reports_as_text_and_json():
    seen = Activity()
    with pytest.raises(ValueError, match="run a forward pass"):
        seen.report()
    with pytest.raises(ValueError, match=r"layer must be one of \[\], got 3"):
        seen.fired(3)
    seen.see(reading([[[1, 0, 0, 1]], [[1, 0, 0, 0]]]), same)
    report = seen.report()
    assert type(report).from_json(report.to_json()) == report
    assert str(report).splitlines() == [
        "layer  tokens  entries  mean active  share  max active  never active",
        "    0       2        4          1.5  37.5%           2             2",
        "never active in any layer: 2 of 4 entries: [1, 2]",
    ]


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
    model = af.knowledge.from_ffn(source)
    with af.knowledge.activity(model) as seen:
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
    model = af.knowledge.from_ffn(source)
    with af.knowledge.activity(model) as seen:
        model(ids, mask)  # by position
        assert seen.fired(1)[1].tolist() == opened.sum(dim=0).tolist()
        assert seen.report().layers[1].tokens == 10
    with af.knowledge.activity(model) as seen:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert seen.report().layers[0].tokens == 10 + 2 * 3


def test_an_encoder_decoder_counts_both_sides():
    model = af.knowledge.from_ffn(tiny("Bart"))
    with af.knowledge.activity(model) as seen:
        model(input_ids=tokens(1, 5), attention_mask=torch.ones(1, 5).long(), decoder_input_ids=tokens(1, 3))
    assert [layer.tokens for layer in seen.report().layers] == [5, 5, 3, 3]


@pytest.mark.parametrize("retrieval", [None, Retrieval(k=1, search="exact"), Retrieval(threshold=0.0)])
def test_a_modular_model(retrieval):
    model = modular(num_knowledge_heads=1)
    for reader in readers(model):
        reader.retrieval = retrieval
    ids = tokens(2, 8)
    with af.knowledge.activity(model) as seen, torch.no_grad():
        model(input_ids=ids)
    report = seen.report()
    assert [layer.tokens for layer in report.layers] == [16, 16]
    assert [layer.entries for layer in report.layers] == [24, 24]
    assert [layer.read_all for layer in report.layers] == [retrieval is None] * 2
    if retrieval is not None and retrieval.k:
        assert all(layer.maximum <= 1 for layer in report.layers)
        assert len(report.dead) > 0
    else:
        full = [seen.fired(layer)[1].tolist() for layer in (0, 1)]
        for reader in readers(model):
            reader.retrieval = None
        with af.knowledge.activity(model) as everything, torch.no_grad():
            model(input_ids=ids)
        assert [everything.fired(layer)[1].tolist() for layer in (0, 1)] == full


def test_a_block_that_fails_leaves_the_model_as_it_was():
    model = modular()
    watched, again = af.knowledge.activity(model), af.knowledge.activity(model)
    with watched, pytest.raises(ValueError, match="layer 0 are being watched already"), again:
        pass
    with pytest.raises(RuntimeError, match="stop"), af.knowledge.activity(model):
        raise RuntimeError("stop")
    assert all(reader.observer is None for reader in readers(model))
    with pytest.raises(ValueError, match="reads no knowledge base"), af.knowledge.activity(tiny("Llama")):
        pass


def by_hand(rows, threshold):
    """(pairs, groups) from all cosines in float64."""
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    cosines = unit @ unit.T
    assume(not bool(((cosines - threshold).abs() < 1e-5).any()))  # rounding may put these on either side
    near = cosines >= threshold
    near &= (rows.norm(dim=1) > 0)[:, None] & (rows.norm(dim=1) > 0)
    pairs = int(near.triu(1).sum())
    groups, left = set(), set(range(len(rows)))
    while left:
        group, edge = set(), {left.pop()}
        while edge:
            group |= edge
            edge = {j for i in edge for j in near[i].nonzero().flatten().tolist()} - group
        left -= group
        if len(group) > 1:
            groups.add(tuple(sorted(group)))
    return pairs, groups


@given(st.integers(0, 10_000), st.sampled_from([0.6, 0.9, 0.999]), st.integers(1, 60))
def test_duplicates_are_those_of_all_pairs(seed, threshold, count):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 4, generator=generator)
    rows = centres[torch.randint(5, (count,), generator=generator)]
    rows = rows + 0.2 * torch.randn(count, 4, generator=generator) * (torch.rand(count, 1, generator=generator) < 0.5)
    rows[torch.rand(count, generator=generator) < 0.05] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnflow.knowledge.reading.duplication._ROWS", 7)
        found = duplicates(rows, threshold)
    pairs, groups = by_hand(rows, threshold)
    assert (found.pairs, set(found.groups)) == (pairs, groups)
    assert (found.total, found.zeros) == (count, int((rows.norm(dim=1) == 0).sum()))
    assert [len(group) for group in found.groups] == sorted(map(len, found.groups), reverse=True)


def test_many_equal_entries_are_no_work():
    found = duplicates(torch.ones(20_000, 8))
    assert (found.pairs, len(found.groups), found.surplus) == (20_000 * 19_999 // 2, 1, 19_999)


def test_duplicates_of_a_base():
    base = KnowledgeBase(3, 2)
    base.entries.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    found = duplicates(base)
    assert found.groups == ((0, 2),)
    assert type(found).from_json(found.to_json()) == found
    assert str(found).splitlines()[-1] == "      2  [0, 2]"
