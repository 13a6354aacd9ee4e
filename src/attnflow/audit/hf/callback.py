"""What audits share with transformers: a guard as a `Trainer`'s callback, a static cache, an encoder's output."""

from __future__ import annotations

from inspect import signature
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.cache_utils import StaticCache
from transformers.modeling_outputs import BaseModelOutput

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.guards import Guard, guard


def static_cache(model: nn.Module, length: int) -> StaticCache:
    """A static cache for `length` tokens; `UnsupportedArchitecture` unless a transformers model that takes one."""
    if not isinstance(model, PreTrainedModel) or not cast(Any, model)._can_compile_fullgraph:
        raise UnsupportedArchitecture(f"{type(model).__name__} takes no static cache")
    return StaticCache(config=model.config.get_text_config(), max_cache_len=length)


def encoder_output(hidden: Tensor) -> BaseModelOutput:
    """The output of an encoder that has run; some decoders read it by name, others by index."""
    return BaseModelOutput(last_hidden_state=cast(Any, hidden))


class GuardCallback(TrainerCallback):
    """`Trainer(..., callbacks=[GuardCallback()])` audits the first real batch; arguments as those of `guard`.

    Attributes:
        guard: of the last training run; None before it.
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
