"""A study of seconds whose process can be made to die; as a program it runs it: `python -m tests.experiments.toy`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from experiments.runner import saved
from experiments.runner.experiment import Experiment, Judgement, Setup
from experiments.runner.files import write
from experiments.runner.jobs import Job, repeated
from experiments.runner.study import Study, describe, read_study, trial
from experiments.runner.training import Course, Loop, cosine, train


@dataclass(frozen=True)
class Toy:
    seeds: tuple[int, ...] = (0, 1)  # of the jobs
    steps: int = 9  # of each
    parts: int = 2  # of each step


def recipe() -> Toy:
    return Toy()


def run_toy(config: Toy, seed: int, folder: Path, before: Callable[[int], None], progress: Progress) -> Course:
    """A network with dropout learns noise; `before` is called with each step before its losses."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 1))
    course, chance = Course(), torch.Generator().manual_seed(seed)

    def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        before(step)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * seed + 10 * step + part))
        noise = 0.1 * torch.rand((), generator=chance)
        return {"error": (now(x)[:, 0] - x.sum(dim=1)).square().mean(), "size": noise * now[0].weight.square().mean()}

    def measure(now: nn.Module, step: int) -> dict[str, object]:
        course.tensors[f"after {step}"] = now[0].weight.detach().clone()
        return {"norm": float(now[0].weight.detach().norm())}

    loop = Loop(
        config.steps, 1e-2, cosine(config.steps, 2), parts=config.parts, log_every=2, measure_every=3, save_every=2
    )
    optimiser = torch.optim.AdamW(model.parameters())
    return train(
        model, optimiser, losses, loop, folder, seed=seed, identity={"steps": config.steps}, measure=measure,
        course=course, generator=chance, progress=progress,
    )  # fmt: skip


def setup_dying(at: int | None) -> Callable[[Toy], Setup]:
    """A setup whose process is killed before a step of the first seed."""

    def die(step: int) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def setup(config: Toy) -> Setup:
        def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
            course = run_toy(config, job.seed or 0, folder, die if job.seed == 0 else lambda _: None, progress)
            tensors = {name: tensor.tolist() for name, tensor in sorted(course.tensors.items())}
            return {"log": course.log, "measured": course.measured, "tensors": tensors}

        return Setup(repeated(["a", "b"], config.seeds), run)

    return setup


def summarise(folder: Path, results: Path) -> str:
    write(results / "results.json", {"runs": len(read_study(folder)[1])})
    return f"{len(read_study(folder)[1])} runs"


TOY = Experiment[Any](
    name="toy",
    question="Does it go on?",
    recipes={"tiny": recipe},
    setup=setup_dying(None),
    summarise=summarise,
    miniature=lambda config: replace(config, steps=2),
    judge=lambda _: [Judgement("X1", "confirmed", "It does.")],
)


def run_study(folder: Path, setup: Callable[[Toy], Setup] = TOY.setup) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made = setup(recipe())
    describe(folder, TOY, recipe(), made, "tiny", trial())
    Study(folder, made, made.plan, lambda *_: None).run()


if __name__ == "__main__":
    place, moment = Path(sys.argv[1]), sys.argv[2]
    if moment == "checkpoint":  # while the second one is written: there is none but the first
        plain, count = saved.seal, [0]

        def dying(folder: Path, about: Mapping[str, object]) -> None:
            """As the disk has it when the machine is gone."""
            count[0] += 1
            if count[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(folder, about)

        saved.seal = dying
    run_study(place, setup_dying(None if moment == "checkpoint" else int(moment)))
