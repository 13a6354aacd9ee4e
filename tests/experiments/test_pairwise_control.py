"""The positive control for pairwise biases: one right candidate, scores that are affine, equal sizes, and the rule."""

import json
from typing import Any

import pytest
import torch

from experiments.pairwise_control.recipe import judge
from experiments.pairwise_control.task import Task

TASK = Task()
PROBLEMS = TASK.draw(500, torch.Generator().manual_seed(0))


def test_exactly_one_candidate_is_right() -> None:
    away = (PROBLEMS.numbers - PROBLEMS.query[:, None]).abs()
    assert (away[:, 0] == TASK.distance).all()
    assert ((away[:, 1:] - TASK.distance).abs() >= TASK.margin).all()
    assert PROBLEMS.numbers.abs().max() <= TASK.largest
    assert 2 * TASK.reach > 2 * TASK.distance
    assert torch.equal(PROBLEMS.labels.sort(dim=1).values, torch.arange(TASK.candidates).expand(500, -1))
    above = (PROBLEMS.numbers[:, 0] > PROBLEMS.query).float().mean()
    assert 0.4 < above < 0.6


@pytest.mark.parametrize(
    ("nothing", "network", "block", "verdict"),
    [
        ((0.7, 0.8), (0.01, 0.05), (0.01, 0.05), "confirmed"),
        ((0.7, 0.8), (-0.01, 0.01), (-0.01, 0.01), "corrected"),
        ((0.7, 0.8), (-0.01, 0.01), (-0.01, 0.03), "corrected"),
        ((0.7, 0.8), (-0.01, 0.03), (-0.01, 0.03), "not confirmed"),
        ((-0.1, 0.1), (-0.01, 0.01), (-0.01, 0.01), "not confirmed"),
        ((-0.1, -0.01), (-0.01, 0.01), (-0.01, 0.01), "refuted"),
    ],
)
def test_the_claim_is_judged_without_and_with_a_network(tmp_path: Any, nothing, network, block, verdict) -> None:
    ends = {"nothing": nothing, "network": network, "block": block}
    differences = [
        {"rung": rung, "less": "lowrank", "best rates": [sum(pair) / 2, *pair]} for rung, pair in ends.items()
    ]
    rows = [{"rung": rung, "arm": arm, "accuracy": [0.5, 0, 1]} for rung in ends for arm in ("guidance", "lowrank")]
    content = {"seeds": list(range(5)), "differences": differences, "rows": rows}
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert [(one.claim, one.verdict) for one in judge(tmp_path)] == [("D23", verdict)]
    (tmp_path / "results.json").write_text(json.dumps({**content, "seeds": list(range(4))}))
    assert judge(tmp_path) == []
