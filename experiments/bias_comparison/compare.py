"""Guidance-only training against its controls at equal parameters, run by run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.progress import Progress
from attnflow.bias.config import Placement
from attnflow.bias.hf.capture import strength
from attnflow.bias.packing import Drawn, Packed
from attnflow.bias.run import TrainingConfig
from attnflow.models import load_model
from experiments.bias_comparison.arms import Arm, arms_of, count_trained, fitted
from experiments.bias_comparison.shuffle import shuffled
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, Record, swept
from experiments.runner.text import Split, split_text
from experiments.runner.training import Loop, cosine, decayed, train

ARMS: Final = ("guidance", "key", "lowrank", "lora")
BASE: Final = Job("base")  # frozen
SHUFFLED: Final = ("guidance",)  # kinds whose trained bias is measured shuffled, too


@dataclass(frozen=True)
class Comparison:
    """One comparison. The defaults are the scale "tiny", ten minutes of two CPU cores.

    Attributes:
        model: as `af.models.load_model` takes it.
        dtype: of the frozen base; what is trained is float32.
        hidden_dim: of `guidance`; it sets the number of parameters of every arm.
        layers: with a bias.
        length: tokens of a row.
        rates: learning rates tried for every arm, on the first seed; the best on the validation rows is kept.
        seeds: of initialisation and of the order of rows.
        rows_per_work: held-out rows from each held-out work.
        training: all but the learning rate and the seed.
    """

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    hidden_dim: int = 64
    layers: Placement = "every_other"
    length: int = 256
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: tuple[int, ...] = (0, 1, 2)
    rows_per_work: int = 1
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            steps=16, batch_size=1, warmup=2, weight_decay=0.0, log_every=8, save_every=0, evaluate_every=0
        )
    )

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        return {**asdict(self), "training": self.training.to_dict()}


def tiny() -> Comparison:
    """Two CPU cores, about ten minutes of them."""
    return Comparison()


def small() -> Comparison:
    """For one GPU. The texts are the same; not run yet."""
    training = replace(tiny().training, steps=1000, batch_size=8, warmup=50, log_every=100)
    return replace(
        tiny(), length=1024, rows_per_work=8, rates=(3e-4, 1e-3, 3e-3, 1e-2), seeds=(0, 1, 2, 3, 4), training=training
    )


def row_losses(model: nn.Module, rows: Packed, batch: int = 4) -> list[float]:
    """Mean next-token loss of each row, in nats."""
    was_training, found = model.training, list[float]()
    model.eval()
    with torch.no_grad():
        # In parts of nearly equal size: shuffling queries needs two rows in each.
        for part in torch.arange(len(rows)).tensor_split(-(-len(rows) // batch)):
            inputs = rows[part.tolist()]
            labels = inputs.pop("labels")[:, 1:]
            logits = cast(Any, model)(**inputs, use_cache=False).logits[:, :-1].float()
            losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            kept = (labels != -100).sum(dim=1)
            found += (losses.view(labels.shape).sum(dim=1) / kept).tolist()
    model.train(was_training)
    return found


def run_one(
    model: Any, arm: Arm, rate: float, seed: int, config: Comparison, split: Split, folder: Path, progress: Progress
) -> dict[str, object]:
    """Train one arm and measure it; the model is left as it was.

    Returns:
        "curve": step -> loss of each test row; "validation": loss of each validation row at the end; "shuffles": way
        of shuffling -> loss of each test row with the trained bias shuffled; "log": losses, and |B| of each layer.
    """
    settings = config.training
    with fitted(model, arm, seed) as trained:
        count = count_trained(trained)
        if count != arm.parameters:
            raise AssertionError(f"{arm.name} trains {count} parameters, counted {arm.parameters}")
        for parameter in trained.parameters():
            if parameter.requires_grad:  # bfloat16 would lose every update below 0.4 % of a weight
                parameter.data = parameter.data.float()
        rows = Drawn(split.training, settings.steps * settings.batch_size * settings.accumulation, seed)

        def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
            first = (step * settings.accumulation + part) * settings.batch_size
            drawn = [rows[first + number] for number in range(settings.batch_size)]
            batch = {name: torch.stack([row[name] for row in drawn]) for name in drawn[0]}
            items = batch["labels"][:, 1:].ne(-100).sum()
            return {"loss": cast(Any, now)(**batch, use_cache=False, num_items_in_batch=items).loss}

        def measure(now: nn.Module, step: int) -> dict[str, object]:
            if step == 0:
                return {}  # that of the base
            sizes = strength(now, split.training[[0, 1]]) if arm.bias is not None else {}
            return {"test": row_losses(now, split.test), **{f"bias/layer_{layer}": b for layer, b in sizes.items()}}

        loop = Loop(
            settings.steps,
            rate,
            cosine(settings.steps, settings.warmup or 0),
            clip=settings.max_grad_norm,
            parts=settings.accumulation,
            log_every=settings.log_every or settings.steps,
            measure_every=settings.log_every or settings.steps,
            save_every=settings.log_every or settings.steps,
        )
        optimiser = torch.optim.AdamW(decayed(trained, settings.weight_decay), betas=settings.betas, fused=True)
        identity = {"arm": arm.to_dict(), "rate": rate, "training": settings.to_dict(), "model": config.model}
        course = train(
            trained, optimiser, losses, loop, folder, seed=seed, identity=identity, measure=measure, progress=progress
        )
        validation, shuffles = row_losses(trained, split.validation), dict[str, list[float]]()
        if arm.bias is not None and arm.bias.kind in SHUFFLED:
            for how in ("queries", "keys"):
                with shuffled(trained, how, seed):
                    shuffles[how] = row_losses(trained, split.test)
    curve = {str(entry["step"]): entry["test"] for entry in course.measured if "test" in entry}
    sizes = [{k: v for k, v in entry.items() if k != "test"} for entry in course.measured]
    return {
        "arm": arm.to_dict(),
        "curve": curve,
        "validation": validation,
        "shuffles": shuffles,
        "log": [*course.log, *sizes],
        "seconds": course.seconds,
    }


def setup(config: Comparison) -> Setup:
    """The base, then each arm with every rate on the first seed, then with its best rate on the other seeds."""
    model, tokenizer = load_model(config.model, dtype=config.dtype)
    split = split_text(tokenizer, config.length, config.rows_per_work)
    arms = arms_of(model, config.hidden_dim, config.layers)

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        if job == BASE:
            return {"test": row_losses(model, split.test), "validation": row_losses(model, split.validation)}
        rate, seed = cast(float, job.rate), cast(int, job.seed)
        return run_one(model, arms[job.arm], rate, seed, config, split, folder, progress)

    plan = swept(ARMS, config.rates, config.seeds, validation_loss)
    every = Plan((BASE, *plan.first), plan.then, 1 + plan.count)
    return Setup(every, run, {"arms": {name: arm.to_dict() for name, arm in arms.items()}})


def validation_loss(run: Record) -> float:
    """By which the learning rate of an arm is chosen."""
    return sum(run["validation"])
