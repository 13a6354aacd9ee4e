"""`Recorder`: the scores of a model while it trains, to a CSV file and to TensorBoard or Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from torch import distributed, nn

from attnflow._core import checks
from attnflow.geometry.factored import full_scores, head_scores
from attnflow.geometry.record_file import RecordFile
from attnflow.geometry.record_log import Log, log_to, logs_of_trainer, values_of
from attnflow.geometry.scores import Mode, check_reading
from attnflow.geometry.selected import Attention, selected
from attnflow.geometry.table import GeometryScores, MatrixScores, rows_of
from attnflow.models.live import LiveQueryKey


class Recorder:
    """Scores a model at the start of its training, every so many steps, and at the end.

    With transformers it is a callback, `Trainer(..., callbacks=[recorder])`: the file then starts at the step of the
    checkpoint that training resumes from, and the scores also go where `report_to` sends the losses, if that is
    TensorBoard (as a run "geometry" beside the Trainer's) or Weights & Biases. In a loop of your own call `start` once
    and `step` after every step of the optimiser. With several processes the first one records.

    Args:
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

    Attributes:
        scores: the last `GeometryScores`, None before the first.

    Cost: one `score` of the model every `every` steps. BERT-base takes about 0.2 s on one CPU core.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        every: int = 100,
        *,
        per_head: bool = False,
        gamma: float = 2.0,
        mode: Mode = "excess",
        attention: Attention = "self",
        log: object = None,
    ) -> None:
        check_reading(gamma, mode)
        if attention not in get_args(Attention):
            raise ValueError(f'attention must be "self", "cross" or "all", got {attention!r}')
        self.scores: GeometryScores | None = None
        self._path = None if path is None else Path(path)
        self._every = checks.integer("every", every, 1)
        self._per_head = per_head
        self._gamma = gamma
        self._mode: Mode = mode
        self._attention: Attention = attention
        self._given = log is not None
        self._logs: list[Log] = [] if log is None else [log_to(log)]
        self._found: list[LiveQueryKey] = []
        self._file: RecordFile | None = None
        self._step = 0
        self._last: int | None = None

    def start(self, model: nn.Module, step: int = 0) -> None:
        """Begin, and record the weights as they are: at step 0, or at a later step of those to record.

        Args:
            model: any model that `score` reads.
            step: steps done so far, where training resumes. Later records in the file are made again, so that the file
                becomes that of a run without a break; as it was, it is kept with ".old" after its name.

        Raises:
            UnsupportedArchitecture: the model has no attention of the kind.
            ValueError: the file holds something else, such as records of another model.
        """
        self._found = selected(model, self._attention)
        self._step = checks.integer("step", step)
        self._last = None
        if self._path is not None and _first_process():
            rows = sum(1 + self._per_head * live.num_heads for live in self._found)
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
            RuntimeError: `start` was not called.
        """
        if not self._found:
            raise RuntimeError("call recorder.start(model) before the first step")
        self._step = self._step + 1 if step is None else checks.integer("step", step)
        return self.record() if self._step % self._every == 0 else None

    def record(self) -> GeometryScores | None:
        """Score the model now, whatever the step; None in processes other than the first.

        Raises:
            ValueError: weights have become NaN or Inf.
        """
        if not _first_process():
            return None
        rows = [row for live in self._found for row in self._rows(live)]
        self.scores = GeometryScores(f"step {self._step}", tuple(rows), self._gamma, self._mode)
        if self._file is not None:
            self._file.append(self._step, rows)
        if self._logs:
            values = values_of(rows)
            for log in self._logs:
                log(values, self._step)
        self._last = self._step
        return self.scores

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: object) -> None:
        """Event of a Trainer: training starts or resumes."""
        del control, others
        if not self._given:
            self._logs = logs_of_trainer(args) if _first_process() else []
        self.start(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: object) -> None:
        """Event of a Trainer: a step of the optimiser was made."""
        del args, control, others
        self.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: object) -> None:
        """Event of a Trainer: training is over."""
        del args, control, others
        if self._last != state.global_step:
            self._step = state.global_step
            self.record()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The other events of a Trainer, of this version of transformers or the next, do nothing."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _rows(self, live: LiveQueryKey) -> list[MatrixScores]:
        weights = live.read()
        given = (weights.query, weights.key, weights.num_heads, weights.num_kv_heads, self._gamma, self._mode)
        try:
            rows = rows_of(weights, full_scores(*given))
            return rows + rows_of(weights, head_scores(*given)) if self._per_head else rows
        except ValueError as error:
            raise ValueError(f"step {self._step}, {live.name}: {error}") from error


def _first_process() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _nothing(*_: object, **__: object) -> None:
    return None
