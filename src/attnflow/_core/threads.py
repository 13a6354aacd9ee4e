"""One model in several threads: work that must run alone. `per_thread` has the state that each call keeps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, cast

import torch
from torch import nn

_LOOK: Final = 0.05  # seconds between checks for calls that ended without `leave`
_PATIENCE: Final = 300.0  # seconds to wait for a call of another thread


class _Looks:
    """One thread at a time looks at models, and changes them meanwhile: flags, precision, hooks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.thread: int | None = None  # the one that looks
        self.parked: set[int] = set()  # threads that wait here, perhaps inside a call: they run nothing of a model

    @contextmanager
    def parking(self, look: bool = False) -> Generator[None]:
        """Wait inside for something else; go on only when no other thread looks, and then look, if this one is to."""
        here = threading.get_ident()
        with self.changed:
            self.parked.add(here)
        try:
            yield
        finally:
            with self.changed:
                while self.thread not in (None, here):
                    self.changed.wait()
                self.thread = here if look else self.thread
                self.parked.discard(here)


_looks: Final = _Looks()


@contextmanager
def alone_with(parts: Iterable[nn.Module]) -> Generator[None]:
    """Run what is inside while no other thread is in a call of these modules, or looks; later calls and looks wait."""
    modules, here = set(parts), threading.get_ident()

    def calls_of(frame: FrameType | None) -> int:
        count = 0
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") in modules:
                count += 1
            frame = frame.f_back
        return count

    def others() -> bool:
        frames = sys._current_frames()
        return any(calls_of(frames[t]) for t in frames if t != here and t not in _looks.parked)

    def wait(module: nn.Module, args: object) -> None:
        if threading.get_ident() != _looks.thread and calls_of(sys._getframe()) < 2:  # else inside a call
            with _looks.parking():
                pass

    outer = _looks.thread == here
    if not outer:
        with _looks.parking(look=True):
            pass
    untraced = cast(Any, torch.compiler.disable(wait))
    hooks = [module.register_forward_pre_hook(untraced, prepend=True) for module in modules]
    try:
        began = time.monotonic()
        while others():
            if time.monotonic() - began > _PATIENCE:
                raise RuntimeError(f"another thread is inside a call of the model for {_PATIENCE:.0f} s: end it first")
            time.sleep(_LOOK / 50)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if not outer:
            with _looks.changed:
                _looks.thread = None
                _looks.changed.notify_all()


class Turns:
    """Calls run side by side; work that must run alone waits for running calls, and later calls wait for it.

    A compiled call that raises never calls `leave`; it counts as ended once its frame is on no stack.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, FrameType] = {}  # the frame of the call that each thread is in
        self._alone: int | None = None  # the thread that runs alone
        self._waiting = 0  # threads that are to run alone, before any new call

    def __reduce__(self) -> tuple[object, ...]:
        return Turns, ()

    @property
    def mine(self) -> bool:
        return self._alone == threading.get_ident() or self._runs(threading.get_ident())

    def enter(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
            frame = frame.f_back
        with _looks.parking(), self._changed:
            while (self._alone is not None or self._waiting) and not self.mine:
                self._changed.wait()
            if not self.mine:
                self._inside[threading.get_ident()] = frame

    def leave(self) -> None:
        """End a call; nothing happens if it was not begun."""
        with self._changed:
            self._inside.pop(threading.get_ident(), None)
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Generator[None]:
        here = threading.get_ident()
        with _looks.parking(), self._changed:
            self._waiting += 1
            try:
                while self._alone is not None or any(self._runs(thread) for thread in self._inside if thread != here):
                    self._changed.wait(_LOOK)
                self._alone = here
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            with self._changed:
                self._alone = None
                self._changed.notify_all()

    def _runs(self, thread: int) -> bool:
        begun = self._inside.get(thread)
        frame = None if begun is None else sys._current_frames().get(thread)
        while frame is not None and frame is not begun:
            frame = frame.f_back
        return frame is not None
