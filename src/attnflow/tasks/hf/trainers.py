"""Lets trl's GRPO and RLOO shuffle whole groups of rollouts, so that the rows of a prompt stay in one batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import Trainer

_PREPARE: Final = "_prepare_inputs"
_SHUFFLE: Final = "shuffle_sequence_dict"  # of trl


def shuffle_groups(trainer: Trainer) -> Callable[[], None]:
    """Let a trainer of groups shuffle whole groups, with trl's random numbers; returns what restores it."""
    groups = getattr(trainer, "num_generations", None)
    if not isinstance(groups, int) or groups < 2:
        return lambda: None
    defined = (vars(kind)[_PREPARE] for kind in type(trainer).__mro__ if _PREPARE in vars(kind))
    scopes = (inspect.unwrap(function).__globals__ for function in defined)
    home = next((scope for scope in scopes if _SHUFFLE in scope), None)
    if home is None:
        raise ValueError(
            f"{type(trainer).__name__} shuffles its rows differently from trl 1.16: share its model alone with "
            "tasks.share_prefixes(trainer.model)"
        )
    prepare, rows = cast(Any, trainer)._prepare_inputs, home[_SHUFFLE]

    def whole(batch: Mapping[str, Sequence[object] | Tensor | None]) -> object:
        size = len(next(value for value in batch.values() if value is not None))
        if size % groups:
            return rows(batch)
        drawn: Tensor = rows({"row": torch.arange(size)})["row"]
        first = torch.tensor(list(dict.fromkeys((drawn // groups).tolist()))) * groups
        order = (first[:, None] + torch.arange(groups)).flatten()
        return {name: _ordered(value, order) for name, value in batch.items()}

    def prepared(*args: Any, **kwargs: Any) -> object:
        home[_SHUFFLE] = whole  # for this call alone: other trainers use the same function
        try:
            return prepare(*args, **kwargs)
        finally:
            home[_SHUFFLE] = rows

    cast(Any, trainer)._prepare_inputs = prepared
    return lambda: vars(trainer).pop(_PREPARE, None)


def _ordered(value: Sequence[object] | Tensor | None, order: Tensor) -> object:
    if value is None or (isinstance(value, Tensor) and value.ndim == 0):
        return value
    return value[order.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in order.tolist()]
