"""Learned, content-aware biases on attention scores, which change how strongly a model attends."""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand
from attnflow.bias import content, positions
from attnflow.bias.attention import attention
from attnflow.bias.content import *  # noqa: F403 - each kind of this package
from attnflow.bias.kind import CustomConfig
from attnflow.bias.map import BiasMap
from attnflow.bias.positions import *  # noqa: F403

if TYPE_CHECKING:
    from attnflow.bias.hf import attach, capture, load, save

__all__ = ["BiasMap", "CustomConfig", "attach", "attention", "capture", "load", "save"]
__all__ += content.__all__
__all__ += positions.__all__


def _home(_: str) -> object:
    from attnflow.bias import hf

    return hf


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
