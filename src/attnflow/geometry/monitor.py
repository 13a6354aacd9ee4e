"""`monitor`: records the scores of a model while it trains, in memory, in a Trainer's log, or with a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import distributed, nn

from attnflow._core import checks
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.geometry.published import Quartiles
from attnflow.geometry.score import Attention, layer_scores, layers_in_memory
from attnflow.geometry.scores import Mode, check_reading
from attnflow.geometry.table import GeometryScores, MatrixScores
from attnflow.models.subject import Loaded, Subject

Log = Callable[[dict[str, float], int], object]

_counting: Final = threading.RLock()


def monitor(
    model: nn.Module | Loaded,
    every: int = 100,
    *,
    per_head: bool = False,
    gamma: float = 2.0,
    mode: Mode = "excess",
    attention: Attention = "self",
    log: Log | None = None,
) -> Monitor:
    """Score a model at the start of training, every few steps, and at the end.

    In your own loop, use it in a `with` block and call `step` after every optimiser step. With transformers, pass its
    callback, `Trainer(model, ..., callbacks=[handle.callback()])`: the records then stand in the Trainer's log, which
    every checkpoint holds, and go on where training resumes. With several processes, the first one records; if they
    share the weights (FSDP2, tensor parallelism), each of them reports its steps.

    It scores weights as stored, `score(model, fold=False)`, without a pass of the model.

    Args:
        model: any model that `score` reads.
        every: number of steps between records.
        per_head: whether to score every head as well, for `scores`.
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
    module = Subject.of(model).model
    if log is not None and not callable(log):
        raise TypeError(f"log must be a function of values and step, got {type(log).__name__}")
    return Monitor(module, checks.integer("every", every, 1), per_head, (gamma, mode), attention, log)


class Monitor(Handle):
    """The handle of `monitor`, which scores a model while it trains and does not change it.

    Attributes:
        scores: the latest `GeometryScores`, None before the first record.
        history: {step: values by name, as `log` gets them}, of the records since the start.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        per_head: bool,
        reading: tuple[float, Mode],
        attention: Attention,
        log: Log | None,
    ) -> None:
        super().__init__(model)
        self.scores: GeometryScores | None = None
        self.history: dict[int, dict[str, float]] = {}
        self._every, self._per_head, self._reading, self._log = every, per_head, reading, log
        self._attention: Attention = attention
        self._layers = layers_in_memory(model, attention)
        self._read = self._parameters()
        self._step: int | None = None  # None before the start
        self._last: int | None = None  # step of the last record in this run, also of processes that keep none

    def results(self) -> Sequence[GeometryScores]:
        """The latest scores."""
        return () if self.scores is None else (self.scores,)

    def start(self, step: int = 0) -> None:
        """Start recording after some steps, with a first record if `step` is 0 or a step to record.

        A `with` block starts at step 0 automatically.
        """
        self._step = checks.integer("step", step)
        self.history = {at: values for at, values in self.history.items() if at < step}
        if step % self._every == 0:
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
        subject, several = Subject(self.model), distributed.is_available() and distributed.is_initialized()
        rows = subject.on_every_rank(
            "record() of a geometry monitor", lambda _: self._rows(several and not subject.sharded_by)
        )
        step = self._last = self._step or 0
        if several and distributed.get_rank() != 0:
            return None
        self.scores = GeometryScores(f"step {step}", tuple(rows), *self._reading)
        self.history[step] = values_of(rows)
        if self._log is not None:
            self._log(dict(self.history[step]), step)
        return self.scores

    def _rows(self, alone: bool) -> list[MatrixScores]:
        """Score the layers: in every process that holds parts of the weights, else in the first `alone`."""
        if self._read != (now := self._parameters()):  # in every process, so that none waits for another
            self._layers, self._read = layers_in_memory(self.model, self._attention), now
        rows: list[MatrixScores] = []
        for layer in [] if alone and distributed.get_rank() != 0 else self._layers:
            try:
                rows += layer_scores(layer, *self._reading, self._per_head)
            except ValueError as error:
                raise ValueError(f"step {self._step}, {layer.name}: {error}") from error
        return rows

    @property
    def recorded(self) -> bool:
        """Whether this step was recorded; all processes agree, as those that share weights record together."""
        return self._step in self.history or self._step == self._last

    def callback(self) -> Any:
        """Make the callback for a Trainer of transformers, which starts, counts steps and records the end by itself.

        Records are appended to the Trainer's `state.log_history`, which its checkpoints hold.
        """
        from attnflow.geometry.hf import MonitorCallback

        return MonitorCallback(self)

    def __enter__(self) -> Monitor:
        super().__enter__()
        if self._step is None:
            self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if not any(raised) and self.active and not self.recorded:
            self.record()
        super().__exit__(*raised)

    def _parameters(self) -> list[tuple[str, int]]:
        return [(name, id(parameter)) for name, parameter in self.model.named_parameters()]

    def _restore(self) -> None:
        """Nothing of the model was changed."""

    def _summary(self) -> str:
        state = "not started" if self._step is None else f"at step {self._step}"
        layers = plural(len(self._layers), "attention layer")
        return f"scores {layers} of {self.kind} every {self._every} steps; {state}"


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
