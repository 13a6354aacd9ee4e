"""Feed-forward layers as cross-attention to an explicit knowledge base that can be searched, traced and edited.

`attention` is the function itself, `base` its entries, `layered` the layers that read them. `conditions` says when
feed-forward layers have this form. `reader` reads all entries of a `source`, or the best (`retrieval`). `store/` keeps
and searches entries. `provenance` holds what fired; `usage` and `duplication` say how a base is used. Code that needs
a transformers model is in `hf/`, and reachable from here.
"""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand
from attnflow.knowledge.attention import GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.provenance import Trace
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.store import Store

if TYPE_CHECKING:
    from attnflow.knowledge.duplication import duplicates
    from attnflow.knowledge.hf.attach import attach
    from attnflow.knowledge.hf.convert import from_ffn, to_ffn
    from attnflow.knowledge.hf.edit import edit
    from attnflow.knowledge.hf.entry import entry
    from attnflow.knowledge.hf.modular import ModularConfig, ModularForCausalLM
    from attnflow.knowledge.hf.trace import trace
    from attnflow.knowledge.usage import activity

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
    "duplicates",
    "edit",
    "entry",
    "from_ffn",
    "to_ffn",
    "trace",
]


def _home(name: str) -> object:
    if name == "activity":
        from attnflow.knowledge import usage as home
    elif name == "duplicates":  # with SciPy
        from attnflow.knowledge import duplication as home
    else:
        from attnflow.knowledge import hf as home
    return home


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
