"""From which store a model reads: feed-forward layers as cross-attention to an explicit knowledge base.

`from_ffn` and `to_ffn` need a transformers model; they live in `attnflow.hf` and are reachable from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow.knowledge.activations import ACTIVATIONS, sparsemax
from attnflow.knowledge.attention import Folded, GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.conditions import Conditions, conditions
from attnflow.knowledge.layered import EntryLayout, EntryScores, EntryValues, LayeredKnowledge

if TYPE_CHECKING:
    from attnflow.hf.knowledge.convert import from_ffn, to_ffn

_MODELS = ("from_ffn", "to_ffn")

__all__ = [
    "ACTIVATIONS",
    "Conditions",
    "EntryLayout",
    "EntryScores",
    "EntryValues",
    "Folded",
    "GeneralizedCrossAttention",
    "KnowledgeBase",
    "LayeredKnowledge",
    "conditions",
    "from_ffn",
    "sparsemax",
    "to_ffn",
]


def __getattr__(name: str) -> object:
    """What needs transformers, on first use."""
    if name in _MODELS:
        return getattr(import_module("attnflow.hf.knowledge.convert"), name)
    raise AttributeError(f"module 'attnflow.knowledge' has no attribute {name!r}")
