"""DAA on benchmarks: the rules of its verdicts, its arms, and the whole in miniature."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnflow.bias.packing import Packed
from experiments.daa_evaluation import study
from experiments.daa_evaluation.recipe import EXPERIMENT, judge
from experiments.daa_evaluation.study import Evaluation
from experiments.daa_evaluation.summary import values_of
from experiments.evaluation import benchmarks, command, sources
from experiments.evaluation.measure import Score
from experiments.runner.text import Split
from tests.experiments.benchmarked import language_model, reader
from tests.experiments.miniature import run_miniature

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and of datasets


def scored(name: str, values: list[float], total: int = 100) -> dict[str, Any]:
    score = Score(name, "accuracy", tuple(values), total)
    return json.loads(json.dumps(command.plain(score)))


def judged(tmp_path: Any, runs: dict[str, dict[str, list[float]]], **more: Any) -> dict[str, Any]:
    rows = values_of(
        [
            {"job": {"arm": arm, "seed": 0}, "scores": {name: scored(name, values) for name, values in scores.items()}}
            for arm, scores in runs.items()
        ]
    )
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows, "not_run": {"quality": "no data"}, **more}))
    return {one.claim: one for one in judge(tmp_path)}


def some(right: int, items: int = 50) -> list[float]:
    return [1.0] * right + [0.0] * (items - right)


@pytest.mark.parametrize(
    ("base", "guidance", "verdict"),
    [
        (0, 4, "not testable here"),
        (2, 20, "confirmed"),
        (20, 2, "refuted"),
        (10, 11, "not confirmed"),
        (10, 10, "not confirmed"),
    ],
)
def test_claims_are_judged_by_the_paired_interval(tmp_path, base, guidance, verdict):
    runs = {
        name: {"humaneval": some(right), "gsm8k zero-shot": some(right)}
        for name, right in (("base", base), ("guidance", guidance))
    }
    found = judged(tmp_path, runs)
    assert found["D8"].verdict == found["D9"].verdict == verdict
    assert found["D10"].verdict == "not testable here"
    assert "no data" in found["D10"].sentence


@pytest.mark.parametrize(
    ("own", "thought", "consistent", "verdict"),
    [(40, 10, 1, "confirmed"), (10, 40, 1, "refuted"), (20, 20, 2, "not confirmed"), (1, 1, 0, "not testable here")],
)
def test_prompting_is_beaten_or_not(tmp_path, own, thought, consistent, verdict):
    """Self-consistency has a tenth of the items, which are some of the others."""
    zero = {"humaneval": some(0), "gsm8k zero-shot": some(0)}
    prompted = {"gsm8k chain of thought": some(thought), "gsm8k self-consistency": some(consistent, 5)}
    found = judged(tmp_path, {"base": {**zero, **prompted}, "guidance": {**zero, "gsm8k zero-shot": some(own)}})
    assert found["D11"].verdict == verdict


def test_nothing_is_judged_before_the_arm_has_run(tmp_path):
    assert judged(tmp_path, {"base": {"humaneval": some(9)}}) == {}


ROWS = Packed([[number % 7, *range(1, 16)] for number in range(8)], 16)
SMALL = replace(
    Evaluation(),
    dtype="float32",
    arms=("base", "guidance", "guidance continued", "alibi continued"),
    length=16,
    steps=3,
    warmup=1,
    rates=(1e-2, 1e-2),
    save_every=1,
    items={"perplexity": 2, "gsm8k zero-shot": 2, "gsm8k five-shot": 1, "quality": 0},
    sources={"gsm8k": "openai/gsm8k:main:test"},
    tokens=4,
)


@pytest.fixture
def study_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    model, tokenizer = language_model(), reader()
    monkeypatch.setattr(sources, "held_out", lambda *_: ["alpha beta gamma", "delta delta"])
    monkeypatch.setattr(sources, "rows", lambda _: [{"question": "2 + 2?", "answer": "#### 4"}] * 3)
    monkeypatch.setattr(study, "load_model", lambda *_, **__: (model, tokenizer))
    monkeypatch.setattr(study, "split_text", lambda *_: Split(ROWS, ROWS, ROWS))
    monkeypatch.setattr(benchmarks, "shown", lambda prompting: "" if prompting == "zero-shot" else "Q: 1?\nA: 1.\n\n")
    return model


@pytest.mark.slow
def test_the_experiment_in_miniature(tmp_path, study_of_a_tiny_model):
    before = {name: tensor.clone() for name, tensor in study_of_a_tiny_model.state_dict().items()}
    text = run_miniature(EXPERIMENT, tmp_path, SMALL)
    after = study_of_a_tiny_model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    held = json.loads((tmp_path / "results" / "results.json").read_text())
    rows = {(row["arm"], row["benchmark"]): row for row in held["rows"]}
    losses = {arm: rows[arm, "perplexity"]["value"][0] for arm in SMALL.arms}
    assert len(set(losses.values())) == 4, "every arm is another model"
    assert ("base", "gsm8k five-shot") in rows, "examples are shown to the base"
    assert ("guidance", "gsm8k five-shot") not in rows
    assert rows["guidance", "perplexity"]["difference"] is not None
    assert "quality: not run, no package ships QuALITY" in text
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "results.json", "results.csv", "figure.png", "study.json",
    }  # fmt: skip


def test_an_arm_trains_what_it_says(study_of_a_tiny_model):
    model = study_of_a_tiny_model.to(torch.bfloat16)
    base = sum(parameter.numel() for parameter in model.parameters())
    sizes = {}
    for name in ("guidance", "continued", "alibi continued", "guidance continued", "alibi"):
        with study.arm(model, name, SMALL, 0) as trained:
            assert {id(p) for p in trained} == {id(p) for p in model.parameters() if p.requires_grad}
            assert all(parameter.dtype == torch.float32 for parameter in trained)
            sizes[name] = sum(parameter.numel() for parameter in trained)
        assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in model.parameters())
    assert sizes["continued"] == base
    assert base < sizes["alibi continued"] < 1.01 * base, "ALiBi has a gain for each head"
    assert sizes["guidance continued"] == base + sizes["guidance"]
    assert sizes["alibi"] < 0.01 * base


def test_a_seed_gives_a_network(study_of_a_tiny_model):
    weights = []
    for seed in (0, 0, 1):
        with study.arm(study_of_a_tiny_model, "guidance", SMALL, seed) as trained:
            weights.append(torch.cat([parameter.detach().flatten() for parameter in trained]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_arm_that_is_none(study_of_a_tiny_model):
    with pytest.raises(ValueError, match="no such arms: lora"):
        study.setup(replace(SMALL, arms=("base", "lora")))


def test_untrained_arms_have_one_seed(study_of_a_tiny_model):
    jobs = study.setup(replace(SMALL, arms=("base", "alibi", "guidance"), seeds=(0, 1))).plan.first
    assert [job.name for job in jobs] == ["base-0", "alibi-0", "guidance-0", "guidance-1"]
