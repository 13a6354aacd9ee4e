"""The attention modules of a model in memory that an initialisation, a penalty or a recorder is about."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Final, Literal

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.live import LiveQueryKey, live_query_keys

Attention = Literal["self", "cross", "all"]

_LOG: Final = logging.getLogger("attnflow.geometry")


def selected(model: nn.Module, attention: Attention = "self") -> list[LiveQueryKey]:
    """The queries and keys of one kind of attention, in the order of the layers, also of a model that is wrapped.

    Raises:
        UnsupportedArchitecture: the model has none that is known, or its weights are sharded over devices.
        ValueError: there is no such kind.
    """
    if attention not in ("self", "cross", "all"):
        raise ValueError(f'attention must be "self", "cross" or "all", got {attention!r}')
    if isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        # Reading them is a collective operation: a recorder in one process would wait for the others for ever.
        raise UnsupportedArchitecture(
            "the weights are sharded over devices (DTensor), which geometry does not gather: initialise a model before "
            "it is sharded, and score its checkpoints"
        )
    found = [live for live in live_query_keys(model) if attention in ("all", live.kind)]
    if not found:
        raise UnsupportedArchitecture(f"the model has no {attention}-attention, whose queries and keys are asked for")
    if any(live.place.discovered for live in found):
        _say_discovered(type(model).__name__)
    return found


@lru_cache
def _say_discovered(model: str) -> None:
    """Once for each type of model: a penalty asks at every step."""
    _LOG.warning("%s is not in the registry: queries and keys were found by their names and shapes", model)
