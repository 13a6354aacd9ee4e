"""The power goes off: only what was synchronised (`fsync`) is on the disk, or by chance a part of the rest."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import numpy as np

from attnflow.knowledge.store import Store
from tests.faults._stores import DIM, Model, differs, eager, steps

PROMISE = (
    "every acknowledged write of a store is there after a power cut at any moment, and of one under way all or nothing"
)
TRIALS = 200
SHORT = 2
_WRITES = 12


class Disk:
    """What a folder would be after a power cut: contents of files and names in folders as of their last `fsync`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._held: list[int] = []  # so that no number of a file is used again
        self.calls = 0

    def fsync(self, file: int) -> None:
        """In place of `os.fsync`."""
        self.calls += 1
        status = os.fstat(file)
        self._held.append(os.dup(file))
        if stat.S_ISDIR(status.st_mode):
            self._folders[status.st_ino] = _names(f"/proc/self/fd/{file}")
        else:
            self._files[status.st_ino] = Path(
                f"/proc/self/fd/{file}"
            ).read_bytes()  # it may be open to be written alone

    def image(self, target: Path, rng: np.random.Generator | None) -> None:
        """The folder after a cut now; with `rng`, what was not synchronised is there, in part or not, by chance."""
        self._image(self._root, self._root.stat().st_ino, target, self._everything(), rng)

    def _everything(self) -> dict[int, Path]:
        return {path.lstat().st_ino: path for path in (self._root, *self._root.rglob("*"))}

    def _image(
        self, root: Path, number: int, target: Path, now: dict[int, Path], rng: np.random.Generator | None
    ) -> None:
        target.mkdir(parents=True, exist_ok=True)
        durable = self._folders.get(number, {})
        names = dict(durable)
        if rng is not None and number in now:
            present = _names(now[number])
            for name in durable.keys() | present.keys():
                if rng.random() < 0.5:
                    names.pop(name, None)
                    names |= {name: present[name]} if name in present else {}
        for name, inner in names.items():
            path = now.get(inner)
            if inner in self._folders or (path is not None and path.is_dir()):
                self._image(root, inner, target / name, now, rng)
            else:
                content = self._files.get(inner, b"")
                if rng is not None and path is not None and rng.random() < 0.5:
                    written = path.read_bytes()
                    if inner in self._files and written.startswith(content):  # appended to
                        content = written[: int(rng.integers(len(content), len(written) + 1))]
                    elif inner not in self._files:
                        content = written[: int(rng.integers(0, len(written) + 1))]
                (target / name).write_bytes(content)

    def close(self) -> None:
        for file in self._held:
            os.close(file)


def trial(seed: int, folder: Path) -> str | None:
    rng = np.random.default_rng(seed)
    place = folder / "disk"
    place.mkdir()
    disk, real, model = Disk(place), os.fsync, Model()
    cut_at = int(rng.integers(8, 60))  # the cut comes at this call of `fsync`
    image, after = folder / "image", [model.copy()]
    chance = rng if seed % 2 else None

    def fsync(file: int) -> None:
        if disk.calls == cut_at:
            disk.image(image, chance)
            expected.extend(after)
        disk.fsync(file)

    expected: list[Model] = []
    os.fsync = fsync
    try:
        with eager(), Store.open(place / "store", dim=DIM) as store:
            for following in steps(store, model, rng, _WRITES):
                after = [model.copy(), following]
            after = [model.copy()]
            if not expected:  # the cut comes between two writes
                disk.image(image, chance)
                expected = after
    finally:
        os.fsync = real
        disk.close()
    shutil.rmtree(place)
    with Store.open(image / "store", dim=DIM) as store:
        return differs(store, *expected)


def _names(folder: str | Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}
