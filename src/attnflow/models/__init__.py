"""What a model is: how it is loaded, where it attends, which tensors it has.

Read `sites` first: where a model attends. `attention` says what the queries and keys there are made of, by the `probe`,
or by the tables in `families` for files. `feed_forward` does so for the other layers. `interception` stands
around attention while the model runs, `watching` around any module, and a `trial` leaves the model as it was.
`loader`, `names` and `hub` get a model; `checkpoints` reads tensors from files without building one.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow._core.lazy import on_demand
from attnflow.models.names import MODELS, sample_text

if TYPE_CHECKING:
    from attnflow.models.loaded import Loaded
    from attnflow.models.loader import load_model

__all__ = ["MODELS", "Loaded", "load_model", "sample_text"]


def _home(name: str) -> object:
    if name == "load_model":
        if find_spec("transformers") is None:
            raise MissingExtra("transformers", "hf", "af.load_model")
        from attnflow.models import loader as home
    else:
        from attnflow.models import loaded as home  # with torch
    return home


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
