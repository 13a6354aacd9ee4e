"""`monitor`: records the scores of a model while it trains, in a CSV file or with a function."""

from __future__ import annotations

import csv
import io
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from torch import distributed, nn

from attnflow._core import checks
from attnflow._core.files import write_atomically
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.geometry.published import Quartiles
from attnflow.geometry.score import Attention, layer_scores, layers_in_memory
from attnflow.geometry.scores import Mode, check_reading
from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.models.loaded import Loaded, split

COLUMNS: Final = ("step", "layer", "head", "tower", "kind", "symmetry", "directionality", "norm")
Log = Callable[[dict[str, float], int], object]

_LOG: Final = logging.getLogger(__name__)
_counting: Final = threading.RLock()
_HEADER: Final = ",".join(COLUMNS) + "\n"


def monitor(
    model: nn.Module | Loaded,
    path: str | os.PathLike[str] | None = None,
    every: int = 100,
    *,
    per_head: bool = False,
    gamma: float = 2.0,
    mode: Mode = "excess",
    attention: Attention = "self",
    log: Log | None = None,
) -> Monitor:
    """Score a model at the start of training, every few steps, and at the end.

    With transformers the handle is a callback, `Trainer(model, ..., callbacks=[monitor(model)])`: the file then starts
    at the step of the checkpoint that training resumes from. In your own loop, use it in a `with` block and call
    `step` after every optimiser step. With several processes, the first one records.

    Args:
        model: any model that `score` reads.
        path: CSV file with the columns step, layer, head, tower, kind, symmetry, directionality, norm. Each record is
            appended as a whole and flushed to disk. None for no file.
        every: number of steps between records.
        per_head: also write a row for every head (to the file only, as they are many).
        gamma: threshold of directionality.
        mode: definition of directionality, as in `score`.
        attention: which kinds of attention to score.
        log: a function log(values, step), called at every record with a dict of values by name, such as
            "geometry/symmetry" (the median over layers) and "geometry/symmetry/layer_3".

    Raises:
        UnsupportedArchitecture: the model has no attention of that kind.
        ValueError: an argument is out of range.

    Cost: one `score` of the model every `every` steps. BERT-base takes about 0.2 s on one CPU core.

    >>> block = nn.TransformerEncoderLayer(16, 4, 32)
    >>> with monitor(block, every=2) as handle:
    ...     steps = [handle.step() is not None for _ in range(4)]
    >>> steps
    [False, True, False, True]
    """
    check_reading(gamma, mode)
    module, _ = split(model)
    if log is not None and not callable(log):
        raise TypeError(f"log must be a function of values and step, got {type(log).__name__}")
    every = checks.integer("every", every, 1)
    return Monitor(module, None if path is None else Path(path), every, per_head, (gamma, mode), attention, log)


class Monitor(Handle):
    """The handle of `monitor`, which scores a model while it trains and does not change it.

    Attributes:
        scores: the latest `GeometryScores`, None before the first record.
        history: {step: values by name, as `log` gets them}, of the records since the start.
    """

    def __init__(
        self,
        model: nn.Module,
        path: Path | None,
        every: int,
        per_head: bool,
        reading: tuple[float, Mode],
        attention: Attention,
        log: Log | None,
    ) -> None:
        super().__init__(model)
        self.scores: GeometryScores | None = None
        self.history: dict[int, dict[str, float]] = {}
        self._path, self._every, self._per_head = path, every, per_head
        self._reading = reading
        self._attention: Attention = attention
        self._log = log
        self._layers = layers_in_memory(model, attention)
        self._read = self._parameters()
        self._file: RecordFile | None = None
        self._step: int | None = None  # None before the start
        self._last: int | None = None

    def results(self) -> Sequence[GeometryScores]:
        """The latest scores."""
        return () if self.scores is None else (self.scores,)

    def start(self, step: int = 0) -> None:
        """Start recording, with a first record if `step` is 0 or a step to record.

        A `with` block starts at step 0 automatically.

        Args:
            step: the number of steps done before training resumes. Later records in the file are replaced, as in a run
                without a break; the old file is kept with ".old" appended to its name.

        Raises:
            ValueError: the file has other content, such as records of another model.
        """
        self._step = checks.integer("step", step)
        self._last = None
        self.history.clear()
        if self._path is not None and _first_process():
            rows = sum(1 + self._per_head * layer.num_heads for layer in self._layers)
            self._file = RecordFile(self._path, rows, step)
            self._last = self._file.last
        if step % self._every == 0 and self._last != step:
            self.record()

    def step(self, step: int | None = None) -> GeometryScores | None:
        """Report a training step; the model is scored if the step is one to record.

        Args:
            step: the number of the step; by default one more than before.

        Returns:
            The scores, if this step was recorded.

        Raises:
            RuntimeError: the monitor was not started, or was removed.
        """
        if self._step is None:
            raise RuntimeError("call start() before the first step, or use the monitor in a with block")
        if not self.active:
            raise RuntimeError("this monitor was removed: call af.geometry.monitor again")
        with _counting:
            self._step = self._step + 1 if step is None else checks.integer("step", step)
            return self.record() if self._step % self._every == 0 else None

    def record(self) -> GeometryScores | None:
        """Score the model now, whatever the step; returns None in processes other than the first.

        Raises:
            ValueError: weights have become NaN or Inf.
            UnsupportedArchitecture: the model was sharded, or given adapters on queries or keys, since the last record.
        """
        if self._read != (now := self._parameters()):  # in every process, so that none waits for another
            self._layers, self._read = layers_in_memory(self.model, self._attention), now
        if not _first_process():
            return None
        rows: list[MatrixScores] = []
        for layer in self._layers:
            try:
                rows += layer_scores(layer, *self._reading, self._per_head)
            except ValueError as error:
                raise ValueError(f"step {self._step}, {layer.name}: {error}") from error
        step = self._step or 0
        self.scores = GeometryScores(f"step {step}", tuple(rows), *self._reading)
        if self._file is not None:
            self._file.append(step, rows)
        self.history[step] = values_of(rows)
        if self._log is not None:
            self._log(dict(self.history[step]), step)
        self._last = step
        return self.scores

    def __enter__(self) -> Monitor:
        super().__enter__()
        if self._step is None:
            self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if not any(raised) and self.active and self._last != self._step:
            self.record()
        super().__exit__(*raised)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: object) -> None:
        """Event of a Trainer: training starts or resumes."""
        del args, control, others
        if self.active:
            self.model, self._layers = model, layers_in_memory(model, self._attention)
            self._read = self._parameters()
            self.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: object) -> None:
        """Event of a Trainer: a step of the optimiser was made."""
        del args, control, others
        if self.active:
            self.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: object) -> None:
        """Event of a Trainer: training is over."""
        del args, control, others
        if self.active and self._last != state.global_step:
            self._step = state.global_step
            self.record()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _parameters(self) -> list[tuple[str, int]]:
        return [(name, id(parameter)) for name, parameter in self.model.named_parameters()]

    def _restore(self) -> None:
        self._file = None  # nothing of the model was changed

    def _summary(self) -> str:
        where = ", ".join(filter(None, (str(self._path or ""), "a log" if self._log else ""))) or "memory"
        state = "not started" if self._step is None else f"at step {self._step}"
        layers = plural(len(self._layers), "attention layer")
        return f"scores {layers} of {type(self.model).__name__} every {self._every} steps, recorded in {where}; {state}"


def _first_process() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


class RecordFile:
    """Scores by step, in the columns of `COLUMNS`; it survives a crash and can be read at any time.

    A cut-off last record is dropped. Resuming at a step removes later records and keeps the old file with ".old" after
    its name. `ValueError` for other content, such as records of another model.
    """

    def __init__(self, path: Path, rows: int, step: int) -> None:
        self._path = path
        self._rows = rows
        text = path.read_bytes().decode(errors="replace") if path.exists() else ""
        records = list(self._records(text))
        earlier = [(at, record) for at, record in records if at <= step]
        whole = _HEADER + "".join(record for _, record in earlier)
        if len(earlier) < len(records):
            old = path.with_name(path.name + ".old")
            shutil.copy2(path, old)
            _LOG.warning(
                "%s had steps after %d, which are recorded again; the old file was kept as %s", path, step, old.name
            )
        if whole != text:
            with write_atomically(path) as file:
                file.write(whole.encode())
        self.last = earlier[-1][0] if earlier else None

    def append(self, step: int, rows: Sequence[MatrixScores]) -> None:
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
                    f"{self._path} has {count} rows for step {at}, but this model gives {self._rows}: it records "
                    "another model or other options, so choose another file"
                )

    def _step(self, line: str) -> int:
        step, _, _ = line.partition(",")
        if not step.isdecimal():
            raise ValueError(f"{self._path} is damaged: a line starts with {step[:20]!r} rather than a step")
        return int(step)


def values_of(rows: Sequence[MatrixScores]) -> dict[str, float]:
    """Name the values: every layer's full matrix, and their median over layers."""
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
