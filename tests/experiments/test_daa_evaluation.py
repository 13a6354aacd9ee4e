"""Gold solutions by likelihood: wrong ones are of equal length, scores are those of a plain pass, rules are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnflow.bias import GuidanceConfig, attach
from attnflow.models.subject import Loaded
from experiments.daa_evaluation import likelihood
from experiments.daa_evaluation.compared import complete, difference, measured
from experiments.daa_evaluation.likelihood import Likelihood, scores
from experiments.daa_evaluation.perturbed import Gold, programs, word_problems
from experiments.daa_evaluation.recipe import judge, miniature
from experiments.runner.files import write
from experiments.runner.jobs import Job
from tests.experiments.miniature import language_model, reader

SUMS = [
    {"question": "Tom has 5 bags of 12. How many?", "solution": "5*12 = 60 So 60+9=69 and $8", "answer": "69"},
    {"question": "Half of 3?", "solution": "3/2 =1.5", "answer": "1.5"},
    {"question": "None?", "solution": "There are none.", "answer": "9"},
]
PROGRAMS = [
    {"task_id": "a", "prompt": "def f(x):\n    '''x < 2 and 3'''\n", "canonical_solution": "    return x - 19 < 2\n"},
    {"task_id": "b", "prompt": "def f(x):\n", "canonical_solution": "    return sorted(x)\n"},
]


def text(ids: Any) -> str:
    return reader().decode(list(ids))


def test_a_wrong_solution_has_as_many_tokens_and_one_change() -> None:
    golds = [*word_problems(SUMS, reader()), *programs(PROGRAMS, reader())]
    again = [*word_problems(SUMS, reader()), *programs(PROGRAMS, reader())]
    assert golds == again
    for gold in golds:
        for wrong in gold.wrong:
            rest = gold.solution[wrong.start :]
            assert len(wrong.rest) == len(rest)
            assert wrong.rest[0] != rest[0]
    assert [[wrong.kind for wrong in gold.wrong] for gold in golds] == [
        *([["result", "answer"]] * 2),
        ["answer"],
        ["program"] * 2,
        [],
    ]
    assert text(golds[0].solution) == " 5*12 = 60 So 60+9=69 and $8 The answer is 69."
    assert text(golds[0].solution[golds[0].split :]) == " The answer is 69."
    for wrong in golds[3].wrong:
        changed = text((*golds[3].solution[: wrong.start], *wrong.rest))
        compile(PROGRAMS[0]["prompt"] + changed, "program", "exec")
        assert sum(a != b for a, b in zip(changed, text(golds[3].solution), strict=True)) == 1


def test_likelihoods_are_those_of_a_plain_pass_in_float64() -> None:
    model = language_model().double()
    handle = attach(model, GuidanceConfig(hidden_dim=4, layers="every", init="kaiming"))
    for parameter in handle.parameters():
        parameter.data = 2 * parameter.data.double()
    golds = [*word_problems(SUMS, reader()), *programs(PROGRAMS, reader())]

    def nats(before: list[int], after: list[int]) -> float:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*before, *after]]), use_cache=False).logits[0]
        chosen = logits.log_softmax(-1)[len(before) - 1 : -1]
        return -float(chosen.gather(1, torch.tensor(after)[:, None]).sum())

    def margin(gold: Gold, number: int) -> float:
        wrong, prompt = gold.wrong[number], list(gold.prompt)
        whole = nats(prompt, [*gold.solution[: wrong.start], *wrong.rest])
        return whole - nats(prompt, list(gold.solution))

    model.eval()
    for gold, row in zip(golds, scores(model, golds, 128), strict=True):
        assert row["nats"] == pytest.approx(nats(list(gold.prompt), list(gold.solution)), rel=1e-9)
        assert row["split"][1] == pytest.approx(nats(list(gold.prompt), list(gold.solution[: gold.split])), rel=1e-9)
        expected = [margin(gold, number) for number in range(len(gold.wrong))]
        assert [value for _, value in row["margins"]] == pytest.approx(expected, rel=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_arm_is_scored_the_same_when_its_weights_are_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs that were committed without checkpoints are gone on with; and the model comes out as it went in."""
    for place, value in {
        "load_model": lambda *_, **__: Loaded(language_model(), reader()),
        "_items": lambda: {"gsm8k": SUMS, "humaneval": PROGRAMS},
        "shown": lambda _: "Q: One?\nA: 1\n\n",
    }.items():
        monkeypatch.setattr(likelihood, place, value)
    for name in ("reasoned_answers", "functions"):
        monkeypatch.setattr(f"experiments.daa_evaluation.practice.{name}", lambda: ["one two three " * 9] * 20)
    config = miniature(Likelihood())
    assert isinstance(config, Likelihood)
    run = likelihood.setup(config).run

    def made(job: Job, place: str) -> Any:
        (tmp_path / place / job.name).mkdir(parents=True, exist_ok=True)
        return run(job, tmp_path / place / job.name, lambda *_: None)

    before = made(Job("0 base"), "here")
    made(Job("guidance", 0.5, 0), "here")
    scored = made(Job("0 guidance", 0.5, 0), "here")
    assert scored == made(Job("0 guidance", 0.5, 0), "elsewhere")
    assert scored["scores"]["gsm8k"] != before["scores"]["gsm8k"]
    assert made(Job("0 base"), "here") == before


def test_differences_are_paired_by_item_and_by_seed() -> None:
    rows = [{"nats": 4.0, "tokens": 4, "split": [2, 1.0], "margins": [["result", 2.0], ["answer", -1.0]]}]
    rows.append({"nats": 6.0, "tokens": 3, "split": [3, 6.0], "margins": []})
    values = measured(rows)
    assert values["nats per token"].tolist() == [1.0, 2.0]
    assert values["nats per token before the answer"].tolist() == [0.5, 2.0]
    assert [values[key][0] for key in ("margin", "margin, result", "margin, answer", "preferred")] == [0.5, 2, -1, 0.5]
    base = {"margin": np.array([[1.0, np.nan, 3.0]])}
    arm = {"margin": np.array([[2.0, np.nan, 5.0], [3.0, np.nan, 6.0]])}
    found = difference(arm, base, "margin")
    assert found["items"][0] == found["seeds"][0] == 2.0
    assert found["items"][2] == pytest.approx(2.0 + 12.706 * 0.5, rel=1e-4)  # 1.5 and 2.5
    assert found["seeds"][1] == pytest.approx(2.0 - 12.706 * 0.5, rel=1e-4)
    assert difference(arm, arm, "margin")["items"] == [0.0, 0.0, 0.0]


def test_a_study_that_was_cut_short_has_what_all_arms_have() -> None:
    config = {"arms": ["guidance", "key"], "seeds": [0, 1], "parts": 2}
    scored: set[tuple[int, str, Any]] = {(part, name, None) for part in (0, 1) for name in ("base", "alibi")}
    scored |= {(0, "guidance", 0), (0, "key", 0), (0, "guidance", 1)}
    assert complete(scored, config) == ([0], [0])
    scored |= {(0, "key", 1), (1, "guidance", 0), (1, "key", 0)}
    assert complete(scored, config) == ([0], [0, 1])
    scored |= {(1, "guidance", 1), (1, "key", 1)}
    assert complete(scored, config) == ([0, 1], [0, 1])
    assert complete(scored - {(0, "base", None)}, config) == ([1], [0, 1])


def around(value: float, over_seeds: float = 0.01) -> dict[str, list[float]]:
    return {"items": [value, value - 0.01, value + 0.01], "seeds": [value, value - over_seeds, value + over_seeds]}


def content(nats: float, margin: float, control: float, prompted: tuple[float, float], **more: float) -> dict[str, Any]:
    rows = [
        {"arm": arm, "benchmark": name, "measure": measure, "seeds": 3, "items": 100, "value": [0.8, 0.7, 0.9]}
        | {"less base": around(less, more.get("seeds", 0.01))}
        for name in ("gsm8k", "humaneval")
        for arm in ("base", "guidance")
        for measure, less in (("nats per token", nats), ("margin", margin))
    ]
    share = more.get("preferred", 0.8)
    rows += [
        {"arm": "base", "benchmark": name, "measure": "preferred", "value": [share, share - 0.1, share + 0.1]}
        for name in ("gsm8k", "humaneval")
    ]
    less = {arm: {"nats per token": around(control)} for arm in ("key", "dense", "lora")}
    both = ("nats per token", "nats per token before the answer")
    shots = {name: dict(zip(both, map(around, prompted), strict=True)) for name in ("five-shot", "chain of thought")}
    shots["alibi"] = dict.fromkeys(both, around(-3.0))
    both = ("gsm8k", "humaneval")
    about = {"seeds": 3, "trained tokens": 3072, "items": {name: {"items": 164} for name in both}}
    return {**about, "rows": rows, "guidance less": dict.fromkeys(both, less), "prompting": shots}


@pytest.mark.parametrize(
    ("made", "verdict", "tags", "prompting"),
    [
        (content(-0.1, 0.1, -0.05, (-0.1, -0.1)), "confirmed", (), "confirmed"),
        (content(-0.1, 0.1, 0.0, (0.1, 0.1)), "confirmed", ("empty",), "refuted"),
        (content(-0.1, 0.1, -0.05, (0.1, -0.1), seeds=0.2), "not confirmed", (), "not confirmed"),
        (content(-0.1, -0.1, -0.05, (0.0, 0.0)), "not confirmed", (), "not confirmed"),
        (content(0.1, 0.0, 0.0, (0.0, 0.1)), "refuted", (), "not confirmed"),
        (content(0.0, -0.1, 0.0, (0.1, 0.1), preferred=0.55), "refuted", ("floor",), "refuted"),
        (content(0.1, 0.1, 0.0, (0.1, 0.0)), "not confirmed", (), "not confirmed"),
    ],
)
def test_the_rule_of_the_claims(made, verdict, tags, prompting, tmp_path) -> None:
    write(tmp_path / "results.json", made)
    found = {one.claim: one for one in judge(tmp_path)}
    assert [found[claim].verdict for claim in ("D8", "D9")] == [verdict] * 2
    assert found["D8"].tags == found["D9"].tags == tags
    assert found["D10"].verdict == "not testable here"
    assert found["D11"].verdict == prompting
    write(tmp_path / "results.json", {**made, "seeds": 4})
    early = {one.claim: one for one in judge(tmp_path)}
    assert {one.verdict for one in early.values()} == {"not testable here"}
    assert early["D9"].tags == ("floor",)
    assert "3 of 4 seeds" in early["D9"].sentence
