"""From which store a model reads: feed-forward layers as cross-attention to an explicit knowledge base.

The function itself is in `base`, `attention`, `layered` (feed-forward layers as entries) and `conditions`; `reading/`
is what a model reads and by which search, `index/` finds the best entries, `certificate` says what that promises,
`store/` keeps entries; `provenance/` shows what fired, `monitor/` how a base ages. What needs a transformers model is
in `attnflow.hf`, and reachable from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow.knowledge.activations import ACTIVATIONS, sparsemax
from attnflow.knowledge.attention import Folded, GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.certificate import Certificate
from attnflow.knowledge.conditions import Conditions, conditions
from attnflow.knowledge.encoder import Encoder
from attnflow.knowledge.index import EntryIndex, Hits
from attnflow.knowledge.layered import EntryLayout, EntryScores, EntryValues, LayeredKnowledge
from attnflow.knowledge.provenance.trace import Fired, LayerTrace, Trace
from attnflow.knowledge.reading.reader import KnowledgeReader, Reading
from attnflow.knowledge.reading.retrieval import Retrieval
from attnflow.knowledge.reading.source import IndexedEntries, Retrieved, Source
from attnflow.knowledge.reading.stored import StoredKnowledge
from attnflow.knowledge.store import (
    Entry,
    Found,
    NewerFormat,
    NotAStore,
    ReadOnly,
    Store,
    StoreError,
    StoreLocked,
    StoreStats,
)

if TYPE_CHECKING:
    from attnflow.hf.knowledge.activity import activity
    from attnflow.hf.knowledge.connect import connect, disconnect, threshold_columns
    from attnflow.hf.knowledge.convert import from_ffn, to_ffn
    from attnflow.hf.knowledge.encode import Encoded, TextEncoder, TruncatedText
    from attnflow.hf.knowledge.entries import EntryChanges, layer_thresholds, load_entries, save_entries
    from attnflow.hf.knowledge.modular.config import ModularConfig
    from attnflow.hf.knowledge.modular.model import ModularForCausalLM, ModularModel
    from attnflow.hf.knowledge.readers import LayerReader, readers
    from attnflow.hf.knowledge.trace import trace
    from attnflow.knowledge.monitor.activity import Activity, ActivityReport, LayerActivity
    from attnflow.knowledge.monitor.duplication import Duplicates, duplicates
    from attnflow.knowledge.monitor.reembedding import Drift, Reembedded, VersionDrift, drift, reembed

# Imported on first use: what needs transformers, or SciPy.
_ELSEWHERE = {
    "Activity": "knowledge.monitor.activity",
    "ActivityReport": "knowledge.monitor.activity",
    "Drift": "knowledge.monitor.reembedding",
    "Duplicates": "knowledge.monitor.duplication",
    "Encoded": "hf.knowledge.encode",
    "EntryChanges": "hf.knowledge.entries",
    "LayerActivity": "knowledge.monitor.activity",
    "LayerReader": "hf.knowledge.readers",
    "ModularConfig": "hf.knowledge.modular.model",  # not .config: the model's module registers it
    "ModularForCausalLM": "hf.knowledge.modular.model",
    "ModularModel": "hf.knowledge.modular.model",
    "Reembedded": "knowledge.monitor.reembedding",
    "TextEncoder": "hf.knowledge.encode",
    "TruncatedText": "hf.knowledge.encode",
    "VersionDrift": "knowledge.monitor.reembedding",
    "activity": "hf.knowledge.activity",
    "connect": "hf.knowledge.connect",
    "disconnect": "hf.knowledge.connect",
    "drift": "knowledge.monitor.reembedding",
    "duplicates": "knowledge.monitor.duplication",
    "from_ffn": "hf.knowledge.convert",
    "layer_thresholds": "hf.knowledge.entries",
    "load_entries": "hf.knowledge.entries",
    "readers": "hf.knowledge.readers",
    "reembed": "knowledge.monitor.reembedding",
    "save_entries": "hf.knowledge.entries",
    "threshold_columns": "hf.knowledge.connect",
    "to_ffn": "hf.knowledge.convert",
    "trace": "hf.knowledge.trace",
}

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
    "Found",
    "GeneralizedCrossAttention",
    "Hits",
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
    "NewerFormat",
    "NotAStore",
    "ReadOnly",
    "Reading",
    "Reembedded",
    "Retrieval",
    "Retrieved",
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
    if name in _ELSEWHERE:
        return getattr(import_module(f"attnflow.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module 'attnflow.knowledge' has no attribute {name!r}")
