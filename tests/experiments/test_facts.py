import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnflow.bias.checkpoints import by_step
from experiments.facts import corpus as words
from experiments.facts import summary as results
from experiments.facts.corpus import FRAMES, HELD_OUT_FRAMES, RELATIONS, UNKNOWN, Corpus, Fact, Key, Vocabulary
from experiments.facts.evaluation import FactEvaluation, least_score, measure, ways
from experiments.facts.model import Asked, FactEncoder, retrieval_loss
from experiments.facts.recipe import EXPERIMENT
from experiments.facts.training import FactTraining, Trained, losses, made, train
from experiments.facts.world import GROUPS, World
from experiments.runner.study import read_study
from experiments.runner.training import Diverged
from tests.experiments.miniature import run_miniature

SMALL = FactTraining(dim=16, layers=1, base_entries=4, steps=6, facts=12, questions=8, contexts=4, warmup=2)
ASKED = FactEvaluation(sizes=(8, 16), group=4, timed=2)


def untrained(settings: FactTraining = SMALL) -> Trained:
    return Trained(*made(settings, 0), [], 0.0)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_DRAWS", 20)


def parts(key: Key) -> tuple[int, int, int, int]:
    return key.first, key.middle, key.last, key.relation


# The corpus


def test_subjects_of_evaluation_never_occur_in_training() -> None:
    reserved = words.reserved()
    assert len(reserved) == 32 * 32 * 32 // 8
    for step in range(20):
        shown = Corpus(random.Random(step))
        keys = shown.keys(60, near=0.6)
        keys += [shown.near(key) for key in keys]
        assert not any(key.syllables in reserved for key in keys)
        assert all(key.syllables in reserved for key in Corpus(random.Random(step), held_out=True).keys(60, near=0.6))


def test_every_part_of_a_held_out_name_occurs_in_training() -> None:
    trained = [key.syllables for key in Corpus(random.Random(0)).keys(2000, near=0.0)]
    for place in range(3):
        assert {name[place] for name in trained} == set(range(32))


def test_held_out_wordings_are_new_and_of_known_words() -> None:
    assert not set(HELD_OUT_FRAMES) & set(FRAMES)
    known = set(" ".join(FRAMES).split())
    assert all(set(frame.split()) <= known for frame in HELD_OUT_FRAMES)


def test_near_keys_differ_in_one_part() -> None:
    corpus = Corpus(random.Random(1), held_out=True)
    for key in corpus.keys(50, near=0.0):
        other = corpus.near(key)
        assert sum(a != b for a, b in zip(parts(key), parts(other), strict=True)) == 1


def test_keys_are_different_and_none_is_taken() -> None:
    corpus = Corpus(random.Random(2))
    first = corpus.keys(100, near=0.9)
    second = corpus.keys(100, near=0.9, besides=first)
    assert len({*first, *second}) == 200


def test_a_corrected_value_is_another() -> None:
    corpus = Corpus(random.Random(3))
    assert all(corpus.value("lamp") != "lamp" for _ in range(1000))


def test_words_are_tokens_once_and_names_are_three() -> None:
    vocabulary = Vocabulary()
    assert len(set(vocabulary.words)) == len(vocabulary)
    key = Key(0, 1, 2, 3)
    tokens = vocabulary.encode(f"what is the {RELATIONS[3][0]} of {key.subject} ?")
    assert len(tokens) == 9
    assert vocabulary.PADDING not in tokens
    with pytest.raises(ValueError, match="'Zzyzx' is not a word"):
        vocabulary.encode("the pet of Zzyzx")


# The encoder and the model


def test_an_entry_is_its_key_then_its_value() -> None:
    encoder = untrained().encoder
    entries = encoder(["the pet of Balorin", "the home of Dibadan"], ["owl", "owl"])
    assert entries.shape == (2, 32)
    assert torch.equal(entries[0, 16:], entries[1, 16:])
    assert not torch.equal(entries[0, :16], entries[1, :16])
    torch.testing.assert_close(entries[:, :16], encoder.key(["the pet of Balorin", "the home of Dibadan"]))
    assert torch.equal(encoder.query(["the pet of Balorin"])[:, 16:], torch.zeros(1, 16))


def test_padding_does_not_change_an_embedding() -> None:
    encoder = untrained().encoder
    alone = encoder.key(["the pet of Balorin"])
    torch.testing.assert_close(
        encoder.key(["the pet of Balorin", FRAMES[6].format(relation="pet", subject="Dibadan")])[:1], alone
    )


def test_an_answer_is_asked_for_token_by_token() -> None:
    reader = untrained().reader
    asked = reader.asked(
        ["Balorin 's pet is", "Balorin 's pet is"], ["amber owl", UNKNOWN], [["the pet of Balorin is owl"], []]
    )
    spoken = [reader.vocabulary.words[token] for token in asked.target]
    assert spoken == ["amber", "owl", "<end>", UNKNOWN, "<end>"]
    before = [reader.vocabulary.words[asked.ids[row, place]] for row, place in zip(asked.row, asked.place, strict=True)]
    assert before == ["<answer>", "amber", "owl", "<answer>", UNKNOWN]


def test_a_row_is_right_if_all_its_tokens_are() -> None:
    asked = Asked(torch.zeros(2, 1), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.tensor([2, 1, 0]))
    logits = torch.eye(3)[[2, 0, 0]]
    assert asked.right(logits).tolist() == [False, True]


def test_what_is_said_is_what_is_likeliest() -> None:
    trained = untrained(replace(SMALL, layers=2))
    entries = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    questions = ["Balorin 's pet is", "tell me the home of Dibadan ."]
    said = trained.reader.say(questions, entries)
    asked = trained.reader.asked(questions, [" ".join(one.split()[:2]) for one in said])
    choice = trained.reader.logits(asked, entries).argmax(dim=-1)
    for row, answer in enumerate(said):
        tokens = [trained.reader.vocabulary.words[token] for token in choice[asked.row == row]]
        assert tokens[: len(answer.split())] == answer.split()


def test_the_reading_loss_wants_one_entry_above_its_threshold_or_none() -> None:
    which = torch.tensor([1, -1])
    good = torch.tensor([[-3.0, 3.0, -3.0], [-3.0, -3.0, -3.0]])
    assert float(retrieval_loss(good, which)) < 1e-4
    assert float(retrieval_loss(good.flip(0), which)) > 5
    two = torch.tensor([[-3.0, 3.0, 2.0], [-3.0, -3.0, -3.0]])
    assert float(retrieval_loss(two, which)) == pytest.approx((8 + np.log1p(np.exp(-8))) / 2, abs=1e-3)


# Training


def test_a_step_follows_from_seed_and_step_and_trains_every_parameter() -> None:
    settings = replace(SMALL, facts=30, questions=60, contexts=60)
    reader, encoder = made(settings, 0)
    for step in (0, 1):
        one, two = (losses(reader, encoder, settings, 0, step) for _ in range(2))
        assert set(one) == ({"context"} if step else {"entries", "retrieval", "nearest"})
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert not torch.equal(losses(reader, encoder, settings, 1, step).popitem()[1], one.popitem()[1])
    torch.stack(
        [value for step in (0, 1) for value in losses(reader, encoder, settings, 0, step).values()]
    ).sum().backward()  # type: ignore[union-attr]
    named = [*reader.model.named_parameters(), *encoder.named_parameters()]
    assert [name for name, parameter in named if parameter.grad is None] == []


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = train(SMALL, 3, tmp_path / "whole", save_every=2)

    class Killed(Exception):
        pass

    calls = 0

    def killed(*arguments: object) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Killed
        return losses(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.facts.training.losses", killed)
        with pytest.raises(Killed):
            train(SMALL, 3, tmp_path / "cut", save_every=2)
    assert calls == 4
    again = train(SMALL, 3, tmp_path / "cut", save_every=2)
    assert again.log == whole.log
    assert len(again.log) == 3
    for one, two in zip(again.reader.model.parameters(), whole.reader.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_training_that_meets_nan_stops_and_saves_nothing_of_it(tmp_path: Path) -> None:
    def spoiled(*arguments: object) -> dict[str, torch.Tensor]:
        terms = losses(*arguments)  # type: ignore[arg-type]
        return terms if arguments[-1] != 3 else {**terms, "context": terms["context"] * torch.nan}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.facts.training.losses", spoiled)
        with pytest.raises(Diverged, match=r"seed 3, step 4: context nan, norm of the gradients nan; not saved"):
            train(SMALL, 3, tmp_path / "run", save_every=2)
    assert [path.name for path in by_step(tmp_path / "run")] == ["checkpoint-2"]
    with pytest.raises(ValueError, match="holds a run with other settings"):
        train(replace(SMALL, rate=1e-4), 3, tmp_path / "run", save_every=2)
    assert len(train(SMALL, 3, tmp_path / "run", save_every=2).log) == 3


# The edits


def test_the_store_is_what_the_edits_say(tmp_path: Path) -> None:
    with World(untrained(), tmp_path / "store", 12, 3, 0.5, random.Random(0)) as world:
        before, old = world.truth("before"), world.store.get(world.store.ids())
        assert len(world.store) == 12
        assert {entry.version for entry in old} == {1}
        world.edit()
        after = world.truth("after")
        assert before[:3] == after[:3]
        assert all(one != two and UNKNOWN not in (one, two) for one, two in zip(before[3:6], after[3:6], strict=True))
        assert UNKNOWN not in before[6:9]
        assert after[6:9] == [UNKNOWN] * 3
        assert before[9:] == [UNKNOWN] * 3
        assert UNKNOWN not in after[9:]
        sentences = {str(entry.text): entry for entry in world.store.get(world.store.ids())}
        assert len(sentences) == 12
        there = after[:6] + after[9:]
        told = world.oracle([one for place, one in enumerate(world.questions["trained"]) if not 6 <= place < 9])
        assert [sentence.split(" is ")[1] for (sentence,) in told] == there
        assert sorted(entry.version for entry in sentences.values()) == [1] * 9 + [2] * 3
        deleted = {str(entry.text) for entry in old} - set(sentences)
        assert all(value in {one.split(" is ")[1] for one in deleted} for value in before[3:9])


def test_what_is_read_is_the_store(tmp_path: Path) -> None:
    trained = untrained(replace(SMALL, layers=2))
    with World(trained, tmp_path / "store", 12, 3, 0.5, random.Random(0)) as world, torch.no_grad():
        asked = world.reader.asked(world.questions["trained"], world.truth("before"))
        before = world.reader.logits(asked, world.knowledge)
        torch.testing.assert_close(before, world.reader.logits(asked, world.store.vectors()))
        world.edit()
        after = world.reader.logits(asked, world.knowledge)
        torch.testing.assert_close(after, world.reader.logits(asked, world.store.vectors()))
        assert not torch.allclose(before, after)
        moved = world.shuffled()
        assert torch.equal(moved[:, :16], world.store.vectors()[:, :16])
        assert torch.equal(moved[1:, 16:], world.store.vectors()[:-1, 16:])


def test_the_oracle_is_not_better_than_a_perfect_search(tmp_path: Path) -> None:
    with World(untrained(), tmp_path / "store", 12, 3, 0.0, random.Random(0)) as world:
        assert world.recall("trained", 12) == 1.0
        questions = world.questions["paraphrased"]
        nearest = world.nearest(questions, 12)
        assert all(one[0] in many for one, many in zip(world.oracle(questions), nearest, strict=True))
        assert [many[-1] for many in nearest] == [one[0] for one in world.nearest(questions, 1)]


def test_every_way_answers_every_question(tmp_path: Path) -> None:
    told, sizes = measure(untrained(), 0, ASKED)
    with World(untrained(), tmp_path / "store", 8, 2, 0.5, random.Random(0)) as world:
        names = list(ways(world, 0.0))
    assert len(told) == len(ASKED.sizes) * len(names) * 2 * len(GROUPS) * 2
    assert {len(one.said) for one in told} == {4}
    assert {letter for one in told for letter in one.said} <= set("roux")
    assert [one.size for one in sizes] == [8, 16]
    assert all(set(one.milliseconds) == set(names) for one in sizes)


class Known(FactEncoder):
    """Places a text by its name and its relation alone: the inner product is the number of parts that agree."""

    def key(self, texts: Sequence[str]) -> torch.Tensor:
        relations = {name: place for place, names in enumerate(RELATIONS) for name in names}
        rows = torch.zeros(len(texts), len(self.vocabulary) + len(RELATIONS))
        for row, text in enumerate(texts):
            for token in self.vocabulary.encode(text):
                word = self.vocabulary.words[token]
                if word in relations:
                    rows[row, len(self.vocabulary) + relations[word]] = 1
                elif word.startswith("-") or word[0].isupper():
                    rows[row, token] = 1
        return rows


def test_near_enough_is_what_tells_facts_from_others() -> None:
    trained = untrained()
    known = Known(trained.reader.vocabulary, trained.encoder.words)
    assert least_score(replace(trained, encoder=known), 0, 0.6) == 4.0


# The results


def write_run(folder: Path, seed: int, said: str) -> None:
    names = ("entries", "best entries", "context", "context, 1 fact", "context or unknown", "shuffled entries")
    told = [
        {"size": size, "way": way, "phase": phase, "group": group, "wording": wording, "said": said}
        for size in (64, 256)
        for way in names
        for phase in ("before", "after")
        for group in GROUPS
        for wording in ("trained", "paraphrased")
    ]
    times = {"recall": {"trained": {"1": 0.5 + seed / 2}}, "milliseconds": dict.fromkeys(names, 2.0 + seed)}
    run = {"arm": "main", "seed": seed, "told": told, "sizes": [{"size": size, **times} for size in (64, 256)]}
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "study.json").write_text("{}", encoding="utf-8")
    (folder / "runs" / f"main-{seed}.json").write_text(json.dumps(run), encoding="utf-8")


def test_shares_are_over_seeds_and_questions(tmp_path: Path) -> None:
    write_run(tmp_path, 0, "rrrr")
    write_run(tmp_path, 1, "roux")
    runs = read_study(tmp_path)[1]
    share = results.shares(runs)[0]
    assert (share.seeds, share.questions) == (2, 4)
    assert share.right.mean == 0.625
    assert share.right.low < 0.625 < share.right.high
    assert share.right_by_seed == [1.0, 0.25]
    assert (share.old, share.unknown, share.other) == (0.125, 0.125, 0.125)
    spent = results.costs(runs)["main"][64]
    assert spent["recall"]["trained"]["1"] == 0.75
    assert spent["milliseconds"]["entries"] == 2.5


def test_a_summary_is_a_table_and_three_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no study"):
        results.summarise(tmp_path, tmp_path)
    write_run(tmp_path, 0, "rrru")
    printed = results.summarise(tmp_path, tmp_path)
    assert "| main | 64 | entries | 0.750 -> 0.750" in printed
    assert len((tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()) == 1 + 2 * 6 * 2 * 4 * 2
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    spent = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["recall_and_milliseconds"]
    assert spent["main"]["256"]["milliseconds"]["context"] == 2.0


def test_a_study_runs_every_arm_and_judges(tmp_path: Path) -> None:
    study = EXPERIMENT.miniature(EXPERIMENT.recipes["tiny"]())
    assert "| sparsemax | 8 | entries |" in run_miniature(EXPERIMENT, tmp_path, study)
    assert sorted(path.stem for path in (tmp_path / "runs").iterdir()) == [
        "answers-alone-0",
        "coordinate-0",
        "main-0",
        "sparsemax-0",
    ]
    assert [one.claim for one in EXPERIMENT.judge(tmp_path / "results")] == ["K13"]


@pytest.mark.slow
def test_facts_are_learned_edited_and_read(tmp_path: Path) -> None:
    settings = FactTraining(steps=700, facts=96, contexts=0, near=0.3, rate=4e-3)
    trained = train(settings, 0, tmp_path / "state", save_every=1000)
    told, _ = measure(trained, 0, FactEvaluation(sizes=(64,), group=32, near=0.0, timed=1))
    right = {
        (one.way, one.phase, one.group): one.said.count("r") / len(one.said) for one in told if one.wording == "trained"
    }
    for phase in ("before", "after"):
        for group in GROUPS:
            assert right["entries", phase, group] > 0.7, (phase, group)
    assert right["shuffled entries", "after", "untouched"] < 0.1
    old = [one for one in told if (one.way, one.phase, one.group) == ("entries", "after", "corrected")]
    assert all(one.said.count("o") == 0 for one in old)


def test_a_fact_is_said_with_its_key() -> None:
    fact = Fact(Key(0, 0, 0, 0), "the hue of Babadan", "amber owl")
    assert fact.sentence == "the hue of Babadan is amber owl"
