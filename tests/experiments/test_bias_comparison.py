"""Arms go on where their start ended, rates are chosen as the README says, and verdicts follow from the contrasts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset

from experiments.bias_comparison.arms import arm_of, fitted
from experiments.bias_comparison.contrasts import contrasts
from experiments.bias_comparison.data import Rows, Texts
from experiments.bias_comparison.losses import optimiser_of, some_of
from experiments.bias_comparison.recipe import miniature
from experiments.bias_comparison.results import choosing_loss, read_results
from experiments.bias_comparison.settings import few, text
from experiments.bias_comparison.starts import begin
from experiments.bias_comparison.verdicts import judge
from experiments.runner.files import write
from experiments.runner.jobs import Job
from experiments.runner.saved import newest_of


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": (torch.arange(16) * (index + 3)) % 64}


def texts() -> Texts:
    held = torch.stack([Numbers()[index]["input_ids"] for index in range(8)])
    rows = Rows(Numbers(), held, held, -1)
    return Texts(rows, rows, 64)


@pytest.mark.parametrize("arm", ["dense", "guidance"])
def test_an_arm_takes_over_the_optimiser_of_its_start(tmp_path: Path, arm: str) -> None:
    config = miniature(text())
    part = config.parts[0]
    start = begin(config, part, arm, 0, tmp_path / "job", lambda *_: None, texts())
    assert start.place is not None
    held = torch.load(newest_of(start.place) / "optimiser.pt", weights_only=True)["optimiser"]["state"]
    names = {parameter: name for name, parameter in start.model.named_parameters()}
    with fitted(start.model, arm_of(start.model, arm, part.hidden_dim, part.layers), 0, "all") as trained:
        optimiser = optimiser_of(trained)
        start.carry(optimiser)
        carried = {names[parameter] for parameter in optimiser.state}
        assert carried == set(names.values())
        assert len(list(trained.parameters())) > len(carried)  # what is added begins with a new state
        for index, parameter in enumerate(start.own):
            assert torch.equal(optimiser.state[parameter]["exp_avg"], held[index]["exp_avg"])
            assert optimiser.state[parameter]["step"] == part.start


def test_what_was_trained_with_an_arm_is_had_again(tmp_path: Path) -> None:
    config = miniature(few())
    part = replace(config.parts[0], start=3)
    start = begin(config, part, "guidance 16", 0, tmp_path / "job", lambda *_: None, texts())
    assert start.place is not None
    saved = load_file(newest_of(start.place) / "model.safetensors")
    again = begin(config, part, "guidance 64", 0, tmp_path / "other job", lambda *_: None, texts())
    with fitted(again.model, arm_of(again.model, "guidance", part.hidden_dim, part.layers), 7, "all") as trained:
        again.restore_additions(trained)
        now = dict(trained.named_parameters())
        assert now.keys() == saved.keys()
        assert all(torch.equal(now[name], value) for name, value in saved.items())


def test_few_rows_are_those_of_the_seed() -> None:
    drawn = [
        [some_of(texts().new, 3, seed).training[index]["input_ids"][1].item() for index in range(3)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
    assert sorted(drawn[0]) != sorted(drawn[2])


def study(
    folder: Path, losses: dict[tuple[str, float, int], float], arms: list[str], choosing: int, fresh: bool
) -> Path:
    (folder / "runs").mkdir(parents=True)
    part = {"name": "text", "arms": arms, "rates": [0.1, 0.2], "kind": "text"}
    config = {"parts": [part], "seeds": [0, 1, 2], "choosing": choosing, "fresh": fresh}
    write(folder / "study.json", {"config": config})
    for (arm, rate, seed), loss in losses.items():
        job = Job(f"text {arm}", rate, seed)
        run: dict[str, Any] = {"parameters": 1, "choosing": loss, "extras": {}, "measured": [{"step": 0, "loss": 5.0}]}
        run["measured"] += [{"step": step, "loss": loss + 1 / step} for step in (1, 2, 3)]
        write(folder / "runs" / f"{job.name}.json", {"job": {"arm": job.arm, "rate": rate, "seed": seed}, **run})
    return folder


def test_rates_are_chosen_by_the_seeds_that_are_in(tmp_path: Path) -> None:
    losses = {("plain", rate, seed): 1.0 + rate for rate in (0.1, 0.2) for seed in (0, 1, 2)}
    losses |= {("guidance", rate, seed): 2.0 - rate + seed for rate in (0.1, 0.2) for seed in (0, 1)}
    folder = study(tmp_path / "all", losses, ["plain", "guidance"], 3, fresh=False)
    _, found = read_results(folder)
    plain, own = found["text", "plain"], found["text", "guidance"]
    assert (plain.rate, own.rate) == (0.1, 0.2)
    assert list(plain.runs) == [0, 1]  # the third seed has not run in every arm
    compared = contrasts(found)
    assert compared["text: loss, guidance less plain"] == pytest.approx([0.7, 1.7])
    assert compared["text: loss at 0.1, guidance less plain"] == pytest.approx([0.8, 1.8])
    assert all(share < 0 for share in compared["text: share of the steps saved, guidance less plain"])
    others = study(tmp_path / "others", losses, ["plain"], 1, fresh=True)
    assert list(read_results(others)[1]["text", "plain"].runs) == [1, 2]  # the first one chose


def test_a_rate_that_solves_more_seeds_comes_first() -> None:
    solved = {"choosing": 0.3, "choosing_accuracy": 0.96}
    missed = {"choosing": 0.2, "choosing_accuracy": 0.94}
    assert choosing_loss(solved) < choosing_loss(missed)
    assert choosing_loss({"choosing": 0.2, "choosing_accuracy": None}) == 0.2


TEXT, LOST, DEPTH = "text: loss, guidance less", "distractors: loss of accuracy,", "depth: accuracy in the middle,"
NAMES = {
    **{arm: f"{TEXT} {arm}" for arm in ("plain", "key", "lowrank", "dense")},
    "saved": "text: share of the steps saved, guidance less plain",
    "third": f"{LOST} guidance less a third of plain",
    "own": f"{LOST} guidance",
    "theirs": f"{LOST} plain",
    "drops": f"{LOST} guidance less plain",
    "hurt": f"{LOST} guidance less key",
    "middle": f"{DEPTH} guidance less plain",
    "deep": f"{DEPTH} guidance less key",
}
GAIN = {"plain": -0.1, "key": -0.1, "lowrank": -0.1, "dense": -0.1, "saved": 0.2}
HURT = {"third": -0.1, "own": 0.05, "theirs": 0.45, "drops": -0.4, "hurt": -0.1, "middle": 0.2, "deep": 0.2}


@pytest.mark.parametrize(
    ("means", "verdicts"),
    [
        (GAIN, {"D7": "confirmed", "D12": "confirmed", "D17": "confirmed"}),
        ({**GAIN, "key": 0.0}, {"D7": "confirmed empty", "D12": "confirmed", "D17": "confirmed"}),
        ({**GAIN, "plain": 0.0, "saved": -0.1}, {"D7": "not confirmed", "D12": "refuted", "D17": "confirmed"}),
        (HURT, {"D15": "confirmed", "D16": "confirmed"}),
        ({**HURT, "hurt": 0.0, "deep": 0.0}, {"D15": "confirmed empty", "D16": "confirmed empty"}),
        ({**HURT, "theirs": 0.0, "middle": -0.2}, {"D15": "not testable here", "D16": "refuted"}),
        ({**HURT, "third": 0.0}, {"D15": "not confirmed", "D16": "confirmed"}),
    ],
)
def test_verdicts_say_what_a_control_gains_as_well(
    means: dict[str, float], verdicts: dict[str, str], tmp_path: Path
) -> None:
    made = {NAMES[name]: {"t": [mean, mean - 0.01, mean + 0.01]} for name, mean in means.items()}
    write(tmp_path / "results.json", {"contrasts": made, "extras": {}})
    assert {one.claim: " ".join((one.verdict, *one.tags)) for one in judge(tmp_path)} == verdicts
