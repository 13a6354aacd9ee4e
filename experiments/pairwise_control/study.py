"""The runs: every arm at every rung of the ladder, with every learning rate and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from experiments.pairwise_control.model import ARMS, RUNGS, Arm, Ladder, Rung
from experiments.pairwise_control.task import Problems, Task
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Record, swept
from experiments.runner.training import Loop, cosine, train

_CHOOSING, _TEST = 1_000_000, 2_000_000  # seeds of problems: those of training are below


@dataclass(frozen=True)
class Control:
    """What is trained. The defaults are the scale "tiny"."""

    task: Task = field(default_factory=Task)  # what is learned
    rungs: tuple[Rung, ...] = RUNGS  # of the ladder
    arms: tuple[Arm, ...] = ARMS  # at each of them
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)  # peak learning rates, all of which every arm has with every seed
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of initial weights and of problems
    steps: int = 1000  # of the optimiser
    batch_size: int = 64  # new problems a step
    tested: int = 4096  # problems for the results, and as many for choosing the rate


def miniature(config: Control) -> Control:
    """Two steps of four problems, two seeds, two rates."""
    return replace(config, rates=config.rates[:2], seeds=config.seeds[:2], steps=2, batch_size=4, tested=16)


def name_of(rung: str, arm: str) -> str:
    """The name that jobs have for an arm at a rung."""
    return f"{rung} {arm}"


def choosing_loss(run: Record) -> float:
    """Loss on the problems that choose the learning rate."""
    return run["choosing"]


def setup(config: Control) -> Setup:
    """A run for each rung, arm, rate and seed; all seeds choose an arm's rate, on other problems than the results'."""
    arms = [name_of(rung, arm) for rung in config.rungs for arm in config.arms]

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        rung, arm = job.arm.split()
        assert job.rate is not None
        assert job.seed is not None
        model = Ladder(config.task, cast(Rung, rung), cast(Arm, arm), job.seed)
        return trained(model, config, job.rate, job.seed, folder, progress)

    plan = swept(arms, config.rates, config.seeds, choosing_loss, choosing=len(config.seeds))
    sizes = {arm: Ladder(config.task, "nothing", arm, 0).added for arm in config.arms}
    return Setup(plan, run, {"added parameters": sizes})


def trained(
    model: Ladder, config: Control, rate: float, seed: int, folder: Path, progress: Progress | None = None
) -> dict[str, object]:
    """Train a model and measure it: all arms of a seed see the same problems, step by step."""

    def losses(_: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        del step, part  # from which torch's own generator has been set
        return {"loss": model.loss(config.task.draw(config.batch_size))}

    course = train(
        model,
        torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True),
        losses,
        Loop(config.steps, rate, cosine(config.steps, min(50, config.steps // 2)), log_every=100, save_every=0),
        folder,
        seed=seed,
        identity={"rate": rate, "steps": config.steps},
        progress=progress,
    )

    def draw(first: int) -> Problems:
        return config.task.draw(config.tested, torch.Generator().manual_seed(first + seed))

    with torch.no_grad():
        choosing = model.loss(draw(_CHOOSING)).item()
        found = measured(model, draw(_TEST))
    return {"choosing": choosing, **found, "log": course.log, "seconds": course.seconds}


def measured(model: Ladder, problems: Problems) -> dict[str, Any]:
    """Loss, share of right labels, and which candidate the query attends to most: the right one, or one at an end."""
    logits, weights = model(problems.query, problems.numbers, problems.labels)
    first = weights.argmax(dim=1, keepdim=True)
    number = problems.numbers.gather(1, first)[:, 0]
    low, high = problems.numbers.aminmax(dim=1)
    return {
        "loss": nn.functional.cross_entropy(logits, problems.answers).item(),
        "accuracy": _share(logits.argmax(dim=1) == problems.answers),
        "attends to the right one": _share(first[:, 0] == 0),
        "attends to an end": _share((number == low) | (number == high)),
    }


def _share(right: Tensor) -> float:
    return right.float().mean().item()
