"""The flow of one answer: who told the last token, how much, why the head looked there, and from which entries.

Read `explanation` first: what an answer's explanation holds. `answering` keeps one pass and answers questions about it,
`amounts` computes what each source and edge carries, `entries` what layers of entries wrote, `removal` runs the model
without some of it. The pass itself is `models/passes/held`.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow._core.lazy import on_demand

if TYPE_CHECKING:
    from attnflow.explain.answering import answer, reading, weights

__all__ = ["answer", "reading", "weights"]


def _home(_: str) -> object:
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "hf", "the flow of an answer")
    from attnflow.explain import answering

    return answering


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
