"""The hasse experiments: committed results are those of their tables, and how two studies are judged together."""

import json
from copy import deepcopy

import numpy as np
import pytest

from experiments.hasse import from_table as hasse
from experiments.hasse.judging import combined, judge
from experiments.hasse.settings import Training, tiny_pairs
from experiments.hasse.study import _plan
from experiments.hasse.summary import at_equal_rates, read_curves
from experiments.infilling import from_table as infilling
from experiments.runner.experiment import ROOT
from experiments.runner.files import read, write
from experiments.runner.jobs import Job

HASSE, INFILLING = (ROOT / name / "results" for name in ("hasse", "infilling"))


def test_committed_results_are_those_of_the_committed_tables():
    assert json.loads(json.dumps(hasse.recomputed(HASSE)[0])) == read(HASSE / "results.json")
    assert json.loads(json.dumps(infilling.recomputed(INFILLING))) == read(INFILLING / "results.json")


def test_what_is_run_again_has_seeds_in_turn_and_the_decisive_arms_first():
    plan = _plan(tiny_pairs()).first
    decisive = plan[: len(plan) * 10 // 19]
    assert {job.arm for job in decisive} == set(tiny_pairs().rerun[0])
    assert [job.seed for job in decisive] == sorted(10 * list(range(3, 11)))
    assert {job.rate for job in plan if job.arm == "sparse block 1"} == {1.5e-3, 3e-3}
    assert not {job.seed for job in plan} & set(Training().seeds)


@pytest.fixture
def second(tmp_path):
    """A study of block 1 whose sparse arm is better by 0.1 at every rate, and whose first rate is better."""
    first = read(HASSE / "study.json")
    rates = [0.0015, 0.003]
    config = {**first["config"], "seeds": [3, 4, 5], "rerun": [{"block 1": rates, "sparse block 1": rates}]}
    costs = {name: first["costs"][name] for name in config["rerun"][0]}
    write(tmp_path / "study.json", {**first, "config": config, "costs": costs})
    (tmp_path / "runs").mkdir()
    jobs = [Job(arm, rate, seed) for arm in costs for rate in rates for seed in config["seeds"]]
    for job in jobs[:-1]:  # the last run is still to come
        loss = 2 + job.seed / 10 + 10 * job.rate - 0.1 * job.arm.startswith("sparse")
        run = {"job": vars(job), "measured": [{"step": 800, "held_out": loss, "choosing": loss}], "seconds": 1.0}
        write(tmp_path / "runs" / f"{job.name}.json", run)
    return tmp_path


def test_a_cut_study_counts_the_seeds_that_have_all_rates(second):
    curves = read_curves(second)[1]
    assert {arm: (one.rate, list(one.runs)) for arm, one in curves.items()} == {
        "block 1": (0.0015, [3, 4, 5]),
        "sparse block 1": (0.0015, [3, 4]),
    }
    equal = at_equal_rates(second)["block 1"]
    assert list(equal) == ["0.0015", "0.003"]
    assert np.allclose([one[0] for one in equal.values()], -0.1)


def test_the_second_study_counts_from_five_seeds_on():
    first = read(HASSE / "results.json")
    second = deepcopy(first)
    for one in second["arms"]:
        one |= {"seeds": list(range(3, 11 if one["arm"] == "warm 8" else 7)), "held_out": [1.0, 0.9, 1.1]}
        one["less_causal"] = [0.0, 0.0, 0.0]
    second["sparse_less_dense"]["block 1"] = [0.0, 0.0, 0.0]
    found = combined(first, second)
    changed = [one["arm"] for one, old in zip(found["arms"], first["arms"], strict=True) if one != old]
    assert changed == ["warm 8"]
    assert found["renewed"] == {"warm 8": 8}
    new, old = (next(one for one in each["arms"] if one["arm"] == "warm 8") for each in (found, first))
    assert (new["held_out"], new["less_causal"]) == ([1.0, 0.9, 1.1], old["less_causal"])  # causal has too few seeds
    assert found["sparse_less_dense"] == first["sparse_less_dense"]
    for one in second["arms"]:
        one["seeds"] = list(range(3, 8))
    assert combined(first, second)["sparse_less_dense"]["block 1"] == [0.0, 0.0, 0.0]


def test_verdicts_follow_the_rules(tmp_path):
    content = read(HASSE / "results.json")
    verdicts = {one.claim: one for one in judge(HASSE)}
    assert [(one.verdict, one.tags) for one in verdicts.values()] == [
        ("confirmed", ()),
        ("not confirmed", ("floor",)),
        ("not confirmed", ()),
    ]
    assert "reaches its depth and ends at 2.248 nats, the dense one at 0.022" in verdicts["H18"].sentence
    next(one for one in content["arms"] if one["arm"] == "warm 8")["held_out"] = [3.09, 3.08, 3.10]
    content["sparse_less_dense"]["block 1"] = [-0.05, -0.09, 0.01]
    write(tmp_path / "results.json", content)
    assert [(one.verdict, one.tags) for one in judge(tmp_path)][1:] == [
        ("confirmed", ("floor",)),
        ("confirmed", ("empty",)),
    ]
    content["sparse_less_dense"]["block 1"] = [0.05, 0.03, 0.07]
    write(tmp_path / "results.json", content)
    assert judge(tmp_path)[2].verdict == "refuted"
