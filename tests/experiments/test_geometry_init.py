"""Both objectives at both rates: which runs are compared, what chooses a rate, and what follows."""

import itertools

import numpy as np
import pytest

from experiments.geometry_init.curves import read_curves, read_table
from experiments.geometry_init.rates import SYMMETRY
from experiments.geometry_init.recipe import judge
from experiments.geometry_init.study import rates
from experiments.geometry_init.summary import comparisons, content_of, contrasts, summarise
from experiments.runner.experiment import find
from experiments.runner.files import read, write
from experiments.runner.jobs import Job
from experiments.runner.study import RUNS

LOW, HIGH = rates().rates


def made(objective, start, rate, seed):
    """A run whose S ends at 0.1 or 0.3 (masked, low and high rate), 0 or 0.05 (causal); from the scaled start at 0."""
    noise = 0.01 * np.sin(7.0 * seed + 3 * (objective == "masked") + rate)
    ends = {"masked": {LOW: 0.1, HIGH: 0.3}, "causal": {LOW: 0.0, HIGH: 0.05}}
    s = noise + ends[objective][rate] * (start == "default")
    best = {"masked": LOW, "causal": HIGH}[objective]
    end = {"held_out": 5.0, "symmetry": [s] * 4, "directionality": [s - 0.2 * (objective == "causal")] * 4}
    begin = {"step": 0, "held_out": 7.0, "symmetry": [0.0] * 4, "directionality": [0.0] * 4}
    # An early layer settles at once, a late one at the end.
    middle = {"step": 25, **end, "symmetry": [s, s, 0.0, 0.0]}
    measured = [begin, middle, {"step": 50, **end, "choosing": 5.0 + 0.1 * (rate != best) + noise}]
    job = Job(f"{objective} {start}", rate, seed)
    return job.name, {"job": job.__dict__, "measured": measured, "seconds": 1.0}


@pytest.fixture
def results(tmp_path):
    config = {"masked": ["default", "scaled"], "causal": ["default", "scaled"], "rates": [LOW, HIGH], "choosing": 5}
    (tmp_path / RUNS).mkdir()
    (tmp_path / "results").mkdir()
    write(tmp_path / "study.json", {"config": {**config, "seeds": [5, 6, 7, 8, 9]}, "scale": "rates"})
    for objective, start, rate, seed in itertools.product(
        ("masked", "causal"), ("default", "scaled"), (LOW, HIGH), (5, 6, 7, 8)
    ):
        if (objective, start, rate, seed) != ("causal", "scaled", HIGH, 8):  # seed 8 is not whole, seed 9 not begun
            name, run = made(objective, start, rate, seed)
            write(tmp_path / RUNS / f"{name}.json", run)
    text = summarise(tmp_path, tmp_path / "results")
    assert "0.0005 (an end)" in text
    write(tmp_path / "results" / "study.json", read(tmp_path / "study.json"))
    return tmp_path / "results"


def test_a_study_of_rates_compares_whole_seeds_at_equal_and_at_best_rates(results):
    content = read(results / "results.json")
    assert {tuple(arm["seeds"]) for arm in content["arms"]} == {(5, 6, 7)}
    assert {(one["objective"], one["rate"]) for one in content["choices"]} == {("masked", LOW), ("causal", HIGH)}
    assert all(one["others less best"].popitem()[1][0] == pytest.approx(0.1, abs=0.01) for one in content["choices"])
    values = {
        row["at"]: row["value"][0]
        for row in content["rates"]
        if (row["contrast"], row["start"]) == (SYMMETRY, "default")
    }
    assert values == pytest.approx({f"{LOW:g}": 0.1, f"{HIGH:g}": 0.25, "best": 0.05}, abs=0.02)
    verdicts = {one.claim: one.verdict for one in judge(results)}
    assert verdicts == {
        "G9": "corrected",  # from the default start alone
        "G10": "confirmed",
        "G11": "not confirmed",
        "G12": "not confirmed",
        "G30": "not confirmed",
        "G31": "refuted",
    }
    whole = {(one.objective, one.arm, one.rate) for one in read_curves(results.parent)[0]}
    assert whole == {(one.objective, one.arm, one.rate) for one in read_table(results)}


def test_results_of_the_first_study_follow_from_the_table_beside_them():
    results = find("geometry_init").results("tiny")
    every, held = read_table(results), read(results / "results.json")
    again = content_of(every, comparisons(every), contrasts(every))
    for name, value in held["contrasts"].items():
        assert again["contrasts"][name] == pytest.approx(value, abs=1e-9), name
    assert [one["loss"] for one in again["comparisons"]] == [
        pytest.approx(one["loss"], abs=1e-9) for one in held["comparisons"]
    ]
