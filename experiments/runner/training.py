"""The training loop of all experiments: killed at any step and started again, it goes on as if it had not been."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from experiments.runner.processes import Launch, launched
from experiments.runner.saved import Checkpoints, Course
from experiments.runner.sharding import let_go, shard, whole

Losses = Callable[[nn.Module, int, int], Mapping[str, Tensor]]
Measure = Callable[[nn.Module, int], Mapping[str, object]]
Observe = Callable[[nn.Module, int], object]

_GOLDEN: Final = 0x9E3779B97F4A7C15  # neighbouring (seed, step) give unlike generators


class Diverged(ValueError):
    """A loss or a gradient is NaN or infinite; nothing of that step is saved."""


@dataclass(frozen=True)
class Loop:
    steps: int  # of the optimiser
    rate: float  # peak learning rate
    schedule: Callable[[int], float]  # step from 0 -> factor of the rate
    clip: float = 1.0  # norm that gradients are clipped to
    parts: int = 1  # forward and backward passes of a step, each of its own data; several processes share them
    log_every: int = 10  # steps between two entries of the log, means of the losses since the last one
    # steps between two measurements; also made before the first step and after the last one. 0: only then.
    measure_every: int = 0
    # steps between two checkpoints; 0 for none. One more follows the last step, if there was one before.
    save_every: int = 100


def train(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    losses: Losses,
    loop: Loop,
    folder: Path,
    *,
    seed: int,
    identity: Mapping[str, object],
    measure: Measure | None = None,
    observe: Observe | None = None,
    course: Course | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Course:
    """Train, or go on from the newest complete checkpoint of the folder; what comes out is the same, bit by bit.

    Whatever is drawn must follow from (seed, step, part): data by themselves, dropout because torch's own generator is
    set from them before every pass. Under `accelerate launch` every process takes its share of a step's parts, so that
    the data of a step do not depend on how many there are. With `--use_fsdp --fsdp_version 2` the model is sharded, for
    good; see `sharding.shard`. `losses`, `measure` and `observe` are then called on every process: a pass
    through the model works as usual if all make it. Weights and gradients are parts; `sharding.whole` joins them.

    Args:
        model: whose trained parameters and buffers are saved; sharded, it must be the same on every process.
        optimiser: of those parameters, new; its learning rates are set here, times the "factor" of a group, and its
            parameters if they are sharded.
        losses: (model, step, part) -> terms whose sum is minimised.
        loop: how long.
        folder: for checkpoints.
        seed: of what torch draws.
        identity: settings of the run; a checkpoint of another run is refused.
        measure: (model, steps done) -> numbers for `Course.measured`.
        observe: (model, step from 0), called between the gradients and the update.
        course: to write to; `measure` and `observe` may put tensors there, which are saved.
        generator: a sequential source of chance of the losses, whose state is saved with the rest.
        progress: of the steps.
    """
    course = Course() if course is None else course
    identity = json.loads(json.dumps({**identity, "seed": seed}))
    processes = _Processes(model, optimiser)
    launch = processes.launch
    checkpoints = Checkpoints(folder, identity, model, optimiser, course, generator, launch)
    done, pending = checkpoints.restore()
    trained = [p for p in model.parameters() if p.requires_grad]
    began = time.perf_counter() - course.seconds
    with _own_chance():
        model.train()
        if done == 0 and measure is not None:
            _measure(model, measure, 0, course, launch)
        for step in range(done, loop.steps):
            for group in optimiser.param_groups:
                group["lr"] = loop.rate * loop.schedule(step) * group.get("factor", 1.0)
            optimiser.zero_grad()
            terms = processes.backward(losses, loop, step, seed)
            norm = whole(nn.utils.clip_grad_norm_(trained, loop.clip))
            numbers = {name: value.item() for name, value in terms.items()}
            if not bool(torch.stack(list(terms.values())).sum().isfinite() & norm.isfinite()):
                said = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
                raise Diverged(
                    f"seed {seed}, step {step + 1}: {said}, norm of the gradients {norm.item():g}; not saved"
                )
            if observe is not None:
                observe(model, step)
                let_go(model)
            optimiser.step()
            pending.append(numbers)
            now = step + 1
            last = now == loop.steps
            if now % loop.log_every == 0 or last:
                course.log.append({"step": float(now), **_means(pending)})
                pending.clear()
            if measure is not None and (last or (loop.measure_every and now % loop.measure_every == 0)):
                _measure(model, measure, now, course, launch)
            course.seconds = time.perf_counter() - began
            if loop.save_every and (now % loop.save_every == 0 or (last and now > loop.save_every)):
                checkpoints.save(now, pending)
            if progress is not None:
                progress(now, loop.steps, ", ".join(f"{name} {value:.3f}" for name, value in numbers.items()))
        model.eval()
    return course


def cosine(steps: int, warmup: int, end: float = 0.0) -> Callable[[int], float]:
    """Linear rise over `warmup` steps, then a cosine to `end`.

    >>> [round(cosine(8, 2, 0.1)(step), 3) for step in (0, 1, 2, 5, 8)]
    [0.0, 0.5, 1.0, 0.55, 0.1]
    """

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        share = (step - warmup) / max(1, steps - warmup)
        return end + (1 - end) * max(0.0, 0.5 * (1.0 + math.cos(math.pi * share)))

    return factor


def linear(steps: int, warmup: int) -> Callable[[int], float]:
    """Linear rise over `warmup` steps, then a linear fall to 0.

    >>> [linear(10, 2)(step) for step in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    def factor(step: int) -> float:
        return step / max(1, warmup) if step < warmup else max(0.0, (steps - step) / max(1, steps - warmup))

    return factor


def decayed(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Groups of trained parameters for an optimiser: matrices decay; vectors (biases, norms, gains) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


class _Processes:
    """A model as the processes of a launch train it: whole in each, or sharded."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self.launch: Launch = launched()
        self.model = model
        if self.launch.sharded:
            shard(model, optimiser, self.launch)
        elif self.launch.count > 1:
            self.model = self.launch.accelerator.prepare_model(model)

    def backward(self, losses: Losses, loop: Loop, step: int, seed: int) -> dict[str, Tensor]:
        """The gradients of a step, and its losses: means over all parts, and over the processes."""
        launch = self.launch
        if loop.parts % launch.count:
            raise ValueError(f"{loop.parts} parts of a step cannot be shared evenly by {launch.count} processes")
        mine = range(launch.rank, loop.parts, launch.count)
        sums: dict[str, Tensor] = {}
        for part in mine:
            torch.manual_seed((seed * _GOLDEN + step * loop.parts + part) % 2**63)
            with self._gradients(part == mine[-1]):
                with launch.precision():
                    terms = losses(self.model, step, part)
                total = torch.stack(list(terms.values())).sum()
                (total if len(mine) == 1 else total / len(mine)).backward()
            for name, term in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(term)) + term.detach()
        means = sums if len(mine) == 1 else {name: value / len(mine) for name, value in sums.items()}
        return {name: launch.mean(value) for name, value in means.items()}

    @contextmanager
    def _gradients(self, last: bool) -> Generator[None]:
        """Those of the last part are added up over the processes, with those of all parts before it."""
        if self.launch.sharded:
            cast(Any, self.model).set_requires_gradient_sync(last)
            yield
        elif self.launch.count > 1 and not last:
            with self.launch.accelerator.no_sync(self.model):
                yield
        else:
            yield


def _measure(model: nn.Module, measure: Measure, step: int, course: Course, launch: Launch) -> None:
    model.eval()
    with launch.precision():
        course.measured.append({"step": step, **measure(model, step)})
    let_go(model)
    model.train()


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.mean(row[name] for row in rows if name in row) for name in names}


@contextmanager
def _own_chance() -> Generator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
