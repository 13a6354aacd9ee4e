"""How strongly a model attends: learned, content-aware biases on attention scores, and what computes them.

`attach`, `capture` and what else needs a transformers model live in `attnflow.hf` and are reachable from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow.bias.allow import Allow
from attnflow.bias.attention import IMPLEMENTATIONS, attention
from attnflow.bias.config import BiasConfig
from attnflow.bias.figures import compare_figure, map_figure
from attnflow.bias.graph import BiasGraph
from attnflow.bias.kinds.base import ScoreTerm
from attnflow.bias.kinds.custom import Custom
from attnflow.bias.layer import LayerBias, parameters
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.bias.shape import LayerShape, Vectors
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term

if TYPE_CHECKING:
    from attnflow.hf.bias.attach import attach, detach, disabled
    from attnflow.hf.bias.capture import capture, capturing
    from attnflow.hf.bias.documents import read_documents
    from attnflow.hf.bias.fit import Trained, train
    from attnflow.hf.bias.packing import Packed
    from attnflow.hf.bias.saving import load, save_pretrained
    from attnflow.hf.bias.strength import strength
    from attnflow.hf.bias.summary import BiasSummary, summary
    from attnflow.hf.bias.training import BiasTrainer, TrainingConfig, trainer

_MODELS = {
    "BiasSummary": "summary",
    "BiasTrainer": "training",
    "Packed": "packing",
    "Trained": "fit",
    "TrainingConfig": "training",
    "attach": "attach",
    "capture": "capture",
    "capturing": "capture",
    "detach": "attach",
    "disabled": "attach",
    "load": "saving",
    "read_documents": "documents",
    "save_pretrained": "saving",
    "strength": "strength",
    "summary": "summary",
    "train": "fit",
    "trainer": "training",
}

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
    "compare_figure",
    "detach",
    "disabled",
    "load",
    "map_figure",
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
    if name in _MODELS:
        return getattr(import_module(f"attnflow.hf.bias.{_MODELS[name]}"), name)
    raise AttributeError(f"module 'attnflow.bias' has no attribute {name!r}")
