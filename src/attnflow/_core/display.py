"""How results and masks show themselves: by a renderer that the top-level package installs.

Nothing in `_core` imports the room that draws. Without `attnflow/__init__.py` there would be no renderer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable


@runtime_checkable
class Renderer(Protocol):
    """What draws results; the room `report` is one."""

    def notebook(self, shown: object) -> str:
        """The HTML of a result in a notebook."""
        ...

    def encode(self, shown: object, suffix: str) -> bytes:
        """The content of a file of a result, of the format of the suffix."""
        ...


_loaders: list[Callable[[], object]] = []


def install(load: Callable[[], object]) -> None:
    """Show results by what `load` returns; it is called when the first result is shown."""
    _loaders[:] = [load]


def renderer() -> Renderer:
    """The renderer that is installed."""
    assert _loaders, "attnflow/__init__.py installs a renderer"
    return cast(Renderer, _loaders[0]())


def in_notebook(shown: object) -> str:
    """HTML of a result or a mask, for `_repr_html_`."""
    return renderer().notebook(shown)
