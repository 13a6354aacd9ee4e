"""From which store a model reads: feed-forward layers as cross-attention to an explicit knowledge base.

The function itself is in `base`, `attention`, `layered` (feed-forward layers as entries) and `conditions`; `reading/`
is what a model reads and by which search, `index/` finds the best entries, `certificate` says what that promises,
`store/` keeps entries; `provenance/` shows what fired, `monitor/` how a base ages. What needs a transformers model is
in `attnflow.hf`, and reachable from here.
"""

from typing import TYPE_CHECKING

from attnflow.knowledge.activations import ACTIVATIONS, sparsemax
from attnflow.knowledge.attention import Folded, GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.certificate import Certificate
from attnflow.knowledge.conditions import Conditions, conditions
from attnflow.knowledge.encoder import Encoder
from attnflow.knowledge.index import EntryIndex, Neighbours
from attnflow.knowledge.layered import EntryLayout, EntryScores, EntryValues, LayeredKnowledge
from attnflow.knowledge.memory_layer.reader import KnowledgeReader, Reading
from attnflow.knowledge.memory_layer.retrieval import Retrieval
from attnflow.knowledge.memory_layer.source import IndexedEntries, Source
from attnflow.knowledge.memory_layer.stored import StoredKnowledge
from attnflow.knowledge.provenance import Fired, LayerTrace, Trace
from attnflow.knowledge.store import (
    Entry,
    NewerFormat,
    NotAStore,
    ReadOnly,
    Store,
    StoreError,
    StoreLocked,
    StoreStats,
)

if TYPE_CHECKING:
    from attnflow.knowledge.hf.activity import activity
    from attnflow.knowledge.hf.connect import connect, disconnect, threshold_columns
    from attnflow.knowledge.hf.convert import from_ffn, to_ffn
    from attnflow.knowledge.hf.encoder import Encoded, TextEncoder, TruncatedText
    from attnflow.knowledge.hf.modular.config import ModularConfig
    from attnflow.knowledge.hf.modular.model import ModularForCausalLM, ModularModel
    from attnflow.knowledge.hf.readers import LayerReader, readers
    from attnflow.knowledge.hf.sync import EntryChanges, layer_thresholds, load_entries, save_entries
    from attnflow.knowledge.hf.trace import trace
    from attnflow.knowledge.monitor.activity import Activity, ActivityReport, LayerActivity
    from attnflow.knowledge.monitor.duplication import Duplicates, duplicates
    from attnflow.knowledge.monitor.reembedding import Drift, Reembedded, VersionDrift, drift, reembed

_HF = frozenset(
    {
        "Encoded",
        "EntryChanges",
        "LayerReader",
        "ModularConfig",
        "ModularForCausalLM",
        "ModularModel",
        "TextEncoder",
        "TruncatedText",
        "activity",
        "connect",
        "disconnect",
        "from_ffn",
        "layer_thresholds",
        "load_entries",
        "readers",
        "save_entries",
        "threshold_columns",
        "to_ffn",
        "trace",
    }
)
_MONITOR = frozenset(
    {
        "Activity",
        "ActivityReport",
        "Drift",
        "Duplicates",
        "LayerActivity",
        "Reembedded",
        "VersionDrift",
        "drift",
        "duplicates",
        "reembed",
    }
)

__all__ = [
    "ACTIVATIONS",
    "Activity",
    "ActivityReport",
    "Certificate",
    "Conditions",
    "Drift",
    "Duplicates",
    "Encoded",
    "Encoder",
    "Entry",
    "EntryChanges",
    "EntryIndex",
    "EntryLayout",
    "EntryScores",
    "EntryValues",
    "Fired",
    "Folded",
    "GeneralizedCrossAttention",
    "IndexedEntries",
    "KnowledgeBase",
    "KnowledgeReader",
    "LayerActivity",
    "LayerReader",
    "LayerTrace",
    "LayeredKnowledge",
    "ModularConfig",
    "ModularForCausalLM",
    "ModularModel",
    "Neighbours",
    "NewerFormat",
    "NotAStore",
    "ReadOnly",
    "Reading",
    "Reembedded",
    "Retrieval",
    "Source",
    "Store",
    "StoreError",
    "StoreLocked",
    "StoreStats",
    "StoredKnowledge",
    "TextEncoder",
    "Trace",
    "TruncatedText",
    "VersionDrift",
    "activity",
    "conditions",
    "connect",
    "disconnect",
    "drift",
    "duplicates",
    "from_ffn",
    "layer_thresholds",
    "load_entries",
    "readers",
    "reembed",
    "save_entries",
    "sparsemax",
    "threshold_columns",
    "to_ffn",
    "trace",
]


def __getattr__(name: str) -> object:
    """What needs transformers, or SciPy, on first use."""
    if name in _HF:
        from attnflow.knowledge import hf

        return getattr(hf, name)
    if name in _MONITOR:
        from attnflow.knowledge import monitor

        return getattr(monitor, name)
    raise AttributeError(f"module 'attnflow.knowledge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
