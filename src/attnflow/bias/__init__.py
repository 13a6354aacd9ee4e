"""How strongly a model attends: learned, content-aware biases on attention scores, and what computes them.

`attach`, `capture` and what else needs a transformers model live in `bias.hf` and are reachable from here.
"""

from typing import TYPE_CHECKING

from attnflow.bias.allow import Allow
from attnflow.bias.attention import IMPLEMENTATIONS, attention
from attnflow.bias.config import BiasConfig
from attnflow.bias.graph import BiasGraph
from attnflow.bias.kinds.base import ScoreTerm
from attnflow.bias.kinds.custom import Custom
from attnflow.bias.layer import LayerBias, parameters
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.bias.shape import LayerShape, Vectors
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term

if TYPE_CHECKING:
    from attnflow.bias.hf.attach import attach, detach, disabled
    from attnflow.bias.hf.capture import capture, capturing
    from attnflow.bias.hf.documents import read_documents
    from attnflow.bias.hf.packing import Packed
    from attnflow.bias.hf.saving import load, save_pretrained
    from attnflow.bias.hf.strength import strength
    from attnflow.bias.hf.summary import BiasSummary, summary
    from attnflow.bias.hf.train import Trained, train
    from attnflow.bias.hf.training import BiasTrainer, TrainingConfig, trainer

_HF = frozenset(
    {
        "BiasSummary",
        "BiasTrainer",
        "Packed",
        "Trained",
        "TrainingConfig",
        "attach",
        "capture",
        "capturing",
        "detach",
        "disabled",
        "load",
        "read_documents",
        "save_pretrained",
        "strength",
        "summary",
        "train",
        "trainer",
    }
)

__all__ = [
    "IMPLEMENTATIONS",
    "Additive",
    "Allow",
    "BiasConfig",
    "BiasGraph",
    "BiasMap",
    "BiasSummary",
    "BiasTrainer",
    "Custom",
    "Dense",
    "Guidance",
    "LayerBias",
    "LayerMap",
    "LayerShape",
    "Offset",
    "Packed",
    "Product",
    "ScoreTerm",
    "Term",
    "Trained",
    "TrainingConfig",
    "Vectors",
    "attach",
    "attention",
    "capture",
    "capturing",
    "detach",
    "disabled",
    "load",
    "parameters",
    "read_documents",
    "save_pretrained",
    "strength",
    "summary",
    "train",
    "trainer",
]


def __getattr__(name: str) -> object:
    """What needs transformers, on first use."""
    if name in _HF:
        from attnflow.bias import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'attnflow.bias' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
