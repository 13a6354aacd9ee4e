"""`GuardCallback`: a guard inside a transformers `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback

from attnflow.audit.guards import Guard, guard
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow


class GuardCallback(TrainerCallback):
    """`Trainer(..., callbacks=[GuardCallback()])` audits the first real batch; arguments as those of `guard`.

    Attributes:
        guard: of the last training run; None before it.
    """

    def __init__(
        self,
        every: int | None = None,
        *,
        on_leak: Literal["raise", "log"] = "raise",
        order: Mask | Sequence[Mask] | Flow | Literal["mask"] | None = None,
        passes: int = 8,
        sequences: int = 2,
    ) -> None:
        self.guard: Guard | None = None
        self._options: dict[str, Any] = {
            "every": every,
            "on_leak": on_leak,
            "order": order,
            "passes": passes,
            "sequences": sequences,
        }

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
