"""Learned, content-aware biases on attention scores, which change how strongly a model attends.

Code that needs a transformers model, such as `attach`, is in `bias.hf` and reachable from here.
"""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand
from attnflow.bias.attention import attention
from attnflow.bias.content import BilinearConfig, CumulativeConfig, DotConfig, GuidanceConfig, KeyConfig, LowRankConfig
from attnflow.bias.kind import CustomConfig
from attnflow.bias.map import BiasMap
from attnflow.bias.positions import AlibiConfig, DenseConfig, RelativeConfig

if TYPE_CHECKING:
    from attnflow.bias.hf import attach, capture, load, save

__all__ = [
    "AlibiConfig",
    "BiasMap",
    "BilinearConfig",
    "CumulativeConfig",
    "CustomConfig",
    "DenseConfig",
    "DotConfig",
    "GuidanceConfig",
    "KeyConfig",
    "LowRankConfig",
    "RelativeConfig",
    "attach",
    "attention",
    "capture",
    "load",
    "save",
]


def _home(_: str) -> object:
    from attnflow.bias import hf

    return hf


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
