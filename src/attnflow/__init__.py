"""attnflow: design, prove, train and read the directed information flow of Transformer attention."""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow._core.errors import AttnflowError, LeakFound, MissingExtra, UnsupportedArchitecture
from attnflow._core.version import __version__

if TYPE_CHECKING:
    from attnflow import bias, geometry, hf, knowledge, masks, order, report, tasks
    from attnflow.bias import BiasConfig
    from attnflow.hf.bias.attach import attach, detach, disabled
    from attnflow.hf.bias.saving import load, save_pretrained
    from attnflow.order.audit import audit

__all__ = [
    "AttnflowError",
    "BiasConfig",
    "LeakFound",
    "MissingExtra",
    "UnsupportedArchitecture",
    "__version__",
    "attach",
    "audit",
    "bias",
    "detach",
    "disabled",
    "geometry",
    "hf",
    "knowledge",
    "load",
    "masks",
    "order",
    "report",
    "save_pretrained",
    "tasks",
]

_ELSEWHERE = {
    "BiasConfig": "bias",
    "attach": "bias",
    "audit": "order.audit",
    "detach": "bias",
    "disabled": "bias",
    "load": "bias",
    "save_pretrained": "bias",
}


def __getattr__(name: str) -> object:
    """Import a concept on first use: `attnflow --help` and `--version` need not wait for torch."""
    if name in _ELSEWHERE:
        return getattr(import_module(f"attnflow.{_ELSEWHERE[name]}"), name)
    if name in __all__:
        return import_module(f"attnflow.{name}")
    raise AttributeError(f"module 'attnflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
