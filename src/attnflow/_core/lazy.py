"""What is imported on first use: a room's names that need an optional package, and the room that draws results.

`attnflow/__init__.py` installs the renderer, so that nothing in `_core` imports the room that draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast, runtime_checkable


def on_demand(
    room: str, names: Sequence[str], home: Callable[[str], object]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a room that imports only some of its public names.

    `home` imports the module of a name itself, so that no import hides in a string.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(home(name), name)

    return find, lambda: list(names)


@runtime_checkable
class Renderer(Protocol):
    """Draws results; the room `report` is one."""

    def notebook(self, shown: object) -> str:
        """Return the HTML of a result for a notebook."""
        ...

    def encode(self, shown: object, suffix: str) -> bytes:
        """Return the content of a file with this suffix."""
        ...


_loaders: list[Callable[[], object]] = []


def install(load: Callable[[], object]) -> None:
    """Set the renderer; `load` is called when the first result is shown."""
    _loaders[:] = [load]


def renderer() -> Renderer:
    """Return the installed renderer."""
    assert _loaders, "attnflow/__init__.py installs a renderer"
    return cast(Renderer, _loaders[0]())
