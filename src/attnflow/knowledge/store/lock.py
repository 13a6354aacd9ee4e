"""One writer at a time, across processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from pathlib import Path

from attnflow.knowledge.store.errors import ReadOnly, StoreError, StoreLocked


class FileLock:
    """The right to write what a file stands for, held until `release` or the end of the process, however it ends.

    The kernel holds it (`flock`), so nothing is left to clean up after a crash. The file stays.
    """

    def __init__(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise _no_file(path) from None
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise ReadOnly(
                    f"{path.parent} cannot be written ({error.strerror}): open it with read_only=True"
                ) from None
            raise
        self._close = weakref.finalize(self, os.close, file)  # a store that nobody holds any more is not locked
        if not stat.S_ISREG(os.fstat(file).st_mode):
            self._close()
            raise _no_file(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(file, 20, 0).decode(errors="replace").strip() or "(unknown)"
            self._close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StoreError(f"{path.parent} cannot be locked against other writers: {error.strerror}") from None
            raise StoreLocked(
                f"{path.parent} is being written by process {holder}{' (this one)' * (holder == str(os.getpid()))}, "
                "and one may write at a time: open it with read_only=True, or close the other one first"
            ) from None
        with contextlib.suppress(OSError):  # the number is for the message alone; a full disk must not keep us out
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        _HELD.add(self)

    def release(self) -> None:
        """Let others write."""
        self._close()


def _no_file(path: Path) -> StoreError:
    return StoreError(
        f"{path} is no plain file, and what it leads to is not to be written: see who put it there, remove it"
    )


_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child does not keep its parent's files locked; closing its copy leaves the parent's lock alone."""
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
