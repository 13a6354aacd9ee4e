"""State that each thread keeps for itself. Importing this loads the compiler, which it keeps out: a second.

A forward pass runs in one thread from start to end, so the state of a call is kept per thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakSet

import torch

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., object])
_making: Final = threading.Lock()


def untraced(function: _F) -> _F:
    return cast(_F, torch.compiler.disable(function))


class PerThread(Generic[_T]):
    """A value for each thread, made by `make()` at the thread's first call; copies and pickles start empty.

    Calling it ends a compiled graph, because a compiler would keep the value of the thread that it traced.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make, self._here = make, threading.local()
        self._values: WeakSet[Any] = WeakSet()

    def __reduce__(self) -> tuple[object, ...]:
        return PerThread, (self._make,)

    @untraced
    def __call__(self) -> _T:
        if not hasattr(self._here, "value"):
            self._here.value = self._make()
            with _making:
                self._values.add(self._here.value)
        return cast(_T, self._here.value)

    def all(self) -> list[_T]:
        with _making:
            return list(self._values)
