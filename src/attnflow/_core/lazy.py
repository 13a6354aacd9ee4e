"""Names of a room that need an optional package: imported when they are asked for, listed all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def on_demand(
    room: str, names: Sequence[str], home: Callable[[str], object]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a room whose public `names` it does not all import.

    Args:
        room: its `__name__`.
        names: its `__all__`.
        home: the module that holds a name; it imports that module, so that no import hides in a string.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(home(name), name)

    return find, lambda: list(names)
