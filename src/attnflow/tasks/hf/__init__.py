"""Tasks on transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a task on a model")

from attnflow.tasks.hf.decoding import generate, generate_blocks, infill
from attnflow.tasks.hf.scoring import score
from attnflow.tasks.hf.sharing import share_prefixes

__all__ = ["generate", "generate_blocks", "infill", "score", "share_prefixes"]
