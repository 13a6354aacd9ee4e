"""attnflow: design, prove, train and read the directed information flow of Transformer attention."""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow._core.errors import AttnflowError, LeakFound, MissingExtra, RankFailed, UnsupportedArchitecture
from attnflow._core.lazy import install
from attnflow._core.version import __version__
from attnflow.models.loading.names import REGISTRATIONS

if TYPE_CHECKING:
    from attnflow import audit, bias, explain, geometry, knowledge, masks, models, order, report, tasks, testing
    from attnflow.models import load_model

__all__ = [
    "AttnflowError",
    "LeakFound",
    "MissingExtra",
    "RankFailed",
    "UnsupportedArchitecture",
    "__version__",
    "audit",
    "bias",
    "explain",
    "geometry",
    "knowledge",
    "load_model",
    "masks",
    "models",
    "order",
    "report",
    "tasks",
    "testing",
]

# Results show themselves by `report`, which stands above the rooms that make them; it is imported when one is shown.
install(lambda: import_module("attnflow.report"))

# A saved modular model is loaded by `load_model` like any other; the room that defines it is imported only then.
REGISTRATIONS["attnflow_modular"] = lambda: import_module("attnflow.knowledge.modular")


def __getattr__(name: str) -> object:
    """Import a room on first use: `attnflow --help` and `--version` need not wait for torch."""
    if name == "load_model":
        return import_module("attnflow.models").load_model
    if name in __all__:
        return import_module(f"attnflow.{name}")
    raise AttributeError(f"module 'attnflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
