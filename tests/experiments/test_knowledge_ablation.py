"""Ablating and editing entries: the model is as it was afterwards, and a change does what it should."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attnflow as af
from experiments.knowledge_ablation import ablate as study
from experiments.knowledge_ablation.facts import Relation, known_facts, last_logits, text_losses, token_of
from experiments.knowledge_ablation.recipe import EXPERIMENT
from tests.experiments.miniature import run_miniature
from tests.models import tiny

WORDS = [f"w{i}" for i in range(50)]


class Tokenizer:
    """A word is a token: "w7" is 7."""

    def __call__(self, text, return_tensors=None, add_special_tokens=True, truncation=False, max_length=None):
        ids = [int(word[1:]) if word[0] == "w" and word[1:].isdigit() else 49 for word in text.split()][:max_length]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}


def model():
    torch.manual_seed(0)
    return af.knowledge.from_ffn(tiny("Llama", torch.float32))


@pytest.fixture
def setting(monkeypatch):
    """A converted model and facts that it knows: what it says after "w3 wX w4"."""
    made, tokenizer = model(), Tokenizer()
    subjects = [f"w{i}" for i in range(10, 22)]
    best = last_logits(made, tokenizer, [f"w3 {s} w4" for s in subjects]).argmax(dim=-1).tolist()
    answers = {subject: f"w{token}" for subject, token in zip(subjects, best, strict=True)}
    relation = Relation("w3 {} w4", ("w5 {} w4", "w6 {} w4"), {**answers, "w30": "w1", "w31": "w2"})
    monkeypatch.setattr(study, "RELATIONS", {"toy": relation})
    monkeypatch.setattr(study, "sample_text", lambda: " ".join(WORDS))
    return made, tokenizer, relation


def test_logits_do_not_depend_on_what_else_is_asked():
    made, tokenizer = model(), Tokenizer()
    together = last_logits(made, tokenizer, ["w3 w4", "w5 w6 w7 w8 w9", "w1"])
    for row, prompt in enumerate(["w3 w4", "w5 w6 w7 w8 w9", "w1"]):
        alone = made(input_ids=torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0, -1].detach()
        torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-4)
    ids = torch.randint(0, 50, (1, 9))
    expected = made(input_ids=ids, labels=ids).loss.detach()
    torch.testing.assert_close(text_losses(made, ids).mean(), expected)
    with pytest.raises(ValueError, match="must be one token"):
        token_of(tokenizer, "w1 w2")


def test_known_facts_are_those_that_the_model_answers(setting):
    made, tokenizer, relation = setting
    found = known_facts(made, tokenizer, {"toy": relation})
    assert all(fact.other != fact.answer for fact in found)
    logits = last_logits(made, tokenizer, [f"w3 {fact.subject} w4" for fact in found])
    assert [f"w{token}" for token in logits.argmax(dim=-1).tolist()] == [fact.answer for fact in found]
    assert len(found) >= 10


def test_a_fact_is_run_and_the_model_left_as_it_was(setting):
    made, tokenizer, relation = setting
    facts = known_facts(made, tokenizer, {"toy": relation})
    before = made.knowledge.entries.detach().clone()
    config = study.Ablation(ablated=(1, 8), edited=(4,), text_tokens=20, margin=8.0)
    record = study.run_fact(made, tokenizer, facts[0], config, facts[1:3])
    assert torch.equal(made.knowledge.entries, before)
    assert json.loads(json.dumps(record)) == record
    assert [(one["method"], one["entries"]) for one in record["ablated"]] == [
        (method, size) for method in study.METHODS for size in (1, 8)
    ]
    entries = record["entries"]
    assert sorted(entries["random"]["layers"]) == sorted(entries["effect"]["layers"])
    assert not set(entries["random"]["ids"]) & set(entries["effect"]["ids"])
    assert record["before"]["is_answer"][0] is True
    assert all(one["answer"] != record["before"]["answer"] for one in record["ablated"] if one["method"] == "effect")


def test_ablated_entries_write_nothing_and_an_edit_has_the_direct_effect_it_was_made_for(setting):
    made, tokenizer, relation = setting
    fact = known_facts(made, tokenizer, {"toy": relation})[0]
    ids = tokenizer(relation.prompt.format(fact.subject))["input_ids"]
    answer, other = token_of(tokenizer, fact.answer), token_of(tokenizer, fact.other)
    chosen = study.choose(made, ids, answer, 6, seed=0)["effect"]
    base = made.knowledge
    with study.edited(base, chosen.ids, study._without_values(base, chosen.ids)):
        layers = af.knowledge.trace(made, ids, positions=-1, top=48, targets=answer)
        norms = {one.entry: one.norm for one in layers.fired()}
    assert all(norms[entry] == 0 for entry in chosen.ids.tolist())
    towards = study.direction(made, ids, answer, other)
    rows, change = study.rewritten(base, chosen, towards, 3.0)
    moved = (rows - base.get(chosen.ids))[:, base.layout.value] * chosen.weights[:, None]
    assert float((moved @ towards).sum()) == pytest.approx(3.0, rel=1e-4)
    assert change > 0
    effects = af.knowledge.trace(made, ids, positions=-1, top=48, targets=answer, by="effect")
    best = sorted((one.effect for one in effects.fired()), reverse=True)[:6]
    known = {one.entry: one.effect for one in effects.fired()}
    assert [known[entry] for entry in chosen.ids.tolist()] == pytest.approx(best)


def test_a_study_runs_every_fact_and_is_summarised(setting, monkeypatch, tmp_path):
    made, tokenizer, _ = setting
    plain = af.knowledge.to_ffn(made)
    monkeypatch.setattr(study, "load_model", lambda name, dtype: SimpleNamespace(model=plain, tokenizer=tokenizer))
    monkeypatch.setattr(study, "known_facts", lambda *_: known_facts(made, tokenizer, study.RELATIONS))
    config = study.Ablation(facts=3, others=2, ablated=(1, 4), edited=(4,), text_tokens=16)
    text = run_miniature(EXPERIMENT, tmp_path, config)
    files = sorted((tmp_path / "runs").glob("*.json"))
    assert len(files) == 3
    assert "ablated effect" in text
    assert "3 facts" in text
    content = json.loads((tmp_path / "results" / "results.json").read_text())
    assert len(content["outcomes"]) == 1 + 3 * 2 + 3
    rows = list(csv.DictReader((tmp_path / "results" / "results.csv").read_text().splitlines()))
    assert len(rows) == 10 * len(content["outcomes"])
    assert (tmp_path / "results" / "effect.png").stat().st_size > 10_000
    runs = [json.loads(path.read_text()) for path in files]
    losses = [run["ablated"][0]["answer"][0] - run["before"]["answer"][0] for run in runs]
    first = next(one for one in content["outcomes"] if (one["change"], one["entries"]) == ("ablated", 1))
    assert first["quantities"]["fact"]["mean"] == pytest.approx(float(np.mean(losses)))
    assert [one.claim for one in EXPERIMENT.judge(tmp_path / "results")] == ["K12"]


def test_the_committed_results_are_those_of_the_committed_runs(tmp_path):
    committed = EXPERIMENT.results("tiny")
    EXPERIMENT.summarise(committed, tmp_path)
    for name in ("results.csv", "results.json"):
        assert (tmp_path / name).read_text() == (committed / name).read_text()
