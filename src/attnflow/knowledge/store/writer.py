"""One writer at a time: a lock on a directory, and on object storage a table of those that opened it to write."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attnflow._core.errors import AttnflowError

MEMORY: Final = "memory"
LOCK: Final = "writer.lock"
WRITERS: Final = "writers"  # beside the table of entries, a row for each `Store` that was opened to write


class StoreError(AttnflowError):
    """A store cannot do what was asked: another process writes there, it was closed, or its place is not a store."""


class VersionGone(StoreError):
    """The files of the version that was opened are gone."""


@contextmanager
def failures(what: str) -> Generator[None]:
    """Raise any LanceDB exception as a `StoreError` that says what did not happen."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if "Not found" in reason and ".lance/" in reason:
            gone = "files of the version that was opened are gone, as after `compact`: call refresh()"
            raise VersionGone(f"{what}: {gone}") from error
        raise StoreError(f"{what}: {reason}") from error


def locked(directory: Path) -> Callable[[], None]:
    """Lock a directory for writing and return what releases it; after a crash the kernel frees the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        raise StoreError(
            f"{directory} cannot be opened for writing: stores on disk are written on Linux and macOS only; open it "
            f'with read_only=True, use Store.open("{MEMORY}", ...) or a store on object storage'
        ) from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be written ({error.strerror}): open it with read_only=True, or name another folder"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise StoreError(
            f"{directory} is being written by another Store, and one may write at a time: open it with "
            "read_only=True, or close the other one first"
        ) from None
    owner = os.getpid()

    def release() -> None:
        if os.getpid() == owner:  # a forked child shares the lock, which is not its own to end
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)

    return release


class Claim:
    """The right to write to a store on object storage, until another process takes it: the last row of a table."""

    def __init__(self, uri: str, database: Any, table: Any | None, row: Any) -> None:
        self._uri = uri
        with failures(f"the store {uri} cannot be opened to write"):
            self._table: Any = database.create_table(WRITERS, row) if table is None else table
            self._version: int = self._table.version if table is None else table.add(row).version

    def require(self) -> None:
        with failures(f"nothing was written to the store {self._uri}"):
            self._table.checkout_latest()
            if self._table.version != self._version:
                raise StoreError(
                    f"another process has opened the store {self._uri} to write, and one may write at a time: end that "
                    "process, or this one, and open the store again to write here"
                )
