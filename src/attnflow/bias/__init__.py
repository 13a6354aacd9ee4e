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
    from attnflow.hf.bias.saving import load, save_pretrained
    from attnflow.hf.bias.summary import BiasSummary, summary

_MODELS = {
    "BiasSummary": "summary",
    "attach": "attach",
    "capture": "capture",
    "capturing": "capture",
    "detach": "attach",
    "disabled": "attach",
    "load": "saving",
    "save_pretrained": "saving",
    "summary": "summary",
}

__all__ = [
    "IMPLEMENTATIONS",
    "Additive",
    "Allow",
    "BiasConfig",
    "BiasGraph",
    "BiasMap",
    "BiasSummary",
    "Custom",
    "Dense",
    "Guidance",
    "LayerBias",
    "LayerMap",
    "LayerShape",
    "Offset",
    "Product",
    "ScoreTerm",
    "Term",
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
    "save_pretrained",
    "summary",
]


def __getattr__(name: str) -> object:
    """What needs transformers, on first use."""
    if name in _MODELS:
        return getattr(import_module(f"attnflow.hf.bias.{_MODELS[name]}"), name)
    raise AttributeError(f"module 'attnflow.bias' has no attribute {name!r}")
