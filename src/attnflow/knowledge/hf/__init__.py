"""Knowledge bases in transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a model that reads a knowledge base")

from attnflow.knowledge.hf import texts
from attnflow.knowledge.hf.attach import attach
from attnflow.knowledge.hf.convert import from_ffn, to_ffn
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.modular.model import ModularConfig, ModularForCausalLM
from attnflow.knowledge.hf.sync import save_entries
from attnflow.knowledge.hf.trace import trace

__all__ = [
    "ModularConfig",
    "ModularForCausalLM",
    "TextEncoder",
    "attach",
    "from_ffn",
    "save_entries",
    "texts",
    "to_ffn",
    "trace",
]
