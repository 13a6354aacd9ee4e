"""Arms of equal size, reading fewer entries, and what the runs are summarised to."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.knowledge_twins import study, summary
from experiments.knowledge_twins.models import Arm, build, sizes
from experiments.knowledge_twins.recipe import EXPERIMENT, judge, tiny
from experiments.runner.files import write
from tests.experiments.miniature import read_random_rows, run_miniature


@pytest.mark.parametrize("gated", [False, True])
def test_twins_are_of_equal_size(gated: bool) -> None:
    shared = Arm("shared", 64, 4, 512, gated)
    base = sizes(shared, 259, 64)
    alike, as_fast = (sizes(replace(shared, kind=kind), 259, 64) for kind in ("equal parameters", "equal compute"))
    neuron = 4 * (3 if gated else 2) * 64
    assert abs(alike["between"] - base["between"]) <= neuron
    assert alike["parameters"] - base["parameters"] == alike["between"] - base["between"]
    assert abs(as_fast["operations"] - base["operations"]) <= neuron
    assert as_fast["parameters"] > base["parameters"], "which is what sharing saves"


@pytest.mark.parametrize("gated", [False, True])
def test_operations_are_those_that_torch_counts(gated: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.zeros(2, 8, dtype=torch.long)

    def counted(arm: Arm) -> int:
        model = build(arm, 50, 8, 0)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, use_cache=False).logits.sum().backward()
        return sum(value for name, value in counter.get_flop_counts()["Global"].items() if "mm" in str(name))

    arm = Arm("shared", 32, 2, 24, gated)
    twin = replace(arm, kind="equal compute")
    network = 24 * (32 * 64 + 64 * (2 if gated else 1))  # of the thresholds, once for all tokens
    between = counted(arm) - counted(twin)
    said = 6 * tokens.numel() * (arm.operations - sizes(twin, 50, 8)["operations"])
    assert between == said + 6 * 2 * network


def test_reading_the_best_is_a_state_that_ends() -> None:
    model: Any = build(Arm("shared", 32, 2, 24, best=4), 50, 8, 0).eval()
    tokens = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(0))
    own = study.held_out(model, tokens)
    with study.reading(model, None):
        every = study.held_out(model, tokens)
    with study.reading(model, 4):
        assert study.held_out(model, tokens) == own
    assert every != own
    assert study.held_out(model, tokens) == own
    with study.reading(model, 24):
        assert study.held_out(model, tokens) == pytest.approx(every, abs=1e-6)
    assert study.held_out(model, tokens) == pytest.approx(
        sum(study.held_out(model, row[None]) for row in tokens) / 3, abs=1e-6
    )


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        read_random_rows(patch)
        patch.setattr(summary, "_DRAWS", 50)
        run_miniature(EXPERIMENT, folder, EXPERIMENT.miniature(tiny()))
    return folder


def test_results_are_written_and_judged(finished: Path) -> None:
    content = json.loads((finished / "results" / "results.json").read_text())
    names = list(tiny().arms)
    assert [one["arm"] for one in content["arms"]] == names
    assert [one["name"] for one in content["differences"]] == [
        "shared less equal parameters", "shared less equal compute",
        "gated shared less gated equal parameters", "gated shared less gated equal compute", "shared best less shared",
    ]  # fmt: skip
    with_base = {one["arm"]: one for one in content["arms"] if "read" in one}
    assert list(with_base) == ["shared", "shared best", "gated shared"]
    assert all(list(one["read"]) == ["2", "all"] and len(one["active"]) == 2 for one in with_base.values())
    assert with_base["shared"]["read"]["all"][0] == pytest.approx(with_base["shared"]["held_out"][0], abs=1e-5)
    ends = [
        json.loads((finished / "runs" / f"{arm}-0.0015-{seed}.json").read_text())["measured"][-1]["held_out"]
        for arm in ("shared", "equal-compute")
        for seed in (0, 1)
    ]
    assert content["differences"][1]["each"] == pytest.approx([ends[0] - ends[2], ends[1] - ends[3]])
    assert (finished / "results" / "results.csv").read_text().count("\n") == 1 + len(names) * 2 * 3
    assert (finished / "results" / "figure.png").stat().st_size > 20_000
    assert [one.claim for one in EXPERIMENT.judge(finished / "results")] == ["K4", "K6"]


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ((0.0, 0.0, 0.0, 0.0), "confirmed"),
        ((0.1, 0.1, 0.0, 0.0), "refuted"),
        ((0.0, 0.0, -0.1, 0.1), "refuted"),
        ((0.0, 0.1, 0.0, 0.1), "not confirmed"),
    ],
)
def test_the_rule(losses: tuple[float, ...], verdict: str, tmp_path: Path) -> None:
    assert judge_of(tmp_path, losses, 0.01) == verdict
    if verdict != "refuted":
        assert judge_of(tmp_path, losses, math.inf) == "not confirmed"
    write(tmp_path / "results.json", {"differences": [], "arms": []})
    assert judge(tmp_path) == []


@pytest.mark.parametrize(("shares", "verdict"), [([0.4, 0.1], "corrected"), ([0.4, 0.5], "refuted")])
def test_half_of_the_entries_are_no_selection(tmp_path: Path, shares: list[float], verdict: str) -> None:
    arms = [{"arm": "shared", "active": shares}, {"arm": "gated shared", "active": [0.5, 0.5]}]
    judge_of(tmp_path, (0.0, 0.0, 0.0, 0.0), 0.01, arms)
    assert [(one.claim, one.verdict) for one in judge(tmp_path)][1:] == [("K6", verdict)]


def judge_of(folder: Path, losses: tuple[float, ...], half: float, arms: Sequence[object] = ()) -> str:
    names = [f"{form}shared less {form}{kind}" for form in ("", "gated ") for kind in summary.KINDS[1:]]
    found = [{"name": name, "loss": [x, x - half, x + half]} for name, x in zip(names, losses, strict=True)]
    write(folder / "results.json", {"differences": found, "arms": arms})
    return judge(folder)[0].verdict
