"""Gold solutions by likelihood: wrong ones are of equal length, scores are those of a plain pass, rules are kept."""

from typing import Any

import numpy as np
import pytest

from experiments.daa_evaluation.compared import difference, measured
from experiments.daa_evaluation.recipe import judge
from experiments.runner.files import write


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
    rows += [
        {"arm": "base", "benchmark": name, "measure": "preferred", "value": [0.8, 0.7, 0.9]}
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
        (content(-0.1, -0.2, -0.05, (0.0, 0.0)), "refuted", ("empty",), "not confirmed"),
        (content(0.1, 0.0, 0.05, (0.0, 0.1)), "refuted", (), "not confirmed"),
        (content(0.015, 0.2, 0.0, (0.1, 0.1)), "refuted", ("empty", "small"), "refuted"),
        (content(0.0, 0.0, 0.0, (0.1, 0.0)), "no effect", ("empty",), "not confirmed"),
    ],
)
def test_the_rule_of_the_claims(made, verdict, tags, prompting, tmp_path) -> None:
    write(tmp_path / "results.json", made)
    found = {one.claim: one for one in judge(tmp_path)}
    assert [found[claim].verdict for claim in ("D8", "D9")] == [verdict] * 2
    assert found["D8"].tags == found["D9"].tags
    assert set(found["D8"].tags) == {*tags, "floor", "rule after"}, "pass rates are at the floor"
    assert found["D10"].verdict == "not testable here"
    assert found["D11"].verdict == prompting
    write(tmp_path / "results.json", {**made, "seeds": 4})
    early = {one.claim: one for one in judge(tmp_path)}
    assert {one.verdict for one in early.values()} == {"not testable here"}
    assert early["D9"].tags == ("floor",)
    assert "3 of 4 seeds" in early["D9"].sentence
