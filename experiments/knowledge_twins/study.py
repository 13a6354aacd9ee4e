"""The settings of the study, and one run of it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

import attnflow as af
from attnflow._core.progress import Progress
from attnflow.knowledge import Retrieval
from experiments.knowledge_twins.models import Arm, build, sizes
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, choosing_loss, swept
from experiments.runner.packing import Drawn
from experiments.runner.text import load_text
from experiments.runner.training import Loop, cosine, decayed, train

_EVALUATED: Final = 16  # rows of a pass
_END: Final = 0.1  # of the peak rate


@dataclass(frozen=True)
class Schedule:
    text: str = "shakespeare"  # "shakespeare", or a data set of the hub, which is streamed
    # how many word pieces are learned from Shakespeare (259: the bytes), or the name of one of the hub
    tokenizer: int | str = 259
    rows: int = 0  # of a data set, for training; those of Shakespeare are what they are
    held_out: int = 64  # rows for the results
    length: int = 64  # tokens of a row
    # entries per token that models with a base read after training, beside all of them
    read: tuple[int, ...] = (8, 32, 128)
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)  # learning rates
    choosing: int = 2  # how many seeds choose one of them for each arm
    steps: int = 2400  # of the optimiser
    warmup: int = 50  # steps; the rate then falls as a cosine to a tenth
    batch_size: int = 8  # rows of a forward pass
    parts: int = 1  # forward passes of a step
    decay: float = 0.01  # of matrices
    measure_every: int = 200  # steps
    save_every: int = 400  # steps


def setup(plan: Schedule, arms: Mapping[str, Arm], seeds: Sequence[int]) -> Setup:
    """A run for each arm: every rate with the seeds that choose one, then the best rate with the others."""
    text = load_text(plan.text, plan.tokenizer, plan.length, plan.rows, plan.held_out)
    vocabulary = len(text.tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        arm, seed = arms[job.arm], cast(int, job.seed)
        model: Any = build(arm, vocabulary, plan.length, seed).to(device)
        drawn = Drawn(text.rows, plan.steps * plan.parts * plan.batch_size, seed)

        def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
            start = (step * plan.parts + part) * plan.batch_size
            tokens = torch.stack([drawn[start + i]["input_ids"] for i in range(plan.batch_size)])
            return {"loss": token_loss(now, tokens.to(device))}

        def held(now: nn.Module, tokens: Tensor) -> float:
            return held_out(now, tokens.to(device))

        def measure(now: nn.Module, step: int) -> dict[str, object]:
            more = {"choosing": held(now, text.choosing)} if step == plan.steps else {}
            return {"held_out": held(now, text.results), **more}

        loop = Loop(
            plan.steps,
            cast(float, job.rate),
            cosine(plan.steps, plan.warmup, _END),
            parts=plan.parts,
            log_every=plan.measure_every,
            measure_every=plan.measure_every,
            save_every=plan.save_every,
        )
        optimiser = torch.optim.AdamW(decayed(model, plan.decay), betas=(0.9, 0.99), fused=True)
        identity = {"arm": job.arm, "rate": job.rate, "steps": plan.steps, **sizes(arm, vocabulary, plan.length)}
        course = train(
            model, optimiser, losses, loop, folder, seed=seed, identity=identity, measure=measure, progress=progress
        )
        said = {"log": course.log, "measured": course.measured, "seconds": course.seconds}
        return {**said, **_use(model, text.results.to(device), plan.read)} if arm.shared else said

    about = {
        "vocabulary": vocabulary,
        "training_rows": len(cast(Any, text.rows)),
        "sizes": {name: sizes(arm, vocabulary, plan.length) for name, arm in arms.items()},
    }
    return Setup(swept(list(arms), plan.rates, seeds, choosing_loss, plan.choosing), run, about)


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Nats per token of rows, each token but the first predicted from those before it."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@torch.no_grad()
def held_out(model: nn.Module, tokens: Tensor) -> float:
    parts = tokens.split(_EVALUATED)
    return sum(float(token_loss(model, some)) * len(some) for some in parts) / len(tokens)


@contextmanager
def reading(model: Any, count: int | None) -> Generator[None]:
    """The layers read the best entries alone, so many for each token; None: all."""
    layers = model.readers()
    before = [layer.retrieval for layer in layers]
    for layer in layers:
        layer.retrieval = None if count is None else Retrieval(k=count, search="exact")
    try:
        yield
    finally:
        for layer, retrieval in zip(layers, before, strict=True):
            layer.retrieval = retrieval


def _use(model: Any, tokens: Tensor, counts: Sequence[int]) -> dict[str, object]:
    """Held-out loss by how many entries are read, "all" of them or the best; and how many of them are active."""
    total = model.knowledge.num_entries
    found: dict[str, float] = {}
    for count in (*(count for count in counts if count < total), None):
        with reading(model, count):
            found["all" if count is None else str(count)] = held_out(model, tokens)
    with reading(model, None), torch.no_grad(), af.knowledge.activity(model) as seen:
        model(input_ids=tokens[:_EVALUATED], use_cache=False)
    report = seen.report()
    active = [layer.mean / total for layer in report.layers]
    return {"read": found, "active": active, "dead": len(report.dead) / total}
