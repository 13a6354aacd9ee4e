"""How strongly a model attends: learned, content-aware biases on attention scores, and what computes them.

What needs a transformers model, such as `attach`, lives in `bias.hf` and is reachable from here.
"""

from typing import TYPE_CHECKING

from attnflow.bias.attention import attention
from attnflow.bias.kinds import (
    AlibiConfig,
    BilinearConfig,
    CumulativeConfig,
    CustomConfig,
    DenseConfig,
    DotConfig,
    GuidanceConfig,
    KeyConfig,
    LowRankConfig,
    RelativeConfig,
)
from attnflow.bias.map import BiasMap
from attnflow.bias.packing import Packed
from attnflow.bias.run import TrainingConfig

if TYPE_CHECKING:
    from attnflow.bias.hf import (
        attach,
        capture,
        capturing,
        handle,
        load,
        save,
        strength,
        train,
        trainer,
    )

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
    "Packed",
    "RelativeConfig",
    "TrainingConfig",
    "attach",
    "attention",
    "capture",
    "capturing",
    "handle",
    "load",
    "save",
    "strength",
    "train",
    "trainer",
]


def __getattr__(name: str) -> object:
    """What needs transformers, on first use."""
    if name in __all__:
        from attnflow.bias import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'attnflow.bias' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
