"""Imports a room's names on first use where they need an optional package; `dir()` lists them all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence


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
