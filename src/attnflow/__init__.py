"""attnflow: design, prove, train and read the directed information flow of Transformer attention."""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow import masks, order, tasks
from attnflow._core.errors import AttnflowError, LeakFound, MissingExtra, UnsupportedArchitecture
from attnflow._core.version import __version__
from attnflow.order.audit import audit

if TYPE_CHECKING:
    from attnflow import hf, report

__all__ = [
    "AttnflowError",
    "LeakFound",
    "MissingExtra",
    "UnsupportedArchitecture",
    "__version__",
    "audit",
    "hf",
    "masks",
    "order",
    "report",
    "tasks",
]


def __getattr__(name: str) -> object:
    """Import what brings heavy dependencies on first use."""
    if name in {"hf", "report"}:
        return import_module(f"attnflow.{name}")
    raise AttributeError(f"module 'attnflow' has no attribute {name!r}")
