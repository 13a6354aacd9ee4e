"""From which store a model reads: feed-forward layers as cross-attention to an explicit knowledge base.

What needs a transformers model lives in `attnflow.hf` and is reachable from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow.knowledge.activations import ACTIVATIONS, sparsemax
from attnflow.knowledge.attention import Folded, GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.certificate import Certificate
from attnflow.knowledge.conditions import Conditions, conditions
from attnflow.knowledge.index import EntryIndex, Hits
from attnflow.knowledge.layered import EntryLayout, EntryScores, EntryValues, LayeredKnowledge
from attnflow.knowledge.reader import KnowledgeReader, Reading
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.source import IndexedEntries, Retrieved, Source
from attnflow.knowledge.store import Entry, Found, Store, StoreError, StoreStats
from attnflow.knowledge.stored import StoredKnowledge

if TYPE_CHECKING:
    from attnflow.hf.knowledge.connect import connect, disconnect, threshold_columns
    from attnflow.hf.knowledge.convert import from_ffn, to_ffn
    from attnflow.hf.knowledge.modular.config import ModularConfig
    from attnflow.hf.knowledge.modular.model import ModularForCausalLM, ModularModel
    from attnflow.hf.knowledge.readers import LayerReader, readers

# Imported on first use: what needs transformers.
_ELSEWHERE = {
    "LayerReader": "hf.knowledge.readers",
    "ModularConfig": "hf.knowledge.modular.model",  # not .config: the model's module registers it
    "ModularForCausalLM": "hf.knowledge.modular.model",
    "ModularModel": "hf.knowledge.modular.model",
    "connect": "hf.knowledge.connect",
    "disconnect": "hf.knowledge.connect",
    "from_ffn": "hf.knowledge.convert",
    "readers": "hf.knowledge.readers",
    "threshold_columns": "hf.knowledge.connect",
    "to_ffn": "hf.knowledge.convert",
}

__all__ = [
    "ACTIVATIONS",
    "Certificate",
    "Conditions",
    "Entry",
    "EntryIndex",
    "EntryLayout",
    "EntryScores",
    "EntryValues",
    "Folded",
    "Found",
    "GeneralizedCrossAttention",
    "Hits",
    "IndexedEntries",
    "KnowledgeBase",
    "KnowledgeReader",
    "LayerReader",
    "LayeredKnowledge",
    "ModularConfig",
    "ModularForCausalLM",
    "ModularModel",
    "Reading",
    "Retrieval",
    "Retrieved",
    "Source",
    "Store",
    "StoreError",
    "StoreStats",
    "StoredKnowledge",
    "conditions",
    "connect",
    "disconnect",
    "from_ffn",
    "readers",
    "sparsemax",
    "threshold_columns",
    "to_ffn",
]


def __getattr__(name: str) -> object:
    """What needs transformers, on first use."""
    if name in _ELSEWHERE:
        return getattr(import_module(f"attnflow.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module 'attnflow.knowledge' has no attribute {name!r}")
