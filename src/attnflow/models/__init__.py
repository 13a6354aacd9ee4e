"""Loads models, and finds their attention layers, feed-forward layers and tensors.

Read `subject` first: a model with its tokenizer, and what every verb asks about both. `sites` finds where it attends.
`attention` finds the weights of queries and keys, by the `probe` or, for files, by the tables in `families`.
`feed_forward` does the same for the other layers. `interception` wraps attention while the model runs, `watching` wraps
any module, and a `trial` runs a model and restores it. `stream` is the recorded pass: what each sublayer added, and
what an attention module made of it. `loader` and `names` get a model. `checkpoints` reads tensors from files without
building a model.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow._core.lazy import on_demand
from attnflow.models.names import MODELS, sample_text

if TYPE_CHECKING:
    from attnflow.models.loader import load_model

__all__ = ["MODELS", "load_model", "sample_text"]


def _home(_: str) -> object:
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "hf", "af.load_model")
    from attnflow.models import loader

    return loader


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
