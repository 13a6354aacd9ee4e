"""What has to be on the disk before a call may return: bytes of files, and names of files in folders.

A file that was written lies in the memory of the machine until it is synchronised (`fsync`), and so does its name in
its folder: without both a cut of the power may take it, or leave it empty. LanceDB synchronises nothing.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from attnflow._core import files

_ENDINGS: Final = {".lance": b"LANC", ".manifest": b"LANC", ".arrow": b"ARROW1"}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; a link in its place is an error."""
    files.sync(path, follow=False)


def refuse_cut_short(path: Path) -> None:
    """Raise where a file of LanceDB has no end: on a full disk, it does not notice that the last bytes are missing."""
    ending = next((end for suffix, end in _ENDINGS.items() if path.name.endswith(suffix)), b"")
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(ending)))
        if file.read() != ending and ending:
            raise OSError(errno.ENOSPC, f"{path.name} was not written to its end: No space left on device")


def make_folders(path: Path) -> list[Path]:
    """Folders down to `path`, those that are not there yet, on the disk; returns them, the topmost first."""
    missing: list[Path] = []
    while not path.exists():
        missing.insert(0, path)
        path = path.parent
    for folder in missing:
        folder.mkdir(exist_ok=True)
        sync(folder.parent)
    return missing


class SyncedTree:
    """A folder whose files are synchronised once, and again when changed; those of LanceDB must have an end."""

    def __init__(self, root: Path, of_lance: bool = True) -> None:
        self._root, self._of_lance = root, of_lance
        self._synced: dict[str, tuple[int, int, int]] = {}

    def sync(self) -> None:
        """All that is new since the last time: files first, then the folders that name them, inner ones first."""
        there: dict[str, tuple[int, int, int]] = {}
        folders: list[Path] = []
        self._walk(self._root, there, folders)
        self._synced = there
        for folder in reversed(folders):
            with suppress(FileNotFoundError):
                sync(folder)

    def drop_cut_short(self) -> None:
        """Remove files without an end, of a tree whose present version was read: they are of commits that failed."""
        for path in self._root.rglob("*.*"):
            try:
                if path.is_file():
                    refuse_cut_short(path)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    path.unlink(missing_ok=True)

    def _walk(self, folder: Path, there: dict[str, tuple[int, int, int]], folders: list[Path]) -> None:
        """Synchronise new files; the folders that have changed go to `folders`."""
        changed = self._is_new(folder.stat(), str(folder), there)
        if changed:
            folders.append(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    self._walk(Path(entry.path), there, folders)
                else:
                    with suppress(FileNotFoundError):  # an engine may remove what it has put together
                        if self._is_new(entry.stat(follow_symlinks=False), entry.path, there):
                            if self._of_lance:
                                refuse_cut_short(Path(entry.path))
                            sync(Path(entry.path))

    def _is_new(self, status: os.stat_result, path: str, there: dict[str, tuple[int, int, int]]) -> bool:
        there[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return self._synced.get(path) != there[path]
