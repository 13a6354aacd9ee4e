"""A control group that bounds the memory of all processes of a sandbox together; limits of a process do not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

CONTROL: Final = Path("/sys/fs/cgroup")
_NUMBERS: Final = count()
_WAIT: Final = 5.0  # seconds for the kernel to reap killed processes


class NoGroup(OSError):
    """The kernel or the rights of this process allow no such group; the message says what was tried."""


@contextmanager
def memory_group(limit: int, control: Path = CONTROL) -> Generator[Path]:
    """A new group whose processes hold `limit` bytes at most, swap and files in memory included; all die at the end.

    Args:
        limit: bytes.
        control: where the kernel shows its groups: version 1 with a folder `memory`, or version 2.

    Yields:
        Its file `cgroup.procs`; a process that writes its number there is in it, and so are its children.
    """
    group = _made(limit, control)
    try:
        yield group / "cgroup.procs"
    finally:
        _empty(group)


def _made(limit: int, control: Path) -> Path:
    name, tried = f"attnflow-{os.getpid()}-{next(_NUMBERS)}", list[str]()
    for parent, files in (
        (control / "memory", {"memory.limit_in_bytes": limit, "?memory.memsw.limit_in_bytes": limit}),
        (_own(control), {"memory.max": limit, "?memory.swap.max": 0}),
        (control, {"memory.max": limit, "?memory.swap.max": 0}),
    ):
        group = parent / name
        try:
            group.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        try:
            for file, value in files.items():
                if not file.startswith("?"):
                    (group / file).write_text(str(value))
                elif (group / file[1:]).exists():  # the kernel counts swap only if it was built and started so
                    (group / file[1:]).write_text(str(value))
        except OSError as error:
            group.rmdir()
            tried.append(f"{group}: {error.strerror}")
            continue
        return group
    raise NoGroup(f"no control group for memory: {'; '.join(tried)}")


def _own(control: Path) -> Path:
    """The group of this process under version 2, which a manager may have handed to its user."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                return control / line[3:].strip("/")
    return control


def _empty(group: Path) -> None:
    """Kill what is left in the group, and remove it."""
    end = time.monotonic() + _WAIT
    while True:
        with suppress(OSError, ValueError):
            for line in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return
