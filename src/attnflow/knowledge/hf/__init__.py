"""Knowledge bases in transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a model that reads a knowledge base")

from attnflow.knowledge.hf.attach import attach as attach
from attnflow.knowledge.hf.convert import from_ffn as from_ffn
from attnflow.knowledge.hf.convert import to_ffn as to_ffn
from attnflow.knowledge.hf.edit import edit as edit
from attnflow.knowledge.hf.entry import entry as entry
from attnflow.knowledge.hf.modular import ModularConfig as ModularConfig
from attnflow.knowledge.hf.modular import ModularForCausalLM as ModularForCausalLM
from attnflow.knowledge.hf.trace import trace as trace
