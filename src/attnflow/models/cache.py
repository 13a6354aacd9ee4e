"""Models as they were unpacked, in a folder of this user: whole and undamaged, or not there."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

_SUMS: Final = "checksums.json"
_ABANDONED: Final = 3600.0  # seconds after which an entry that is being written belongs to no process any more


@dataclass(frozen=True)
class CacheState:
    """What the cache holds."""

    folder: Path
    entries: int  # models and tokenizers
    size: int  # bytes on the disk


def folder() -> Path:
    """Where the cache is: `$ATTNFLOW_CACHE`, or `attnflow` in `$XDG_CACHE_HOME`, which is `~/.cache` by default."""
    own = os.environ.get("ATTNFLOW_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "attnflow"


def describe() -> CacheState:
    """Place and size of the cache."""
    entries = _entries()
    files = (file for entry in entries for file in entry.rglob("*") if file.is_file())
    return CacheState(folder(), sum(not entry.name.startswith(".") for entry in entries), sum(map(_size, files)))


def clear() -> CacheState:
    """Remove all entries, and say what was there; a process that has loaded one keeps it."""
    state = describe()
    for entry in _entries():
        _discard(entry)
    return state


def lookup(key: str) -> Path | None:
    """The folder of an entry whose files, all read, are as they were written; None, and no entry any more, if not."""
    entry = folder() / key
    if _intact(entry):
        return entry
    _discard(entry)
    return None


def store(key: str, write: Callable[[Path], object]) -> None:
    """Make an entry of what `write` puts into the folder that it is given; of several processes the first one does.

    `OSError` if the cache cannot be written; nothing is left behind.
    """
    root = folder()
    root.mkdir(parents=True, exist_ok=True)
    for part in root.glob(".*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED:
                shutil.rmtree(part)
    part = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=root))
    try:
        write(part)
        sums = {str(file.relative_to(part)): _checksum(file) for file in part.rglob("*") if file.is_file()}
        (part / _SUMS).write_text(json.dumps(sums))
        with suppress(OSError):  # another process was faster
            part.rename(root / key)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _entries() -> list[Path]:
    root = folder()
    return [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []


def _intact(entry: Path) -> bool:
    try:
        sums = cast(dict[str, int], json.loads((entry / _SUMS).read_text()))
        return all(_checksum(entry / name) == value for name, value in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _discard(entry: Path) -> None:
    """Out of the way first: what is removed is never found in part."""
    away = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        entry.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _checksum(file: Path) -> int:
    """Against damage, not against malice: a CRC is read as fast as the disk."""
    value = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
