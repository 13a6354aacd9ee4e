"""Feed-forward layers as cross-attention to an explicit knowledge base that can be searched, traced and edited.

Read `attention` first: it is the function itself. `base` has its entries, `layered` the layers that read them, `reader`
one that reads all of them or the best (`retrieval`). `convert` turns feed-forward layers into this form, and `modular`
is a model made of it. `store/` keeps and searches entries, `reading/` says what a model reads, `editing/` changes it.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow._core.lazy import on_demand
from attnflow.knowledge.attention import GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.reading.provenance import Trace
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.store import Store

if TYPE_CHECKING:
    from attnflow.knowledge.convert import from_ffn, to_ffn
    from attnflow.knowledge.editing.edit import edit
    from attnflow.knowledge.editing.edited import load_edit
    from attnflow.knowledge.modular import ModularConfig, ModularForCausalLM
    from attnflow.knowledge.reading.attach import attach
    from attnflow.knowledge.reading.duplication import duplicates
    from attnflow.knowledge.reading.entry import entry
    from attnflow.knowledge.reading.features import attach_features
    from attnflow.knowledge.reading.token_writers import writers
    from attnflow.knowledge.reading.trace import trace
    from attnflow.knowledge.reading.usage import activity

__all__ = [
    "GeneralizedCrossAttention",
    "KnowledgeBase",
    "ModularConfig",
    "ModularForCausalLM",
    "Retrieval",
    "Store",
    "Trace",
    "activity",
    "attach",
    "attach_features",
    "duplicates",
    "edit",
    "entry",
    "from_ffn",
    "load_edit",
    "to_ffn",
    "trace",
    "writers",
]


def _home(name: str) -> object:
    if name == "duplicates":  # with SciPy, without transformers
        from attnflow.knowledge.reading import duplication

        return duplication
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "hf", "a model that reads a knowledge base")
    from attnflow.knowledge import convert, modular
    from attnflow.knowledge.editing import edit, edited
    from attnflow.knowledge.reading import attach, entry, features, token_writers, trace, usage

    homes = (attach, convert, edit, edited, entry, features, modular, token_writers, trace, usage)
    return next(home for home in homes if hasattr(home, name))


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
