"""`monitor`: the scores of a model while it trains, to a CSV file and to TensorBoard or Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed, nn

from attnflow._core import checks
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.geometry.records import Log, RecordFile, log_to, logs_of_trainer, values_of
from attnflow.geometry.score import Attention, layer_scores, layers_in_memory
from attnflow.geometry.scores import Mode, check_reading
from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.models.loaded import Loaded, split


def monitor(
    model: nn.Module | Loaded,
    path: str | os.PathLike[str] | None = None,
    every: int = 100,
    *,
    per_head: bool = False,
    gamma: float = 2.0,
    mode: Mode = "excess",
    attention: Attention = "self",
    log: object = None,
) -> Monitor:
    """Score a model at the start of its training, every so many steps, and at the end.

    With transformers the handle is a callback, `Trainer(model, ..., callbacks=[monitor(model)])`: the file then starts
    at the step of the checkpoint that training resumes from, and the scores also go where `report_to` sends the losses,
    if that is TensorBoard (as a run "geometry" beside the Trainer's) or Weights & Biases. In a loop of your own use it
    in a `with` block and call `step` after every step of the optimiser. With several processes the first one records.

    Args:
        model: any model that `score` reads.
        path: CSV file with the columns step, layer, head, tower, kind, symmetry, directionality, norm; appended to,
            each record whole, and flushed to the disk. None for no file.
        every: steps between records.
        per_head: a row for every head too (in the file only, as they are many).
        gamma: threshold of directionality.
        mode: reading of directionality.
        attention: which kinds of attention.
        log: where the values go besides the file: a TensorBoard `SummaryWriter`, a W&B run, or a function of a dict of
            values by name and the step. Names are such as "geometry/symmetry" (the median over layers) and
            "geometry/symmetry/layer_3". Under a Trainer, in place of its `report_to`.

    Raises:
        UnsupportedArchitecture: the model has no attention of the kind.
        ValueError: arguments out of range.

    Cost: one `score` of the model every `every` steps. BERT-base takes about 0.2 s on one CPU core.

    >>> block = nn.TransformerEncoderLayer(16, 4, 32)
    >>> with monitor(block, every=2) as handle:
    ...     steps = [handle.step() is not None for _ in range(4)]
    >>> steps
    [False, True, False, True]
    """
    check_reading(gamma, mode)
    module, _ = split(model)
    logs = None if log is None else [log_to(log)]
    every = checks.integer("every", every, 1)
    return Monitor(module, None if path is None else Path(path), every, per_head, (gamma, mode), attention, logs)


class Monitor(Handle):
    """Scores a model while it trains; made by `monitor`. The model itself is not changed.

    Attributes:
        scores: the last `GeometryScores`, None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        path: Path | None,
        every: int,
        per_head: bool,
        reading: tuple[float, Mode],
        attention: Attention,
        logs: list[Log] | None,
    ) -> None:
        super().__init__(model)
        self.scores: GeometryScores | None = None
        self._path, self._every, self._per_head = path, every, per_head
        self._reading = reading
        self._attention: Attention = attention
        self._own_logs, self._logs = logs is not None, logs or []
        self._layers = layers_in_memory(model, attention)
        self._file: RecordFile | None = None
        self._step: int | None = None  # None before the start
        self._last: int | None = None

    def start(self, step: int = 0) -> None:
        """Begin, and record the weights as they are: at step 0, or at a later step of those to record.

        A `with` block begins at step 0 by itself.

        Args:
            step: steps done so far, where training resumes. Later records in the file are made again, so that the file
                becomes that of a run without a break; as it was, it is kept with ".old" after its name.

        Raises:
            ValueError: the file holds something else, such as records of another model.
        """
        self._step = checks.integer("step", step)
        self._last = None
        if self._path is not None and _first_process():
            rows = sum(1 + self._per_head * layer.num_heads for layer in self._layers)
            self._file = RecordFile(self._path, rows, step)
            self._last = self._file.last
        if step % self._every == 0 and self._last != step:
            self.record()

    def step(self, step: int | None = None) -> GeometryScores | None:
        """Say that a step was made; every so many, the model is scored.

        Args:
            step: its number, for a loop that counts itself; otherwise one more than before.

        Returns:
            The scores, if this step was recorded.

        Raises:
            RuntimeError: it was not started, or was removed.
        """
        if self._step is None:
            raise RuntimeError("call start() before the first step, or use the monitor in a with block")
        if not self.active:
            raise RuntimeError("this monitor was removed; call af.geometry.monitor again")
        self._step = self._step + 1 if step is None else checks.integer("step", step)
        return self.record() if self._step % self._every == 0 else None

    def record(self) -> GeometryScores | None:
        """Score the model now, whatever the step; None in processes other than the first.

        Raises:
            ValueError: weights have become NaN or Inf.
        """
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
        if self._logs:
            values = values_of(rows)
            for log in self._logs:
                log(values, step)
        self._last = step
        return self.scores

    def __enter__(self) -> Monitor:
        super().__enter__()
        if self._step is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.active and self._last != self._step:
            self.record()
        super().__exit__(kind, error, trace)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: object) -> None:
        """Event of a Trainer: training starts or resumes."""
        del control, others
        if self.active:
            if not self._own_logs:
                self._logs = logs_of_trainer(args) if _first_process() else []
            self.model, self._layers = model, layers_in_memory(model, self._attention)
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
        """The other events of a Trainer, of this version of transformers or the next, do nothing."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _restore(self) -> None:
        self._file = None  # nothing of the model was changed

    def _summary(self) -> str:
        where = ", ".join(filter(None, (str(self._path or ""), "a log" if self._logs else ""))) or "memory"
        state = "not started" if self._step is None else f"at step {self._step}"
        layers = plural(len(self._layers), "attention layer")
        return f"scores of {layers} of {type(self.model).__name__} every {self._every} steps to {where}; {state}"


def _first_process() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _nothing(*_: object, **__: object) -> None:
    return None
