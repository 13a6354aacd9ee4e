"""The masks by name: a function under `@mask` is in `af.masks`, in JSON, on the command line and in the studio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from attnflow._core.parameters import Named, named

_Maker = TypeVar("_Maker", bound=Callable[..., Any])
_MASKS: Final[dict[str, Named[Any]]] = {}


def mask(**example: str) -> Callable[[_Maker], _Maker]:
    """Register a mask of the catalogue; `example` is what a person types for its parameters, the length `n` aside."""

    def register(maker: _Maker) -> _Maker:
        entry = named(maker, example=example)
        assert entry.name not in _MASKS, f"two masks are named {entry.name}"
        _MASKS[entry.name] = entry
        return maker

    return register


def named_masks(module: str = "") -> Mapping[str, Named[Any]]:
    """The masks of the catalogue, or of one of its modules, in the order of their names."""
    return {name: entry for name, entry in sorted(_MASKS.items()) if entry.function.__module__.startswith(module)}
