"""Knowledge bases in transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a model that reads a knowledge base")

from attnflow.knowledge.hf.activity import activity
from attnflow.knowledge.hf.connect import connect, disconnect, threshold_columns
from attnflow.knowledge.hf.convert import from_ffn, to_ffn
from attnflow.knowledge.hf.encoder import Encoded, TextEncoder, TruncatedText
from attnflow.knowledge.hf.modular.model import ModularConfig, ModularForCausalLM, ModularModel
from attnflow.knowledge.hf.readers import LayerReader, readers
from attnflow.knowledge.hf.sync import EntryChanges, layer_thresholds, load_entries, save_entries
from attnflow.knowledge.hf.trace import trace

__all__ = [
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
]
