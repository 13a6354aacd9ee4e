"""What a model is: how it is loaded, where it attends, which tensors it has.

`loader`, `packages` and `hub` get a model; `checkpoints` reads tensors from files without building one; `attention`,
`places` and `sites` say where its layers are, `families` how their weights are named and laid out, and `noise`, `probe`
and `probed` what queries and keys are made of where no family says it.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow._core.lazy import on_demand
from attnflow.models.packages import MODELS, MissingPackage, sample_text

if TYPE_CHECKING:
    from attnflow.models.loaded import Loaded
    from attnflow.models.loader import load_model

__all__ = ["MODELS", "Loaded", "MissingPackage", "load_model", "sample_text"]


def _home(name: str) -> object:
    if name == "load_model":
        if find_spec("transformers") is None:
            raise MissingExtra("transformers", "hf", "af.load_model")
        from attnflow.models import loader as home
    else:
        from attnflow.models import loaded as home  # with torch
    return home


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
