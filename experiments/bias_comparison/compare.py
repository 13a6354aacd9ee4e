"""Guidance-only training against its controls at equal parameters, run by run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn import functional

from attnflow.bias.config import Placement
from attnflow.bias.hf.trainer import trainer
from attnflow.bias.packing import Packed
from attnflow.bias.run import TrainingConfig
from attnflow.models import load_model
from experiments.bias_comparison.arms import Arm, arms_of, count_trained, fitted
from experiments.bias_comparison.shuffle import shuffled
from experiments.bias_comparison.text import Split, split_text
from experiments.records import describe, read, write

ARMS: Final = ("guidance", "key", "lowrank", "lora")
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


SCALES: Final = {"tiny": tiny, "small": small}


@dataclass(frozen=True)
class Run:
    """One trained arm.

    Attributes:
        arm: what was trained.
        rate: peak learning rate.
        seed: of initialisation and data.
        curve: step -> loss of each test row.
        validation: loss of each validation row at the end.
        shuffles: way of shuffling -> loss of each test row with the trained bias shuffled.
        log: what `Trainer` logged.
        seconds: wall time.
    """

    arm: Arm
    rate: float
    seed: int
    curve: dict[int, list[float]]
    validation: list[float]
    shuffles: dict[str, list[float]]
    log: list[dict[str, float]]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "arm": self.arm.to_dict()}


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


def run_one(model: Any, arm: Arm, rate: float, seed: int, config: Comparison, split: Split, folder: Path) -> Run:
    """Train one arm and measure it; the model is left as it was."""
    began, curve = time.perf_counter(), dict[int, list[float]]()
    settings = replace(config.training, learning_rate=rate, seed=seed)
    with fitted(model, arm, seed) as trained:
        count = count_trained(trained)
        if count != arm.parameters:
            raise AssertionError(f"{arm.name} trains {count} parameters, counted {arm.parameters}")

        def held_out(now: nn.Module) -> Mapping[str, float]:
            losses = row_losses(now, split.test)
            curve[int(made.state.global_step)] = losses
            return {"held_out": sum(losses) / len(losses)}

        made = trainer(
            trained,
            split.training,
            settings,
            folder,
            probes=[held_out],
            disable_tqdm=True,
            logging_first_step=False,
            log_level="error",
        )
        made.callback_handler.callbacks = [
            each for each in made.callback_handler.callbacks if type(each).__name__ != "PrinterCallback"
        ]
        made.train()
        trained.eval()
        validation, shuffles = row_losses(trained, split.validation), dict[str, list[float]]()
        if arm.bias is not None and arm.bias.kind in SHUFFLED:
            for how in ("queries", "keys"):
                with shuffled(trained, how, seed):
                    shuffles[how] = row_losses(trained, split.test)
    log = list(made.state.log_history)
    return Run(arm, rate, seed, curve, validation, shuffles, log, time.perf_counter() - began)


def compare(config: Comparison, folder: Path, names: Sequence[str] = ARMS) -> None:
    """Run what is not there yet: for each arm every rate on the first seed, then the best rate on the other seeds."""
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(config.model, dtype=config.dtype)
    split = split_text(tokenizer, config.length, config.rows_per_work)
    arms = arms_of(model, config.hidden_dim, config.layers)
    about = {"config": config.to_dict(), "arms": {name: arm.to_dict() for name, arm in arms.items()}}
    describe(folder / "comparison.json", about, ("torch", "transformers", "peft", "attnflow"))
    if not (runs / "base.json").is_file():
        base = {"test": row_losses(model, split.test), "validation": row_losses(model, split.validation)}
        write(runs / "base.json", base)

    def once(name: str, rate: float, seed: int) -> Mapping[str, Any]:
        path = runs / f"{name}-{rate:g}-{seed}.json"
        if not path.is_file():
            done = run_one(model, arms[name], rate, seed, config, split, folder / "scratch")
            write(path, done.to_dict())
            final = sum(done.curve[config.training.steps]) / len(split.test)
            print(f"{path.stem}: held-out loss {final:.4f}, {done.seconds:.0f} s", file=sys.stderr, flush=True)
        return cast(Mapping[str, Any], read(path))

    for name in names:
        for rate in config.rates:
            once(name, rate, config.seeds[0])
    for seed in config.seeds[1:]:
        for name in names:
            tried = {rate: sum(once(name, rate, config.seeds[0])["validation"]) for rate in config.rates}
            once(name, min(tried, key=tried.__getitem__), seed)
