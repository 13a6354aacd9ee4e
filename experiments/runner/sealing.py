"""Folders that say that they are complete: which files they hold, their sizes and checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from attnflow._core.files import sync, write_atomically

SEAL: Final = "complete.json"


def seal(folder: Path, about: Mapping[str, object]) -> None:
    """Say, as the last thing on the disk, that a folder is complete: which files, their sizes and checksums, `about`.

    Cost: every file is read once.
    """
    _sync_tree(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: [(folder / name).stat().st_size, checksum(folder / name)] for name in names if name != SEAL}
    content = {"files": files, "about": dict(about)}
    with write_atomically(folder / SEAL) as file:
        file.write(json.dumps({**content, "checksum": _json_checksum(content)}, indent=1).encode())
    sync(folder.parent)


def unseal(folder: Path) -> None:
    """Take back that a folder is complete, before it is changed or removed."""
    (folder / SEAL).unlink(missing_ok=True)
    if folder.is_dir():
        sync(folder)


def sealed(folder: Path, *, contents: bool = True) -> dict[str, Any]:
    """What a complete folder says about itself.

    Args:
        folder: that `seal` was called for.
        contents: compare checksums, too; every file is read. Otherwise only names and sizes.
    """
    try:
        held = json.loads((folder / SEAL).read_bytes())
        content = {name: held[name] for name in ("files", "about")}
        good = _json_checksum(content) == held["checksum"]
    except FileNotFoundError:
        raise ValueError(f"{folder} is not complete: it has no {SEAL}, which is written last") from None
    except (OSError, ValueError, KeyError, TypeError):
        good, content = False, {}
    if not good:
        raise ValueError(f"{folder} is not complete: its {SEAL} is damaged")
    for name, (size, value) in content["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} is not complete: {name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{folder} is damaged: {name} has {path.stat().st_size} bytes, written were {size}")
        if contents and checksum(path) != value:
            raise ValueError(f"{folder} is damaged: the content of {name} has changed")
    return cast("dict[str, Any]", content["about"])


def checksum(path: Path) -> int:
    """Of a file, against damage and not against malice: a CRC is read as fast as the disk."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if path.is_file() or path.is_dir():
            sync(path)


def _json_checksum(content: object) -> int:
    """Of a value as JSON holds it, whatever the order of its keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
