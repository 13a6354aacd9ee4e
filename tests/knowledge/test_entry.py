"""One entry: its tokens, the texts that make it fire, what is near it, and the model without it."""

import sys

import pytest
import torch

import attnflow as af
from attnflow.knowledge.layered import readers
from attnflow.knowledge.reading.results import EntryReport
from attnflow.models.subject import Loaded
from tests.knowledge.test_ablation import DOWN, zeroed
from tests.knowledge.test_experts import IDS, expert_readers
from tests.knowledge.test_experts import made as experts_of
from tests.knowledge.test_trace import hooks_of, made
from tests.models import tiny
from tests.models.saved import word_tokenizer

TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12], [3, 4, 5, 6], [40, 41, 42, 43, 44]]


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_tokens_are_those_that_the_value_moves_most(name):
    model = made(name)
    base, reader = model.knowledge, readers(model)[1]
    id = int(reader.ids(torch.tensor([4]))[0])
    found = af.knowledge.entry(model, id, count=6)
    assert (found.layer, found.entry, found.expert, found.without) == (1, id, None, "")
    value = base.get([id])[0, base.layout.value]
    assert found.norm == pytest.approx(float(value.norm()))
    norm = model.model.norm if name == "Llama" else model.transformer.ln_f
    value = value if name == "Llama" else value - value.mean()
    pushes = model.get_output_embeddings().weight.detach() @ (value * norm.weight.detach())
    pushes = (pushes - pushes.mean()) / pushes.std()
    for listed, sign in ((found.raised, 1), (found.lowered, -1)):
        top = (sign * pushes).topk(6)
        assert [one.token_id for one in listed] == top.indices.tolist()
        assert [sign * one.strength for one in listed] == pytest.approx(top.values.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", ["Llama", "OPT", "heads", "gated", "best"])
def test_examples_are_the_largest_weights_of_all_texts_alone(name, monkeypatch):
    """Padded together, and a batch at a time, they are what each text gives by itself."""
    monkeypatch.setattr(sys.modules["attnflow.knowledge.reading.entry"], "_BATCH", 10)
    model = made(name)
    layer = None if name in ("Llama", "OPT") else 1
    fired = af.knowledge.trace(model, TEXTS[0], top=1000, by="norm").fired(layer=1)
    head = 1 if name == "heads" else 0
    id = next(one.entry for one in fired if one.head == head)
    found = af.knowledge.entry(model, id, layer=layer, head=head, texts=TEXTS, count=9)
    expected, active = [], 0
    for index, text in enumerate(TEXTS):
        table = af.knowledge.trace(model, text, top=1000, by="norm").layer(1)
        mine = (table.ids == id) & (table.heads == head)
        weights = torch.where(mine, table.weights, 0).sum(dim=1)
        active += int((torch.where(mine, table.scores, 0) > 0).sum())
        if weights.abs().max() > 0:
            expected.append((float(weights.abs().max()), index, int(weights.abs().argmax()), weights.tolist()))
    expected.sort(key=lambda one: -one[0])
    assert expected
    assert [(one.text, one.position) for one in found.examples] == [one[1:3] for one in expected]
    for one, (_, index, position, weights) in zip(found.examples, expected, strict=True):
        assert one.weight == pytest.approx(weights[position], rel=1e-6)
        assert list(one.weights) == pytest.approx(weights[one.first :], rel=1e-6, abs=1e-12)
        assert "".join(one.tokens) == " ".join(map(str, TEXTS[index]))
    assert found.tokens_read == sum(map(len, TEXTS))
    if name in ("Llama", "gated"):  # a trace lists all entries with a weight; those without one may have a score
        assert found.active == active


def test_an_expert_fires_only_where_it_is_chosen():
    model = af.knowledge.from_ffn(experts_of("Qwen3Moe"))
    reader = expert_readers(model)[0]
    table = af.knowledge.trace(model, IDS[:1], top=1000, by="norm").layer(reader.layer)
    id = int(table.ids[3, 0])
    found = af.knowledge.entry(model, id, texts=[IDS[0].tolist()])
    assert found.expert == model.knowledge.expert_of([id])[0]
    here = torch.where(table.ids == id, table.weights, 0).sum(dim=1)
    assert 0 < int((here != 0).sum()) < len(here)
    assert list(found.examples[0].weights) == pytest.approx(here.tolist(), rel=1e-4, abs=1e-6)


def test_near_entries_point_the_same_way():
    model = made("Qwen2")
    base, layout = model.knowledge, model.knowledge.layout
    with torch.no_grad():
        base.entries[50, layout.value] = 3 * base.entries[7, layout.value]  # of another layer
        base.entries[9, layout.key("gate")] = 2 * base.entries[7, layout.key("gate")]
    found = af.knowledge.entry(model, 7, count=5)
    assert found.near_by_value[0].entry == 50
    assert found.near_by_key[0].entry == 9
    for near, columns in ((found.near_by_value, layout.value), (found.near_by_key, layout.key("gate"))):
        rows = torch.nn.functional.normalize(base.entries.detach()[:, columns], dim=-1)
        cosines = rows @ rows[7]
        cosines[7] = -2
        top = cosines.topk(5)
        assert [one.entry for one in near] == top.indices.tolist()
        assert [one.cosine for one in near] == pytest.approx(top.values.tolist(), rel=1e-6)
        assert [one.layer for one in near] == base.layer_of(top.indices)
    same = af.knowledge.entry(model, 50, count=3)
    assert found.near_by_value[0].raised == tuple(one.token for one in same.raised)


def test_without_the_entry_the_model_says_what_the_zeroed_module_says():
    torch.manual_seed(0)
    model, tokenizer = tiny("Llama"), word_tokenizer(["[UNK]", *(f"w{i}" for i in range(49))])
    opened = Loaded(af.knowledge.from_ffn(model), tokenizer)
    reader = readers(opened.model)[1]
    for position in (-1, 1):
        id = int(reader.ids(torch.tensor([6]))[0])
        answer = af.knowledge.entry(opened, id, count=50, ablate="w4 w5 w6", position=position).removal
        inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
        with torch.no_grad():
            before = model(**inputs).logits[0, position].softmax(dim=-1)
        after = zeroed(model, DOWN["Llama"](model)[:, 6], inputs)[0, position].softmax(dim=-1)
        assert answer.tokens == ("w4", " w5", " w6")
        assert answer.position == position % 3
        ids = [one.token_id for one in answer.chances]
        assert ids == before.argsort(descending=True).tolist()
        assert [one.before for one in answer.chances] == pytest.approx(before[ids].tolist(), rel=1e-6)
        assert [one.after for one in answer.chances] == pytest.approx(after[ids].tolist(), rel=1e-6)
        assert answer.kl == pytest.approx(float((before * (before / after).log()).sum()), rel=1e-4)
        assert answer.changed == (int(after.argmax()) != ids[0])
    assert f"without {answer.name}: " in str(answer)


def test_what_a_report_says():
    model = made("Llama")
    found = af.knowledge.entry(model, 7, texts=TEXTS, count=3, ablate=[5, 6])
    again = EntryReport.from_json(found.to_json())
    assert again == found
    assert {row["kind"] for row in found.rows()} == {"raises", "lowers", "fires", "near by value", "near by key"}
    assert str(found).startswith("L0N7 of LlamaForCausalLM: layer 0 neuron 7, entry 7")
    assert str(found).endswith(str(found.removal))


def test_models_without_named_tokens_and_models_left_as_they_were():
    model = af.knowledge.from_ffn(tiny("Bert")).train()
    before = hooks_of(model)
    found = af.knowledge.entry(model, 7, texts=TEXTS, count=2)
    assert "no unembedding" in found.without
    assert found.raised == found.lowered == ()
    assert len(found.examples) == 2
    assert found.near_by_key[0].raised == ()
    assert model.training
    assert hooks_of(model) == before
    assert all(reader.observer is None for reader in readers(model))
