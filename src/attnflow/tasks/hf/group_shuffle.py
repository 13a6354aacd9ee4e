"""trl's rollouts are shuffled in whole groups, so that the rows of a group stay in one batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import Trainer

_SHUFFLE: Final = "shuffle_sequence_dict"


def shuffle_groups(trainer: Trainer) -> Callable[[], None] | None:
    """Let a trainer that shuffles the rows of several batches (trl's GRPO, RLOO) shuffle whole groups of rollouts.

    Where an optimiser's step takes all of `steps_per_generation` batches, as by default, its rows are the same as
    before; where a generation serves several steps, a step takes whole groups in place of rows drawn from all of them.
    A process that holds parts of groups shuffles rows, as before.

    Returns:
        What restores the trainer; None where it has no groups.

    Raises:
        ValueError: it has groups, but shuffles them in another way than trl 1.16.
    """
    groups = getattr(trainer, "num_generations", None)
    if not isinstance(groups, int) or groups < 2:
        return None
    prepare: Any = trainer._prepare_inputs
    home = next((scope for scope in _scopes(trainer) if _SHUFFLE in scope), None)
    if home is None:
        raise ValueError(
            f"{type(trainer).__name__} shuffles its rows in another way than trl 1.16; share its model alone: "
            "tasks.share_prefixes(trainer.model)"
        )
    rows = home[_SHUFFLE]

    def whole(batch: Mapping[str, Sequence[object] | Tensor | None]) -> object:
        size = len(next(value for value in batch.values() if value is not None))
        if size % groups:
            return rows(batch)
        first = torch.randperm(size // groups) * groups
        order = (first[:, None] + torch.arange(groups)).flatten()
        return {name: _ordered(value, order) for name, value in batch.items()}

    def prepared(*args: Any, **kwargs: Any) -> object:
        home[_SHUFFLE] = whole  # for this call alone: other trainers use the same function
        try:
            return prepare(*args, **kwargs)
        finally:
            home[_SHUFFLE] = rows

    def restore() -> None:
        vars(trainer).pop("_prepare_inputs", None)

    cast(Any, trainer)._prepare_inputs = prepared
    return restore


def _scopes(trainer: Trainer) -> list[dict[str, Any]]:
    """The global names that each `_prepare_inputs` of the trainer's classes sees."""
    own = [vars(kind)["_prepare_inputs"] for kind in type(trainer).__mro__ if "_prepare_inputs" in vars(kind)]
    return [inspect.unwrap(function).__globals__ for function in own]


def _ordered(value: Sequence[object] | Tensor | None, order: Tensor) -> object:
    if value is None or (isinstance(value, Tensor) and value.ndim == 0):
        return value
    return value[order.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in order.tolist()]
