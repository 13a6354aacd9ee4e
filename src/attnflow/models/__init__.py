"""What a model is: how it is loaded, where it attends, which tensors it has.

`loader`, `packages` and `hub` get a model; `checkpoints` reads tensors from files without building one; `sites` and
`feed_forward` say where its layers are, `families` how queries and keys are named and laid out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnflow.models.loaded import Loaded
    from attnflow.models.loader import load_model
    from attnflow.models.packages import MODELS, MissingPackage
    from attnflow.models.text import sample_text

__all__ = ["MODELS", "Loaded", "MissingPackage", "load_model", "sample_text"]


def __getattr__(name: str) -> object:
    """What needs transformers, on first use."""
    if name in ("MODELS", "MissingPackage"):
        from attnflow.models import packages

        return getattr(packages, name)
    if name == "sample_text":
        from attnflow.models.text import sample_text

        return sample_text
    if name in __all__:
        from attnflow.models import loader

        return getattr(loader, name)
    raise AttributeError(f"module 'attnflow.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
