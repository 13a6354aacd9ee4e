"""Files and folders that are written whole or not at all, and folders that say that they are complete.

Each returns when what it wrote is on the disk: a machine that dies later loses nothing of it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

SEAL: Final = "complete.json"

_LOG: Final = logging.getLogger(__name__)
_EXCHANGE: Final = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """A binary file that becomes `path` when the block ends without an error; otherwise `path` stays as it was.

    Raises:
        FileNotFoundError: the folder of `path` does not exist.
        IsADirectoryError: `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"expected a file to write, got the folder {target}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder {target.parent} to write {target.name} in; create it first")
    with _part(target, Path.touch) as part:
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
    """A new folder that takes the place of `path`, in one step, when the block ends without an error.

    Whatever `path` held before is gone then; after an error, or a kill, `path` is as it was. Where the file system
    cannot exchange two folders (Linux and macOS can, on their own disks), two renames do it, between which a kill
    leaves no `path`, and the old one beside it as `.NAME.*.old`; that is logged.

    Raises:
        FileNotFoundError: the folder around `path` does not exist.
        NotADirectoryError: `path` is a file.
    """
    target = Path(os.path.realpath(path))  # of a link, what it points to is replaced
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"expected a folder to write, got the file {target}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder {target.parent} to write {target.name} in; create it first")
    with _part(target, Path.mkdir) as part:
        try:
            yield part
            _sync_tree(part)
            _take_place(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # after an exchange, what `path` was
    sync(target.parent)


def seal(folder: Path, about: Mapping[str, object]) -> None:
    """Say, as the last thing on the disk, that a folder is complete: which files, their sizes and checksums, `about`.

    Cost: every file is read once.
    """
    _sync_tree(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: [(folder / name).stat().st_size, checksum(folder / name)] for name in names if name != SEAL}
    content = {"files": files, "about": dict(about)}
    with write_atomically(folder / SEAL) as file:
        file.write(json.dumps({**content, "checksum": json_checksum(content)}, indent=1).encode())
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

    Raises:
        ValueError: it is not complete, with the reason.
    """
    try:
        held = json.loads((folder / SEAL).read_bytes())
        content = {name: held[name] for name in ("files", "about")}
        good = json_checksum(content) == held["checksum"]
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
            raise ValueError(f"{folder} is damaged: {name} is not as it was written")
    return cast("dict[str, Any]", content["about"])


def checksum(path: Path) -> int:
    """Of a file, against damage and not against malice: a CRC is read as fast as the disk."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def sweep(folder: Path, name: str = "") -> None:
    """Remove what killed writers of `folder / name`, or of anything in `folder`, have left there."""
    with suppress(OSError), os.scandir(folder) as entries:
        for one in entries:
            if one.name.startswith(f".{name}." if name else ".") and one.name.endswith(".part"):
                with suppress(OSError), _lock(Path(one)) as alone:
                    if alone:
                        shutil.rmtree(one.path) if one.is_dir() else os.unlink(one.path)


def sync(path: Path, *, follow: bool = True) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk; `follow` says whether links lead to it."""
    if sys.platform == "win32" and path.is_dir():
        return  # has no such call
    opened = os.open(path, os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if path.is_file() or path.is_dir():
            sync(path)


def json_checksum(content: object) -> int:
    """Of a value as JSON holds it, whatever the order of its keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


@contextmanager
def _part(target: Path, make: Callable[[Path], object]) -> Generator[Path]:
    """A new file or folder beside `target`, locked until the block ends; those of writers that were killed are removed.

    Beside it: a rename within one disk.
    """
    sweep(target.parent, target.name)
    while True:
        part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
        make(part)
        with _lock(part) as alone:
            if alone is not False:
                yield part
                return
        # Another writer is removing it, because it came between those two lines: a new one, then.


@contextmanager
def _lock(path: Path) -> Generator[bool | None]:
    """Whether this block has the lock of a path that exists; None where there are no locks. The killed have none."""
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        except OSError:
            alone = None
        yield alone
    finally:
        os.close(opened)


def _take_place(part: Path, target: Path) -> None:
    if not target.exists():
        try:
            os.rename(part, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else another process has put its folder there since: it is replaced as any older one
    if _exchanged(part, target):
        return
    old = part.with_suffix(".old")
    _LOG.warning("the file system of %s cannot exchange folders: a kill now leaves the old one as %s", target, old)
    os.rename(target, old)
    os.rename(part, target)
    os.rename(old, part)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    if sys.platform == "win32":
        return False
    library, here = ctypes.CDLL(None, use_errno=True), -2 if sys.platform == "darwin" else -100  # AT_FDCWD
    call: Callable[..., int] | None = getattr(
        library, "renameatx_np" if sys.platform == "darwin" else "renameat2", None
    )
    if call is None:
        return False
    sys.audit("os.rename", str(one), str(other), -1, -1)  # as os.rename does
    if call(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
