"""`GuardCallback`: a guard as a callback of a transformers `Trainer`."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn
from transformers import TrainerCallback

from attnflow.audit.guards import Guard, guard


class GuardCallback(TrainerCallback):
    """Audit the first real batch of a `Trainer`: `Trainer(..., callbacks=[GuardCallback()])`; arguments as for `guard`.

    Attributes:
        guard: the guard of the last training run; None before it.
    """

    def __init__(self, every: int | None = None, **options: Any) -> None:
        signature(guard).bind(None, every, **options)  # a mistyped option is refused before training starts
        self.guard: Guard | None = None
        self._options: dict[str, Any] = {"every": every, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Put the guard on the model."""
        if model is None:
            raise ValueError("GuardCallback needs the model: pass it to a Trainer as one of its callbacks")
        if self.guard is not None:
            self.guard.remove()  # of a run that an error ended
        self.guard = guard(model, **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take it off, and print what was audited and at what cost."""
        if self.guard is not None:
            if getattr(state, "is_world_process_zero", True):
                print(self.guard)
            self.guard.remove()
