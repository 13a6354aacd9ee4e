"""Many readers or one writer of an index, across threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator


class ReadersWriter:
    """Any number of readers, or one writer; a waiting writer goes before new readers. Not re-entrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._waiting = 0
        self._writing = False

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """Among other readers."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._writing or self._waiting))
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Alone."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not (self._writing or self._readers))
                self._writing = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
