"""The attention layers that a score, an initialisation, a penalty or a monitor is about."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Final, Literal, get_args

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.attention import AttentionLayer, attention_layers
from attnflow.models.loaded import Loaded, split

Attention = Literal["self", "cross", "all"]

_LOG: Final = logging.getLogger("attnflow.geometry")


def check_attention(attention: str) -> None:
    """Whether there is such a kind of attention.

    Raises:
        ValueError: there is none.
    """
    if attention not in get_args(Attention):
        raise ValueError(f'attention must be "self", "cross" or "all", got {attention!r}')


def layers_in_memory(model: nn.Module | Loaded, attention: Attention = "self") -> list[AttentionLayer]:
    """The layers of one kind of attention, in order, also of a model that is wrapped for several devices.

    Raises:
        UnsupportedArchitecture: the model has none that is known, or its weights are sharded over devices.
        ValueError: there is no such kind.
    """
    check_attention(attention)
    module, _ = split(model)
    if isinstance(module, DataParallel | DistributedDataParallel):
        module = module.module
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        # Reading them is a collective operation: a monitor in one process would wait for the others for ever.
        raise UnsupportedArchitecture(
            "the weights are sharded over devices (DTensor), which geometry does not gather: initialise a model before "
            "it is sharded, and score its checkpoints"
        )
    layers = [layer for layer in attention_layers(module) if attention in ("all", layer.kind)]
    if not layers:
        raise UnsupportedArchitecture(f"the model has no {attention}-attention, whose queries and keys are asked for")
    if any(layer.discovered for layer in layers):
        _warn_discovered(type(module).__name__)
    return layers


@lru_cache
def _warn_discovered(model: str) -> None:
    """Once for each type of model: a penalty asks at every step."""
    _LOG.warning("%s is not in the registry: queries and keys were found by their names and shapes", model)
