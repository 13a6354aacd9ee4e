"""How each kind of result is shown: a drawing, or a part of a page, registers itself for the class that it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Display:
    part: Callable[..., Any] | None = None  # of a page; None for its table
    figure: Callable[..., Any] | None = None  # None for that of what it `opens` to, or else of its table
    together: bool = False  # whether several results share both
    opens: Callable[[Any], Sequence[object]] | None = None  # what a page shows in its place


DISPLAYS: Final[dict[type, Display]] = {}


def _registered(kinds: Sequence[type], **fields: Any) -> None:
    for kind in kinds:
        DISPLAYS[kind] = replace(DISPLAYS.get(kind, Display()), **fields)


def draws(*kinds: type) -> Callable[[F], F]:
    """Register a function as the figure of a class: result, more results and options in, `<svg>` or a chart out."""

    def decorate(function: F) -> F:
        _registered(kinds, figure=function)
        return function

    return decorate


def describes(*kinds: type, together: bool = False) -> Callable[[F], F]:
    """Register a function of a result, or of all `together`, and a `Context` as what a page says of a class."""

    def decorate(function: F) -> F:
        _registered(kinds, part=function, together=together)
        return function

    return decorate


def opens(*kinds: type, to: Callable[[Any], Sequence[object]]) -> None:
    """Register what a page shows in place of a class."""
    _registered(kinds, opens=to)
