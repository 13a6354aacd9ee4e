"""The flow of one answer: who told the last token, how much, why the head looked there, and from which entries.

Read `explanation` first: it is what comes out. `answering` has the verbs and the handle, `amounts` the sums, `entries`
what feed-forward layers and stores wrote, `removal` the measurements.
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
