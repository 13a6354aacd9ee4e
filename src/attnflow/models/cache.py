"""Models as they were unpacked, in a folder of this user: whole and undamaged, or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attnflow._core.files import seal, sealed, sweep, write_folder


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
    try:
        sealed(entry)
    except (OSError, ValueError):
        _discard(entry)
        return None
    return entry


def store(key: str, write: Callable[[Path], object]) -> None:
    """Make an entry of what `write` puts into the folder that it is given; of several processes the last one does.

    `OSError` if the cache cannot be written; nothing is left behind.
    """
    root = folder()
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    with write_folder(root / key) as part:
        write(part)
        seal(part, {})


def _entries() -> list[Path]:
    root = folder()
    return [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []


def _discard(entry: Path) -> None:
    """Out of the way first: what is removed is never found in part; `store` sweeps what a kill leaves of it."""
    away = entry.with_name(f".{entry.name}.{secrets.token_hex(6)}.part")
    with suppress(OSError):
        entry.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
