"""Where the values of a monitor go: a CSV file that grows by whole records, TensorBoard, W&B, or a function."""

from __future__ import annotations

import csv
import io
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast

from attnflow._core.errors import MissingExtra
from attnflow._core.files import write_atomically
from attnflow.geometry.summary import Quartiles
from attnflow.geometry.table import MatrixScores

COLUMNS: Final = ("step", "layer", "head", "tower", "kind", "symmetry", "directionality", "norm")
Log = Callable[[dict[str, float], int], object]

_LOG: Final = logging.getLogger(__name__)
_HEADER: Final = ",".join(COLUMNS) + "\n"


class RecordFile:
    """Scores by step, in the columns of `COLUMNS`; it survives a crash at any moment, and can be read at any time.

    A record has so many rows; a last one with fewer was cut off by a crash. Where training starts at a step, later
    records of the file are made again, so they are taken out; the file as it was is then kept with ".old" after its
    name. `ValueError` if it holds something else, such as records of another model.
    """

    def __init__(self, path: Path, rows: int, step: int) -> None:
        self._path = path
        self._rows = rows
        earlier: list[tuple[int, str]] = []
        if path.exists():
            text = path.read_bytes().decode(errors="replace")
            records = list(self._records(text))
            earlier = [(at, record) for at, record in records if at <= step]
            whole = _HEADER + "".join(record for _, record in earlier)
            if len(earlier) < len(records):
                old = path.with_name(path.name + ".old")
                shutil.copy2(path, old)
                _LOG.warning(
                    "%s held steps after %d, which are recorded again; it was kept as %s", path, step, old.name
                )
            if whole != text:
                _replace(path, whole)
        else:
            _replace(path, _HEADER)
        self.last = earlier[-1][0] if earlier else None

    def append(self, step: int, rows: Sequence[MatrixScores]) -> None:
        """Add a record, and return when it is on the disk."""
        assert len(rows) == self._rows
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            scores = (f"{value:.7g}" for value in (row.symmetry, row.directionality, row.norm))
            writer.writerow((step, row.layer, row.head, row.tower, row.kind, *scores))
        with open(self._path, "ab", buffering=0) as file:
            file.write(text.getvalue().encode())
            os.fsync(file.fileno())
        self.last = step

    def _records(self, text: str) -> Iterator[tuple[int, str]]:
        """Every step with its lines; a record cut off at the end is left out."""
        if _HEADER.startswith(text):
            return
        if not text.startswith(_HEADER):
            raise ValueError(f"{self._path} is not a record of geometry: its first line is not {_HEADER.strip()}")
        complete = text[: text.rfind("\n") + 1].removeprefix(_HEADER)
        lines = complete.splitlines(keepends=True)
        groups = [(at, "".join(group)) for at, group in groupby(lines, self._step)]
        for number, (at, record) in enumerate(groups):
            count = record.count("\n")
            if count == self._rows:
                yield at, record
            elif count > self._rows or number < len(groups) - 1:
                raise ValueError(
                    f"{self._path} has {count} rows for step {at} where this model gives {self._rows}: it records "
                    "another model or other options; record to another file"
                )

    def _step(self, line: str) -> int:
        step, _, _ = line.partition(",")
        if not step.isdecimal():
            raise ValueError(f"{self._path} is damaged: a line starts with {step[:20]!r} rather than a step")
        return int(step)


def _replace(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write(text.encode())


def log_to(target: object) -> Log:
    """The function that sends values by name, and their step, to a `SummaryWriter`, a W&B run, or such a function."""
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
    """To where a Trainer with these `TrainingArguments` reports, as far as we know how: TensorBoard and W&B."""
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
