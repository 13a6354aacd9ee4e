"""Loads models, and finds their attention layers, feed-forward layers and tensors.

Read `subject` first: a model with its tokenizer, and what every verb asks about both. `loading` gets a model, and saves
and loads what was added to it. `anatomy` finds its parts: where it attends, its feed-forward layers. `passes` runs it:
`interception` wraps attention, `watching` wraps any module, a `trial` restores everything, and `stream` is the recorded
pass: what each sublayer added. `weights` reads queries' and keys' matrices: of a model, by the `probe`, or of files, by
the tables in `families`, without building a model.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow._core.lazy import on_demand
from attnflow.models.loading.names import MODELS, sample_text

if TYPE_CHECKING:
    from attnflow.models.loading.loader import load_model

__all__ = ["MODELS", "load_model", "sample_text"]


def _home(_: str) -> object:
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "hf", "af.load_model")
    from attnflow.models.loading import loader

    return loader


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
