"""A process that dies at its n-th change of the disk: that change and every later one fail, cleaning up included.

What was written and not synced by then is cut off somewhere, as where the machine dies.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_MOVES = {"os.rename", "os.link"}
_CHANGES = {"os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.symlink", *_MOVES}


class Died(BaseException):
    """The process is dead: nothing catches this but the test."""


class Disk:
    """Changes below a folder: how many there were, at which one the process dies, and what no sync has reached."""

    def __init__(self, root: Path, at: int | None) -> None:
        self.root, self.at = os.path.realpath(root) + os.sep, at
        self.count, self.log, self.unsynced = 0, list[str](), set[str]()

    @property
    def dead(self) -> bool:
        return self.at is not None and self.count > self.at

    def change(self, what: str, path: str) -> None:
        """One change; raises if the process is dead by now."""
        if (path + os.sep).startswith(self.root):
            self.count += 1
            self.log.append(f"{what} {path.removeprefix(self.root)}")
            if self.dead:
                raise Died(self.log[-1])

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = set(mode) & set("wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
            if writes and isinstance(path, str | bytes | os.PathLike):
                path = os.path.realpath(os.fsdecode(path))
                self.change(event, path)
                self.unsynced.add(path)
        elif event in _CHANGES:
            path, target = os.path.abspath(os.fsdecode(arguments[0])), None
            if event in _MOVES:
                target = os.path.abspath(os.fsdecode(arguments[1]))
            self.change(event, target or path)
            if event == "os.rename" and target:
                moved = {p for p in self.unsynced if p == path or p.startswith(path + os.sep)}
                self.unsynced = (self.unsynced - moved) | {target + p.removeprefix(path) for p in moved}

    def sync(self, descriptor: int) -> None:
        path = os.path.realpath(f"/proc/self/fd/{descriptor}")
        self.change("sync", path)
        self.unsynced.discard(path)

    def tear(self, draw: random.Random) -> None:
        """Cut off what was not synced."""
        for path in sorted(self.unsynced):
            if path.startswith(self.root) and os.path.isfile(path):
                os.truncate(path, draw.randint(0, os.path.getsize(path)))


_disks: list[Disk] = []
_hooked: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _disks:
        _disks[-1](event, arguments)


@contextmanager
def dying(root: Path, at: int | None = None, seed: int = 0) -> Iterator[Disk]:
    """Within the block the process dies at change number `at` below `root` (None: never), and `Died` is raised."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hook)  # there is no way to take one out
    disk, sync = Disk(root, at), os.fsync

    def synced(descriptor: Any) -> None:
        disk.sync(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        _disks.append(disk)
        try:
            yield disk
        finally:
            _disks.remove(disk)
    if disk.dead:
        disk.tear(random.Random(seed))


def changes(root: Path, work: Callable[[], object]) -> list[str]:
    """What a piece of work changes below `root`, when it is not interrupted."""
    with dying(root) as disk:
        work()
    return disk.log
