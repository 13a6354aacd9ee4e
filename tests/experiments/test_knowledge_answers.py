"""Training by answers alone: curricula, choices of entries, and what the runs are summarised to."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnflow.knowledge.attention import softmax_one
from experiments.facts.corpus import UNKNOWN, Corpus, reserved
from experiments.facts.model import Asked
from experiments.facts.training import SOFTMAX, FactTraining, losses, made, train
from experiments.knowledge_answers import summary
from experiments.knowledge_answers.recipe import EXPERIMENT, judge
from experiments.knowledge_answers.study import SUPERVISED, Answers, Said, ask, tiny
from experiments.runner.files import write
from tests.experiments.miniature import run_miniature

SMALL = FactTraining(
    dim=16, layers=1, base_entries=4, steps=8, facts=12, questions=40, contexts=0, retrieval=0.0, nearest=0.0, warmup=2
)


def test_all_but_one_learn_from_answers_alone() -> None:
    for name, settings in tiny().arms.items():
        brief = replace(settings, dim=16, facts=8, questions=4)
        terms = losses(*made(brief, 0), brief, 0, 0)
        assert set(terms) == ({"entries", "retrieval", "nearest"} if name == SUPERVISED else {"entries"}), name


def test_a_curriculum_starts_with_few_facts_that_are_all_there() -> None:
    settings = replace(SMALL, first_facts=2, facts=32, unknown=0.5, steps=80)
    assert [settings.grown(step) for step in (0, 20, 40, 60, 79)] == [0, 0, 0.5, 1, 1]
    assert [settings.pool(step) for step in (0, 20, 40, 60, 79)] == [2, 2, 8, 32, 32]
    assert {replace(settings, first_facts=0).pool(step) for step in range(80)} == {32}
    reader, encoder = made(settings, 0)
    unknown = reader.vocabulary.encode(UNKNOWN)[0]
    seen: dict[int, int] = {}
    right = reader.asked

    def watch(*arguments: object) -> object:
        found = right(*arguments)  # pyright: ignore[reportArgumentType]
        seen[step] = int((found.target == unknown).sum())
        return found

    reader.asked = watch  # pyright: ignore[reportAttributeAccessIssue]
    for step in (0, 19, 79):
        losses(reader, encoder, settings, 0, step)
    assert seen[0] == seen[19] == 0
    assert 5 < seen[79] < 35


def test_choices_of_entries_are_those_of_the_arm() -> None:
    blocks = made(replace(SMALL, activation=SOFTMAX), 0)[0].model.readers()
    assert all(block.attention.activation is softmax_one for block in blocks)
    retrievals = [block.retrieval for block in made(replace(SMALL, best=3), 0)[0].model.readers()]
    assert [one.k for one in retrievals if one is not None] == [3]
    assert {block.retrieval for block in made(SMALL, 0)[0].model.readers()} == {None}


def test_measurements_are_made_on_the_way_and_change_nothing(tmp_path: Path) -> None:
    said = train(SMALL, 1, tmp_path / "one", 4, measure=lambda reader, encoder: {"right": 0.5})
    assert [(one["step"], one["right"]) for one in said.measured] == [(0, 0.5), (4, 0.5), (8, 0.5)]
    alone = train(SMALL, 1, tmp_path / "other", 4)
    assert alone.measured == []
    for one, other in zip(said.reader.model.parameters(), alone.reader.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_answers_are_about_subjects_that_training_never_shows() -> None:
    models = made(SMALL, 0)
    said = ask(*models, 8, 8, 0.6, "here")
    assert (len(said.right), len(said.unknown), len(said.moved)) == (8, 2, 8)
    assert said == ask(*models, 8, 8, 0.6, "here"), "all chance follows from the name"
    keys = Corpus(random.Random("here"), held_out=True).facts(8, 0.6)
    assert all(fact.key.syllables in reserved() for fact in keys)
    assert len(ask(*models, 4, 8, 0.6, "here").right) == 4


def test_answers_are_right_where_all_their_words_are(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, encoder = made(SMALL, 0)
    words = len(reader.vocabulary)
    monkeypatch.setattr(reader, "logits", lambda asked, _: torch.nn.functional.one_hot(asked.target, words).float())
    assert ask(reader, encoder, 4, 4, 0.0, "here") == Said((1,) * 4, (1,), (1,) * 4)

    def without_end(asked: Asked, _: object) -> torch.Tensor:
        end = reader.vocabulary.encode("<end>")[0]
        return torch.nn.functional.one_hot(asked.target.masked_fill(asked.target == end, 0), words).float()

    monkeypatch.setattr(reader, "logits", without_end)
    assert ask(reader, encoder, 4, 4, 0.0, "here") == Said((0,) * 4, (0,), (0,) * 4)


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "_DRAWS", 20)
        run_miniature(EXPERIMENT, folder, EXPERIMENT.miniature(tiny()))
    return folder


def test_results_are_written_and_judged(finished: Path) -> None:
    content = json.loads((finished / "results" / "results.json").read_text())
    names = list(Answers().arms)
    assert sorted(one["arm"] for one in content["arms"]) == sorted(names)
    assert all(list(one["sizes"]) == ["4", "12"] for one in content["arms"])
    assert all([point[0] for point in one["curve"]["right"]] == [0, 1, 2] for one in content["arms"])
    assert (finished / "results" / "results.csv").read_text().count("\n") == 1 + len(names) * 2 * 3
    assert (finished / "results" / "figure.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("soft", "best", "verdict"),
    [
        ((0.95, 0.92, 0.97), (0.1, 0.0, 0.2), "confirmed"),
        ((0.3, 0.2, 0.4), (0.1, 0.0, 0.2), "refuted"),
        ((0.8, 0.7, 0.95), (0.1, 0.0, 0.2), "not confirmed"),
    ],
)
def test_the_rule(soft: tuple[float, ...], best: tuple[float, ...], verdict: str, tmp_path: Path) -> None:
    arms = [
        {"arm": name, "sizes": {"64": {"right": value}}}
        for name, value in {"softmax grown": soft, "best grown": best, SUPERVISED: (0.5, 0.4, 0.6)}.items()
    ]
    write(tmp_path / "results.json", {"pool": 64, "arms": arms})
    (found,) = judge(tmp_path)
    assert (found.claim, found.verdict) == ("K14", verdict)
    assert "with supervised reading 50%" in found.sentence
    write(tmp_path / "results.json", {"pool": 64, "arms": arms[:1]})
    assert judge(tmp_path) == []
