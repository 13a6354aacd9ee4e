"""The training loop of all experiments: killed at any step and started again, it goes on as if it had not been."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnflow._core.files import seal, unseal
from attnflow._core.progress import Progress
from attnflow.bias.checkpoints import about, newest, rotate

Losses = Callable[[nn.Module, int, int], Mapping[str, Tensor]]
Measure = Callable[[nn.Module, int], Mapping[str, object]]
Observe = Callable[[nn.Module, int], object]

_KEPT: Final = 2  # checkpoints of a run
_GOLDEN: Final = 0x9E3779B97F4A7C15  # neighbouring (seed, step) give unlike generators


class Diverged(ValueError):
    """A loss or a gradient is NaN or infinite; nothing of that step is saved."""


@dataclass(frozen=True)
class Loop:
    """How long, and what is written when.

    Attributes:
        steps: of the optimiser.
        rate: peak learning rate.
        schedule: step from 0 -> factor of the rate.
        clip: norm that gradients are clipped to.
        parts: forward and backward passes of a step, each of its own data; several processes share them.
        log_every: steps between two entries of the log, means of the losses since the last one.
        measure_every: steps between two measurements; also made before the first step and after the last one. 0: only
            then.
        save_every: steps between two checkpoints; 0 for none. One more follows the last step, if there was one before.
    """

    steps: int
    rate: float
    schedule: Callable[[int], float]
    clip: float = 1.0
    parts: int = 1
    log_every: int = 10
    measure_every: int = 0
    save_every: int = 100


@dataclass
class Course:
    """How a run went.

    Attributes:
        log: mean losses, every so many steps.
        measured: what was measured, each with its "step".
        tensors: what `measure` and `observe` have put there.
        seconds: of training and measuring, pauses not counted.
    """

    log: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    measured: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    seconds: float = 0.0


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
    the data of a step do not depend on how many there are.

    Args:
        model: whose trained parameters and buffers are saved.
        optimiser: of those parameters; its learning rates are set here.
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

    Raises:
        Diverged: a loss or gradient is NaN or infinite.
        ValueError: the folder holds a run with other settings, or the launcher shards the model.
    """
    course = Course() if course is None else course
    identity = json.loads(json.dumps({**identity, "seed": seed}))
    processes = _Processes(model, optimiser)
    done, pending = _restore(folder, identity, processes, course, generator)
    trained = [p for p in model.parameters() if p.requires_grad]
    began = time.perf_counter() - course.seconds
    with _own_chance():
        model.train()
        if done == 0 and measure is not None:
            _measure(model, measure, 0, course)
        for step in range(done, loop.steps):
            for group in optimiser.param_groups:
                group["lr"] = loop.rate * loop.schedule(step)
            optimiser.zero_grad()
            terms = processes.backward(losses, loop, step, seed)
            norm = nn.utils.clip_grad_norm_(trained, loop.clip)
            numbers = {name: value.item() for name, value in terms.items()}
            if not bool(torch.stack(list(terms.values())).sum().isfinite() & norm.isfinite()):
                said = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
                raise Diverged(
                    f"seed {seed}, step {step + 1}: {said}, norm of the gradients {norm.item():g}; not saved"
                )
            if observe is not None:
                observe(model, step)
            optimiser.step()
            pending.append(numbers)
            now = step + 1
            last = now == loop.steps
            if now % loop.log_every == 0 or last:
                course.log.append({"step": float(now), **_means(pending)})
                pending.clear()
            if measure is not None and (last or (loop.measure_every and now % loop.measure_every == 0)):
                _measure(model, measure, now, course)
            course.seconds = time.perf_counter() - began
            if loop.save_every and (now % loop.save_every == 0 or (last and now > loop.save_every)):
                processes.save(folder, now, identity, course, pending, generator)
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
    """The processes of a run: one, or those that `accelerate launch` started."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self.model, self.optimiser, self.plain = model, optimiser, model
        self.rank, self.count = 0, int(os.environ.get("WORLD_SIZE", "1"))
        self._accelerator: Any = None
        if self.count > 1:
            from accelerate import Accelerator
            from accelerate.utils import DistributedType

            self._accelerator = Accelerator()
            kind, count = self._accelerator.distributed_type, self._accelerator.num_processes
            if count != self.count:  # accelerate may start independent runs, and say nothing
                raise ValueError(f"{self.count} processes were launched, and accelerate sees {count}")
            if kind not in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
                raise ValueError(f"this loop runs whole models side by side (DDP), not {kind}; use af.bias.train")
            self.rank = self._accelerator.process_index
            self.model = self._accelerator.prepare_model(model)

    def backward(self, losses: Losses, loop: Loop, step: int, seed: int) -> dict[str, Tensor]:
        """The gradients of a step, and its losses: means over all parts, and over the processes."""
        if loop.parts % self.count:
            raise ValueError(f"{loop.parts} parts of a step cannot be shared evenly by {self.count} processes")
        mine = range(self.rank, loop.parts, self.count)
        sums: dict[str, Tensor] = {}
        for part in mine:
            torch.manual_seed((seed * _GOLDEN + step * loop.parts + part) % 2**63)
            waits = self._accelerator is not None and part != mine[-1]
            with self._accelerator.no_sync(self.model) if waits else nullcontext():
                terms = losses(self.model, step, part)
                total = torch.stack(list(terms.values())).sum()
                (total if len(mine) == 1 else total / len(mine)).backward()
            for name, term in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(term)) + term.detach()
        means = sums if len(mine) == 1 else {name: value / len(mine) for name, value in sums.items()}
        if self._accelerator is None:
            return means
        return {name: self._accelerator.reduce(value, "mean") for name, value in means.items()}

    def save(
        self,
        folder: Path,
        step: int,
        identity: Mapping[str, object],
        course: Course,
        pending: Sequence[Mapping[str, float]],
        generator: torch.Generator | None,
    ) -> None:
        """A checkpoint, complete once it says so."""
        if self.rank == 0:
            place = folder / f"checkpoint-{step}"
            unseal(place)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            save_file(_state(self.plain), place / "model.safetensors")
            if course.tensors:
                save_file({name: t.contiguous() for name, t in course.tensors.items()}, place / "kept.safetensors")
            chance = None if generator is None else generator.get_state()
            torch.save({"optimiser": self.optimiser.state_dict(), "generator": chance}, place / "optimiser.pt")
            held = {
                "log": course.log,
                "measured": course.measured,
                "seconds": course.seconds,
                "pending": list(pending),
            }
            (place / "course.json").write_text(json.dumps(held), encoding="utf-8")
            seal(place, {"resumable": True, "step": step, "identity": identity})
            rotate(folder, _KEPT, None)
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()


def _restore(
    folder: Path,
    identity: Mapping[str, object],
    processes: _Processes,
    course: Course,
    generator: torch.Generator | None,
) -> tuple[int, list[dict[str, float]]]:
    """(steps done, losses since the last entry of the log)."""
    place = newest(folder)
    if place is None:
        return 0, []
    said = about(place, contents=False)
    if said["identity"] != identity:
        differ = sorted(key for key in {*identity, *said["identity"]} if identity.get(key) != said["identity"].get(key))
        raise ValueError(f"{place} holds a run with other settings ({', '.join(differ)}): choose another folder")
    saved, now = load_file(place / "model.safetensors"), _state(processes.plain)
    if saved.keys() != now.keys():
        raise ValueError(f"{place} holds {sorted(saved.keys() ^ now.keys())[:3]}, which this run does not train")
    with torch.no_grad():
        for name, tensor in now.items():
            tensor.copy_(saved[name])
    state: dict[str, Any] = torch.load(place / "optimiser.pt", weights_only=True, map_location="cpu")
    processes.optimiser.load_state_dict(state["optimiser"])
    if generator is not None:
        generator.set_state(state["generator"])
    held = json.loads((place / "course.json").read_text(encoding="utf-8"))
    course.log, course.measured, course.seconds = held["log"], held["measured"], held["seconds"]
    if (place / "kept.safetensors").is_file():
        course.tensors.update(load_file(place / "kept.safetensors"))
    return int(said["step"]), held["pending"]


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: trained parameters, each once, and buffers that are saved."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    saved = model.state_dict(keep_vars=True)
    return trained | {name: b for name, b in model.named_buffers() if name in saved}


def _measure(model: nn.Module, measure: Measure, step: int, course: Course) -> None:
    model.eval()
    course.measured.append({"step": step, **measure(model, step)})
    model.train()


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.mean(row[name] for row in rows if name in row) for name in names}


@contextmanager
def _own_chance() -> Generator[None]:
    """Afterwards torch's generators are as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
