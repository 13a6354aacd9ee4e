"""The monitor as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from attnflow.geometry.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Starts a monitor, counts its steps and records the end, in `state.log_history`, which checkpoints hold."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._monitor.active:
            self._monitor.model = others["model"]
            self._monitor.history = _logged(state)
            self._monitor.start(state.global_step)
            self._log(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._monitor.active:
            self._monitor.step(state.global_step)
            self._log(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._monitor.active:
            if not self._monitor.recorded:
                self._monitor.record()
            self._log(state)

    def _log(self, state: Any) -> None:
        values = self._monitor.history.get(state.global_step)
        if values is not None and state.global_step not in _logged(state):
            state.log_history.append({**values, "epoch": state.epoch, "step": state.global_step})


def _logged(state: Any) -> dict[int, dict[str, float]]:
    return {
        entry["step"]: {name: value for name, value in entry.items() if name.startswith("geometry/")}
        for entry in state.log_history
        if any(name.startswith("geometry/") for name in entry)
    }
