"""Contradictions against comparing all pairs by hand; what a model that is asked makes of them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from attnflow.knowledge.monitor.contradiction import contradictions
from attnflow.knowledge.store import Store
from attnflow.models.loaded import Loaded

DIM = 4


class Table:
    """An encoder that knows the embedding of each value."""

    version = "table"

    def __init__(self, values, halves=False):
        self.table, self.values = values, halves
        self.dim = DIM * (1 + halves)
        self.asked = []

    def __call__(self, texts):
        self.asked += texts
        return torch.stack([self.table[text] for text in texts])


def a_store(rows, texts, version="table"):
    store = Store.open("memory", dim=rows.shape[1])
    store.insert(embeddings=rows, texts=texts, encoder=version, ids=[3 * place for place in range(len(rows))])
    return store


@given(st.integers(0, 10_000), st.integers(2, 40), st.sampled_from([0.5, 0.9]), st.booleans(), st.integers(1, 60))
def test_they_are_those_of_all_pairs(seed, count, agreement, halves, most):
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, DIM, generator=draw)
    keys = centres[torch.randint(4, (count,), generator=draw)] + 0.1 * torch.randn(count, DIM, generator=draw)
    words = {f"word {number}": torch.randn(DIM, generator=draw) for number in range(5)}
    words["same  AS word 0"] = words["word 0"] + 0.01
    said = [list(words)[int(which)] for which in torch.randint(len(words) + 1, (count,), generator=draw).clamp(max=5)]
    said = [None if number % 11 == 5 else value for number, value in enumerate(said)]
    texts = [f"key {number}" + ("" if value is None else f"\t{value}") for number, value in enumerate(said)]
    values = torch.stack([torch.ones(DIM) if value is None else words[value] for value in said])
    rows = torch.cat([keys, values], dim=1) if halves else keys

    cosines = functional.normalize(keys.double(), dim=1) @ functional.normalize(keys.double(), dim=1).T
    agree = functional.normalize(values.double(), dim=1) @ functional.normalize(values.double(), dim=1).T
    assume(not bool(((cosines - 0.9).abs() < 1e-5).any()) and not bool(((agree - agreement).abs() < 1e-5).any()))
    near = [(i, j) for i in range(count) for j in range(i + 1, count) if cosines[i, j] >= 0.9]
    expected = [
        (3 * i, 3 * j) for i, j in near if said[i] and said[j] and said[i] != said[j] and agree[i, j] < agreement
    ]
    without = {i for pair in near for i in pair if said[i] is None}
    assume(not near or any(said[i] for pair in near for i in pair))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnflow.knowledge.monitor.pairs._ROWS", 7)
        patch.setattr("attnflow.knowledge.monitor.pairs._COLUMNS", 5)
        patch.setattr("attnflow.knowledge.monitor.contradiction._CHUNK", 3)
        table = Table(words, halves)
        seen = contradictions(a_store(rows, texts), table, agreement=agreement, most=most)
    assert (seen.total, seen.near, seen.pairs, seen.without_value) == (count, len(near), len(expected), len(without))
    assert len(seen.listed) == min(most, len(expected))
    listed = {(one.first, one.second): one for one in seen.listed}
    assert set(listed) <= set(expected)
    closest = sorted((float(cosines[i // 3, j // 3]) for i, j in expected), reverse=True)[:most]
    assert [one.key_cosine for one in seen.listed] == pytest.approx(closest, abs=1e-6)
    for (i, j), one in listed.items():
        assert one.value_cosine == pytest.approx(float(agree[i // 3, j // 3]), abs=1e-6)
        assert one.texts == (texts[i // 3], texts[j // 3])
    assert len(table.asked) == (0 if halves else len(set(table.asked)))  # each value once
    assert seen.ok == (not expected)
    assert type(seen).from_json(seen.to_json()) == seen


def example():
    keys = torch.eye(DIM)[[0, 0, 1, 2, 2]]
    texts = [
        "capital of France\tParis",
        "France's capital\tLyon",
        "pet of Ada\tcat",
        "sky\tblue",
        "colour of sky\tBlue",
    ]
    words = {name: torch.eye(DIM)[place] for place, name in enumerate(["Paris", "Lyon", "cat", "blue"])}
    words["Blue"] = words["blue"]
    return a_store(keys, texts), Table(words)


def test_as_text():
    seen = contradictions(*example())
    assert not seen.ok
    lines = str(seen).splitlines()
    assert lines[0] == (
        "1 of 2 pairs of near keys (cosine 0.9 or more) among 5 entries have values that disagree (cosine below 0.8); "
        "all pairs compared"
    )
    said = "0, 3 1.000 0.000 capital of France -> Paris France's capital -> Lyon"
    assert " ".join(lines[2].split()) == said


class Words:
    """A tokenizer of words."""

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in text.split()]}


class Says(nn.Module):
    """A model that makes one answer likely after each question, whatever stands before."""

    def __init__(self, tokenizer, answers):
        super().__init__()
        self.tokenizer, self.answers = tokenizer, answers
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask, use_cache):
        names = {number: word for word, number in self.tokenizer.ids.items()}
        logits = torch.zeros(*input_ids.shape, 64)
        for row, ids in enumerate(input_ids.tolist()):
            asked = " ".join(names[number] for number in ids).rpartition("Question:")[2]
            for question, answer in self.answers.items():
                if question in asked:
                    logits[row, :, self.tokenizer.ids[answer]] = 5.0
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(
    ("answers", "distinct"),
    [
        ({"capital of France": "Paris", "France's capital": "Lyon"}, True),
        ({"capital of France": "Lyon", "France's capital": "Lyon"}, False),
        ({"capital of France": "Lyon", "France's capital": "Paris"}, False),
    ],
)
def test_a_model_that_keeps_two_apart_sees_no_contradiction(answers, distinct):
    words = Words()
    seen = contradictions(*example(), model=Loaded(Says(words, answers), words))
    assert [one.distinct for one in seen.listed] == [distinct]
    assert seen.ok is distinct
    assert ("distinct" if distinct else "contradict") in str(seen).splitlines()[-1]
    assert f"of 1 the model keeps {int(distinct)} apart" in seen.summary


def test_what_is_refused():
    store, table = example()
    for threshold in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="threshold"):
            contradictions(store, table, threshold)
    with pytest.raises(ValueError, match="agreement must be a cosine"):
        contradictions(store, table, agreement=-2.0)
    with pytest.raises(ValueError, match="needs its tokenizer"):
        contradictions(store, table, model=Loaded(nn.Linear(1, 1), None))
    with pytest.raises(ValueError, match="of width 8, and the store holds 4"):
        contradictions(store, Table({}, halves=True))
    rows = torch.eye(DIM)
    with pytest.raises(ValueError, match="4 of 4 entries were not made by table"):
        contradictions(a_store(rows, ["a\tb"] * 4, "other"), table)
    with pytest.raises(ValueError, match="have no values to compare"):
        contradictions(a_store(rows[[0, 0]], ["a", "b"]), table)
