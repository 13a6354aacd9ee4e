"""Writes files and folders whole or not at all.

Each function returns once its data is on the disk, so that a later crash loses nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

_LEFT: Final = 24 * 3600.0  # seconds without a write after which a part file must belong to a killed writer


def to_read(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file to read; refuse a named pipe or a device, where a reader could wait for ever."""
    target = Path(path)
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ValueError(f"cannot read {path}: it is a pipe or a device; save its content as a file first")
    return target


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """Open a binary file that replaces `path` when the block ends without an error."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"expected a file to write, got the folder {target}")
    part = _part_of(target)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(target.parent)


@contextmanager
def write_folder(path: str | os.PathLike[str]) -> Generator[Path]:
    """Make a new folder that replaces `path` when the block ends without an error.

    A kill between the two renames leaves no `path`, and the old folder beside it as `.NAME.*.old`.
    """
    target = Path(os.path.realpath(path))  # of a link, what it points to is replaced
    if target.is_file():  # one look: another process may replace the folder between two
        raise NotADirectoryError(f"expected a folder to write, got the file {target}")
    part = _part_of(target)
    part.mkdir()
    try:
        yield part
        for inner in (*part.rglob("*"), part):
            if inner.is_file() or inner.is_dir():
                sync(inner)
        done = False
        while not done:  # until no other process puts its own folder there in between
            old = target.with_name(f".{target.name}.{secrets.token_hex(6)}.old")
            with suppress(FileNotFoundError):
                os.rename(target, old)
            try:
                os.rename(part, target)
                done = True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    if old.exists():
                        os.rename(old, target)
                    raise
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync(target.parent)


def sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # has no such call
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _part_of(target: Path) -> Path:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target.name}: no folder {target.parent}; create it first")
    for left in target.parent.glob(f".{target.name}.*.part"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
