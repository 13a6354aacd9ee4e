"""Where a recorder's values go besides its file: TensorBoard, Weights & Biases, or a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from attnflow._core.errors import MissingExtra
from attnflow.geometry.summary import Quartiles
from attnflow.geometry.table import MatrixScores

Log = Callable[[dict[str, float], int], object]


def log_to(target: object) -> Log:
    """The function that sends values by name, and their step, to a target.

    Args:
        target: a `SummaryWriter`, a W&B run, or such a function.

    Raises:
        TypeError: none of these.
    """
    if hasattr(target, "add_scalar"):
        return partial(_log_to_tensorboard, target)
    log = getattr(target, "log", None)
    if callable(log):
        return cast(Log, log)
    if callable(target):
        return cast(Log, target)
    got = type(target).__name__
    raise TypeError(f"log must be a TensorBoard SummaryWriter, a W&B run or a function of values and step, got {got}")


def logs_of_trainer(args: Any) -> list[Log]:
    """To where a Trainer reports, as far as we know how: TensorBoard and W&B.

    Args:
        args: its `TrainingArguments`.
    """
    reports = cast(Sequence[str], args.report_to or ())
    logs: list[Log] = []
    if "tensorboard" in reports:
        folder = os.getenv("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir, "runs")
        # A run of its own: of two files that grow in one run, TensorBoard may read the newer one only.
        logs.append(log_to(_summary_writer()(log_dir=str(Path(folder).expanduser() / "geometry"))))
    if "wandb" in reports:
        logs.append(_log_to_wandb)
    return logs


def values_of(rows: Sequence[MatrixScores]) -> dict[str, float]:
    """Values by name: of every layer's full matrix, and their median over the layers."""
    values: dict[str, float] = {}
    for score in ("symmetry", "directionality"):
        layers: dict[str, dict[str, float]] = {}
        for row in rows:
            if row.head == "all":
                stem = "/".join(filter(None, ("geometry", row.tower, "cross" if row.kind == "cross" else "", score)))
                layers.setdefault(stem, {})[f"{stem}/layer_{row.layer}"] = getattr(row, score)
        for stem, named in layers.items():
            values |= {stem: Quartiles.of(list(named.values())).median, **named}
    return values


def _summary_writer() -> Callable[..., object]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        try:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtra("tensorboard", "study", 'report_to="tensorboard"') from error
    return SummaryWriter


def _log_to_tensorboard(writer: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)
    writer.flush()  # records are rare, and a crash should not take the last ones


def _log_to_wandb(values: Mapping[str, float], step: int) -> None:
    # The Trainer's own values have this axis; W&B refuses a step below one that it has seen.
    import wandb  # pyright: ignore[reportMissingImports]

    wandb.log({**values, "train/global_step": step})
