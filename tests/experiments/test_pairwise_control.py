"""The positive control for pairwise biases: one right candidate, scores that are affine, equal sizes, and the rule."""

import json
from typing import Any

import pytest
import torch

from attnflow.bias import BilinearConfig
from attnflow.bias.config import LayerShape
from experiments.pairwise_control import ceilings, model
from experiments.pairwise_control.model import ARMS, HEAD, RUNGS, WIDTH, Ladder
from experiments.pairwise_control.recipe import judge
from experiments.pairwise_control.task import Task

TASK = Task()
PROBLEMS = TASK.draw(500, torch.Generator().manual_seed(0))


def run(ladder: Ladder) -> Any:
    return ladder(PROBLEMS.query, PROBLEMS.numbers, PROBLEMS.labels)


def random(arm: str, rung: str = "nothing") -> Ladder:
    """With random weights in all parts, so that no bias is zero."""
    ladder = Ladder(TASK, rung, "plain" if arm == "bilinear" else arm, 0)
    if arm == "bilinear":
        ladder.bias = BilinearConfig().module(LayerShape(0, 1, 1, HEAD, WIDTH, is_causal=False))
    torch.manual_seed(1)
    for parameter in ladder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return ladder.double()


def test_exactly_one_candidate_is_right() -> None:
    away = (PROBLEMS.numbers - PROBLEMS.query[:, None]).abs()
    assert (away[:, 0] == TASK.distance).all()
    assert ((away[:, 1:] - TASK.distance).abs() >= TASK.margin).all()
    assert PROBLEMS.numbers.abs().max() <= TASK.largest
    assert 2 * TASK.reach > 2 * TASK.distance
    assert torch.equal(PROBLEMS.labels.sort(dim=1).values, torch.arange(TASK.candidates).expand(500, -1))
    above = (PROBLEMS.numbers[:, 0] > PROBLEMS.query).float().mean()
    assert 0.4 < above < 0.6


@pytest.mark.parametrize("arm", ["plain", "lowrank", "bilinear", "key", "guidance"])
def test_scores_without_a_network_put_an_end_first(arm: str) -> None:
    """A network, of the key or of both, bends them."""
    numbers = torch.linspace(-13, 13, 53, dtype=torch.float64).expand(500, -1)
    ladder = random(arm)
    _, weights = ladder(PROBLEMS.query.double(), numbers, torch.zeros(500, 53, dtype=torch.int64))
    scores = weights.log()
    bent = scores.diff(n=2, dim=1).abs().amax(dim=1) / scores.diff(dim=1).abs().amax(dim=1)
    inside = ~torch.isin(weights.argmax(dim=1), torch.tensor([0, 52]))
    if arm in ("key", "guidance"):
        assert bent.max() > 0.01
        assert arm == "key" or inside.any()
    else:
        assert bent.max() < 1e-8
        assert not inside.any()


def test_lowrank_can_be_every_bilinear_form() -> None:
    assert model.BIASES["lowrank"].rank >= HEAD  # type: ignore[attr-defined]


@pytest.mark.parametrize("rung", RUNGS)
def test_arms_have_equal_size_and_begin_as_one_function(rung: model.Rung) -> None:
    ladders = {arm: Ladder(TASK, rung, arm, 3) for arm in ARMS}
    assert ladders["plain"].added == 0
    logits, own = run(ladders["plain"])[0], ladders["guidance"].added
    for arm in ARMS[1:]:
        assert abs(ladders[arm].added / own - 1) < 0.02
        torch.testing.assert_close(run(ladders[arm])[0], logits, rtol=0, atol=0)
        for parameter in (ladders[arm].more or ladders[arm].bias).parameters():
            torch.nn.init.normal_(parameter)
        assert not torch.allclose(run(ladders[arm])[0], logits, rtol=0, atol=1e-3)


def test_ceilings_are_those_of_problems_that_are_drawn() -> None:
    drawn = TASK.draw(40_000, torch.Generator().manual_seed(1))
    ends = torch.stack([drawn.numbers.argmax(dim=1), drawn.numbers.argmin(dim=1)]) == 0
    by_query = [ends[:, drawn.query == number].float().mean(dim=1).max().item() for number in TASK.queries]
    assert ceilings.best_end(TASK) == pytest.approx(sum(by_query) / len(by_query), abs=0.01)
    table = torch.randn(len(TASK.queries), len(TASK.numbers), generator=torch.Generator().manual_seed(2)).double()
    scores = table[drawn.query[:, None] + TASK.reach, drawn.numbers + TASK.largest]
    seen = (scores.argmax(dim=1) == 0).float().mean().item()
    assert ceilings.accuracy(TASK, table).item() == pytest.approx(seen, abs=0.01)


def test_a_bias_of_the_key_alone_is_bounded() -> None:
    """Of all slopes, and also where the range of queries is narrower than twice the distance."""
    bound = ceilings.key_only_bound(TASK)
    torch.manual_seed(0)
    bias = torch.randn(500, len(TASK.numbers)).double() * torch.logspace(0, 2, 500)[:, None]
    slopes = torch.randint(-1, 2, (500, 1, 1))
    scores = slopes * TASK.queries[:, None] * TASK.numbers + bias[:, None]
    assert ceilings.accuracy(TASK, scores).max() < bound < 1
    narrow = Task(distance=4, reach=3, margin=2)
    found = ceilings.best_key_only(narrow)
    assert ceilings.best_end(narrow) < found < ceilings.key_only_bound(narrow) < 1


@pytest.mark.parametrize(
    ("nothing", "network", "block", "verdict"),
    [
        ((0.7, 0.8), (0.01, 0.05), (0.01, 0.05), "confirmed"),
        ((0.7, 0.8), (-0.01, 0.01), (-0.01, 0.01), "corrected"),
        ((0.7, 0.8), (-0.01, 0.01), (-0.01, 0.03), "not confirmed"),
        ((0.7, 0.8), (0.01, 0.05), (-0.01, 0.01), "not confirmed"),
        ((-0.1, 0.1), (-0.01, 0.01), (-0.01, 0.01), "not confirmed"),
        ((-0.1, 0.01), (-0.01, 0.01), (-0.01, 0.01), "refuted"),
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
