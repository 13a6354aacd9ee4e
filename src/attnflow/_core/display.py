"""How results and masks are drawn: by a renderer that `attnflow/__init__.py` installs.

So nothing in `_core` imports the room that draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable


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


def in_notebook(shown: object) -> str:
    """Return the HTML of a result or a mask, for `_repr_html_`."""
    return renderer().notebook(shown)
