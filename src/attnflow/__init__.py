"""attnflow: design, prove, train and read the directed information flow of Transformer attention."""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow._core.errors import AttnflowError, LeakFound, MissingExtra, UnsupportedArchitecture
from attnflow._core.version import __version__

if TYPE_CHECKING:
    from attnflow import bias, geometry, hf, masks, order, report, tasks
    from attnflow.order.audit import audit

__all__ = [
    "AttnflowError",
    "LeakFound",
    "MissingExtra",
    "UnsupportedArchitecture",
    "__version__",
    "audit",
    "bias",
    "geometry",
    "hf",
    "masks",
    "order",
    "report",
    "tasks",
]


def __getattr__(name: str) -> object:
    """Import a concept on first use: `attnflow --help` and `--version` need not wait for torch."""
    if name == "audit":
        return import_module("attnflow.order.audit").audit
    if name in __all__:
        return import_module(f"attnflow.{name}")
    raise AttributeError(f"module 'attnflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
