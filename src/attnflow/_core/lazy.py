"""Imports on first use: names that need an optional package, and the room that draws results.

`attnflow/__init__.py` installs the renderer, so that nothing in `_core` imports the room that draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def on_demand(
    room: str, names: Sequence[str], home: Callable[[str], object]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a room's `__getattr__` and `__dir__`; `home` imports the module of a name, so that no string hides it."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(home(name), name)

    return find, lambda: list(names)


_loaders: list[Callable[[], Any]] = []


def install(load: Callable[[], Any]) -> None:
    """Set the renderer; `load` is called when the first result is shown."""
    _loaders[:] = [load]


def renderer() -> Any:
    """Return the renderer of results: `notebook` gives HTML, `encode` a file's content, `mask_text` a mask in signs."""
    return _loaders[0]()
