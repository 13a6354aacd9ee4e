"""One training run: its settings, and the folder that keeps them, so that a run goes on as what it was."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal, cast

from attnflow._core.checks import integer
from attnflow.bias.checkpoints import newest, step_of
from attnflow.bias.config import BiasConfig

SETTINGS: Final = "settings.json"
CHECKPOINTS: Final = "checkpoints"
_NUMBERS: Final = ("learning_rate", "weight_decay", "max_grad_norm")


@dataclass(frozen=True)
class TrainingConfig:
    """How to train. The paper names AdamW, a cosine, 1000 warm-up steps of 50,000, 1024 rows of 2048 tokens (daa, sec.
    4.3); rates, betas, decay and clipping it does not. All defaults are ours, for small models on small machines.

    Attributes:
        steps: optimiser steps.
        batch_size: rows of each process and backward pass.
        accumulation: backward passes of a step.
        learning_rate: peak; for a bias alone. Continued pretraining of a whole model wants far less, such as 2e-5.
        warmup: steps over which the rate rises from 0, by default a twentieth of all; then a cosine takes it to 0.
        betas: of AdamW.
        weight_decay: of matrices; biases, norms and gains have none.
        max_grad_norm: gradients are clipped to it.
        log_every: steps between two entries of the log: loss, rate, and |B| of each layer. By default a tenth of the
            steps, at most 10.
        save_every: steps between two checkpoints, a multiple of `log_every`; 0 for none. By default a twentieth of the
            steps, at least 10.
        evaluate_every: steps between two evaluations of the held-out rows; 0 for at the end only. By default a tenth of
            the steps, at least 50: an evaluation costs as much as a few steps.
        held_out_rows: of `train`: rows of held-out text that are evaluated, at most.
        seed: of the order of rows and of dropout.

    Raises:
        ValueError, TypeError: a setting out of range.
    """

    steps: int = 1000
    batch_size: int = 8
    accumulation: int = 1
    learning_rate: float = 1e-3
    warmup: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    log_every: int | None = None
    save_every: int | None = None
    evaluate_every: int | None = None
    held_out_rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "held_out_rows"):
            integer(name, getattr(self, name), minimum=1)
        integer("seed", self.seed)
        if self.warmup is not None:
            integer("warmup", self.warmup, maximum=self.steps)
        log = max(1, min(10, self.steps // 10)) if self.log_every is None else integer("log_every", self.log_every, 1)
        defaults = {
            "log_every": log,
            "save_every": max(10, self.steps // 20),
            "evaluate_every": max(50, self.steps // 10),
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            value = -(-default // log) * log if value is None else integer(name, value)
            object.__setattr__(self, name, value)  # what "by default" means is in the settings of a run
        if cast(int, self.save_every) % log:
            # The log averages the loss since its last entry, which a checkpoint between two entries would cut in two.
            raise ValueError(f"save_every must be a multiple of log_every = {log}, got {self.save_every}")
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, got {self.betas}")
        for name, value in [(name, getattr(self, name)) for name in _NUMBERS] + [
            ("betas", beta) for beta in self.betas
        ]:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.weight_decay < 0 or self.max_grad_norm <= 0:
            got = f"got {self.weight_decay} and {self.max_grad_norm}"
            raise ValueError(f"weight_decay must be at least 0 and max_grad_norm positive, {got}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        return {**asdict(self), "betas": list(self.betas)}


def run_settings(
    config: TrainingConfig, configs: Sequence[BiasConfig], train: Literal["guidance", "all"], length: int
) -> dict[str, Any]:
    """What is known of a run before its model and its text are loaded."""
    return {
        "training": config.to_dict(),
        "bias": [one.to_dict() for one in configs],
        "train": train,
        "length": length,
    }


def check_folder(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that cannot be written, or holds another run: a run never goes on as a different one.

    Raises:
        ValueError: other settings, each by its name with both values.
        NotADirectoryError, PermissionError: there can be no such folder.
    """
    place = Path(folder)
    around = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not around.is_dir():
        raise NotADirectoryError(f"{around} is a file; results need a folder: choose another")
    if not os.access(around, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write to {around}; choose another folder")
    if not (place / SETTINGS).is_file():
        return
    try:
        theirs = _flat(json.loads((place / SETTINGS).read_text(encoding="utf-8")))
    except ValueError as error:
        reason = f"{place / SETTINGS}, the settings of the run in that folder, is not JSON: {error}"
        raise ValueError(f"{reason}; choose another folder, or delete this one") from error
    ours = _flat(json.loads(json.dumps(settings)))
    if theirs.get("base.sha256") == ours.get("base.sha256"):  # the same weights, wherever they lie
        ours["base.name"] = theirs.get("base.name")
    top = {name.partition(".")[0] for name in ours}
    names = [name for name in dict.fromkeys((*theirs, *ours)) if name.partition(".")[0] in top]
    other = [
        f"{name} was {theirs.get(name, 'not set')} and is {ours.get(name, 'not set')}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
    if other:
        raise ValueError(
            f"{place} holds a run with other settings: {'; '.join(other)}. Go on with the settings that it had, or "
            "choose another folder"
        )


def last_checkpoint(folder: str | Path) -> int | None:
    """The step from which the same call would go on, or None."""
    path = newest(Path(folder) / CHECKPOINTS, contents=False)
    return None if path is None else step_of(path)


def _flat(values: object, name: str = "") -> dict[str, object]:
    """Nested settings as one level: "training.steps", "bias.0.hidden_dim"."""
    items: list[tuple[object, object]] = []
    if isinstance(values, Mapping):
        items = list(values.items())
    elif isinstance(values, list) and any(isinstance(one, Mapping) for one in values):
        items = list(enumerate(values))
    if not items:
        return {name: values}
    flat: dict[str, object] = {}
    for key, value in items:
        flat |= _flat(value, f"{name}.{key}" if name else str(key))
    return flat
