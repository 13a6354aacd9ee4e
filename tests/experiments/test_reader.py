"""A pretrained model with a reader: facts, stores, scores, and a miniature of the study, which goes on from a fit."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.questions import least_mistakes, parts_of
from attnflow.knowledge.records import SEPARATOR
from experiments.knowledge_ablation.facts import Fact
from experiments.reader import bench
from experiments.reader.asking import Said, said, scored
from experiments.reader.lora import rank_for
from experiments.reader.recipe import EXPERIMENT
from experiments.reader.settings import miniature, paper, tiny
from experiments.reader.study import JOBS
from experiments.reader.world import ABSENT, GROUPS, Embedded, World, edit_store, public_facts, sentence
from experiments.runner.text import word_pieces
from tests.experiments.miniature import run_miniature

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

WORDS = ["amber", "violet", "silver", "copper"]


@pytest.fixture(scope="module")
def loaded():
    """A tiny model that reads letters."""
    tokenizer = word_pieces([" ".join(WORDS)], 280)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    return af.models.Loaded(LlamaForCausalLM(config).eval(), tokenizer)


def test_facts_are_of_all_groups_and_none_is_of_training_or_there_twice():
    plain = World(3, 2, 30, WORDS)
    world = World(3, 2, 30, WORDS, [plain.items[0].key])
    assert plain.items[0].key not in {item.key for item in world.items}
    assert [len([item for item in world.items if item.group == group]) for group in GROUPS] == [4] * 5
    for item in world.items:
        assert (item.before is None) == (item.group in ("inserted", "never there"))
        assert (item.after is None) == (item.group in ABSENT)
        assert (item.group == "corrected") == (None not in (item.before, item.after) and item.before != item.after)
    keys = [parts_of(record.text.partition(SEPARATOR)[0]) for record in world.records(30)]
    assert len(keys) == len(set(keys)) == 30
    assert World(3, 2, 30, WORDS, [plain.items[0].key]).items == world.items
    with pytest.raises(ValueError, match="a store must hold 12 to"):
        world.records(11)
    facts = public_facts()
    assert len({key for _, key, _ in facts}) == len(facts) == 238
    assert ("capital", "the capital of Norway", "Oslo") in facts
    assert sentence("the pet of Bal\tamber") == "The pet of Bal is amber."


def test_a_store_holds_what_the_edits_leave():
    world, embedded = World(0, 1, 8, WORDS), Embedded(TextEncoder("minilm", separator=SEPARATOR, values=True))
    with embedded.store(world.records(8)) as store:
        ids = edit_store(store, world, embedded)
        asked = world.questions(ids)
        assert len(store) == 8
        assert len(asked) == 2 * len(world.items)
        for one in asked:
            assert (one.entry is None) == (one.item.after is None)
            if one.entry is not None:
                assert store.get([one.entry])[0].text == f"{one.item.key}\t{one.item.after}"
        assert world.questions(ids) == asked


def test_what_is_right():
    world = World(0, 1, 8, WORDS)
    asked = world.questions({})

    class Tokenizer:
        def __call__(self, text, **_):
            return {"input_ids": [len(text)]}

    texts = [one.item.after or "nothing" for one in asked]
    answers = Said(texts, [len(text) + 1 for text in texts], [], [])
    rows = scored(Tokenizer(), asked, answers, [True] * len(asked), [False] * len(asked))
    assert len(rows) == 20
    for row in rows:
        if row["group"] in ABSENT:
            assert row["right"] == row["refused"] == [0]
        else:
            assert row["entry"] == row["word"] == row["whole"] == row["right"] == [1]
    refused = scored(Tokenizer(), asked, answers, None, [True] * len(asked))
    assert all(row["right"] == [int(row["group"] in ABSENT)] for row in refused)
    old = Said([one.item.before or "nothing" for one in asked], answers.first, [], [])
    said_old = {row["group"]: row["old"] for row in scored(Tokenizer(), asked, old, None, [False] * 20) if "old" in row}
    assert said_old == {"untouched": [0], "corrected": [1], "deleted": [1]}
    assert least_mistakes([2.0, 3.0], [0.0, 1.0]) == 1.5
    with pytest.raises(ValueError, match="finite values"):
        least_mistakes([1.0], [])


def test_answers_do_not_depend_on_what_else_is_asked(loaded):
    prompts = ["Question: a?\nAnswer:", "Question: what is the colour of coal?\nAnswer:", "Question: b c?\nAnswer:"]
    together = said(loaded.model, loaded.tokenizer, prompts, 3, [])
    for place, prompt in enumerate(prompts):
        alone = said(loaded.model, loaded.tokenizer, [prompt], 3, [])
        assert (alone.texts[0], alone.first[0]) == (together.texts[place], together.first[place])
    assert rank_for(loaded.model, 1) == 1
    assert rank_for(loaded.model, 10_000) > rank_for(loaded.model, 5_000) > 1


@pytest.mark.slow
def test_the_study_runs_goes_on_after_a_kill_and_is_summarised(loaded, monkeypatch, tmp_path):
    monkeypatch.setattr("attnflow.knowledge.hf.practice.words_of", lambda *_: WORDS)
    monkeypatch.setattr("attnflow.knowledge.hf.words._STEPS", 2)
    monkeypatch.setattr("experiments.reader.summary._DRAWS", 10)
    monkeypatch.setattr(bench, "load_model", lambda *_, **__: loaded)
    facts = [Fact("language", "France", "French", "Spanish"), Fact("opposite", "hot", "cold", "slow")]
    monkeypatch.setattr(bench, "known_facts", lambda *_: facts)
    config = replace(miniature(tiny()), seeds=(0,))
    place = tmp_path / "study"
    text = run_miniature(EXPERIMENT, place, config)
    runs = {path.stem: json.loads(path.read_text()) for path in (place / "runs").glob("*.json")}
    assert set(runs) == {f"{name}-0" for name in JOBS}
    ways = {(way["way"], way["size"]) for run in runs.values() for way in run.get("ways", ())}
    assert ways == {
        *((name, size) for name in ("reader", "ask", "context, 1 fact", "context, 5 facts") for size in (8, 12)),
        ("alone", 0), ("LoRA", 8), ("edit", 4), ("rank one", 4),
    }  # fmt: skip
    assert "LoRA" in text
    content = json.loads((place / "results" / "results.json").read_text())
    assert len(content["ways"]) == len(ways)
    rows = list(csv.DictReader((place / "results" / "results.csv").read_text().splitlines()))
    assert {row["quantity"] for row in rows} >= {"entry", "word", "whole", "right", "token_seconds", "perplexity_ratio"}
    assert (place / "results" / "figure.png").stat().st_size > 10_000

    def refused(*_, **__):
        raise AssertionError("the fit is there")

    monkeypatch.setattr("experiments.reader.study.fit_reader", refused)
    (place / "runs" / "reader-0.json").unlink()
    run_miniature(EXPERIMENT, place, config)
    again = json.loads((place / "runs" / "reader-0.json").read_text())
    assert again["threshold"] == runs["reader-0"]["threshold"]
    assert [way["answers"] for way in again["ways"]] == [way["answers"] for way in runs["reader-0"]["ways"]]


def test_scales_differ_in_what_they_say():
    assert paper().seeds == (0, 1, 2, 3, 4)
    assert len(paper().lora_sizes) == len(paper().lora_steps)
