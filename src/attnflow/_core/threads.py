"""One model in several threads: what each call keeps for itself, and what must not run beside other calls.

A forward pass runs in one thread from its beginning to its end, so that the state of a call is that of its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakSet

import torch

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., object])
_making: Final = threading.Lock()


def untraced(function: _F) -> _F:
    """Run a function outside of a compiled model, whose graph ends there."""
    return cast(_F, torch.compiler.disable(function))


class PerThread(Generic[_T]):
    """A value for each thread, made by `make()` when the thread first asks; copies and pickles begin without any.

    A compiled graph ends where it is asked: a compiler would keep the thread that it traced.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make, self._here = make, threading.local()
        self._values: WeakSet[Any] = WeakSet()

    def __reduce__(self) -> tuple[object, ...]:
        return PerThread, (self._make,)

    @untraced
    def __call__(self) -> _T:
        """Return the value of this thread."""
        if not hasattr(self._here, "value"):
            self._here.value = self._make()
            with _making:
                self._values.add(self._here.value)
        return cast(_T, self._here.value)

    def all(self) -> list[_T]:
        """List the values of the threads that are alive."""
        with _making:
            return list(self._values)


class Turns:
    """Calls run side by side; what must run alone waits for those under way, and later ones wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}  # calls under way in each thread
        self._alone: int | None = None  # the thread that runs alone
        self._waiting = 0  # threads that are to run alone, before any new call

    def __reduce__(self) -> tuple[object, ...]:
        return Turns, ()

    @property
    def mine(self) -> bool:
        """Whether this thread is inside a call, or runs alone."""
        return self._alone == threading.get_ident() or threading.get_ident() in self._inside

    def enter(self) -> None:
        """Begin a call."""
        with self._changed:
            self._changed.wait_for(lambda: self.mine or (self._alone is None and not self._waiting))
            self._inside[threading.get_ident()] = self._inside.get(threading.get_ident(), 0) + 1

    def leave(self) -> None:
        """End a call; nothing happens if it was not begun."""
        with self._changed:
            left = self._inside.pop(threading.get_ident(), 1) - 1
            if left:
                self._inside[threading.get_ident()] = left
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Generator[None]:
        """Run what is inside while no other thread is in a call."""
        here = threading.get_ident()
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._alone is None and not self._inside.keys() - {here})
            self._waiting, self._alone = self._waiting - 1, here
        try:
            yield
        finally:
            with self._changed:
                self._alone = None
                self._changed.notify_all()
