"""Files and folders that are whole or not there, whenever their writer dies.

A process dies at its n-th change of the disk: that change and every later one fail, cleaning up included. What was
written and not synced by then is cut off somewhere, as where the machine dies.
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from attnflow._core.files import write_atomically, write_folder
from attnflow.models.loading.addons import read_addon, save_addon


class Died(BaseException):
    """The process is dead: nothing catches this but the test."""


class Disk:
    """Changes below a folder: how many there were, at which one the process dies, and what no sync has reached."""

    def __init__(self, root: Path, at: int | None) -> None:
        self.root, self.at = os.path.realpath(root) + os.sep, at
        self.count, self.unsynced = 0, set[str]()

    @property
    def dead(self) -> bool:
        return self.at is not None and self.count > self.at

    def change(self, what: str, path: str) -> None:
        """One change; raises if the process is dead by now."""
        if (path + os.sep).startswith(self.root):
            self.count += 1
            if self.dead:
                raise Died(f"{what} {path.removeprefix(self.root)}")

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = set(mode) & set("wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
            if writes and isinstance(path, str | bytes | os.PathLike):
                path = os.path.realpath(os.fsdecode(path))
                self.change(event, path)
                self.unsynced.add(path)
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            self.change(event, os.path.abspath(os.fsdecode(arguments[0])))
        elif event == "os.rename":
            path, target = (os.path.abspath(os.fsdecode(name)) for name in arguments[:2])
            self.change(event, target)
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
sys.addaudithook(lambda *event: _disks and _disks[-1](*event))  # there is no way to take one out


@contextmanager
def dying(root: Path, at: int | None = None, seed: int = 0) -> Iterator[Disk]:
    """Within the block the process dies at change number `at` below `root` (None: never), and `Died` is raised."""
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


def put(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write(text.encode())


def fill(folder: Path, text: str) -> None:
    with write_folder(folder) as new:
        (new / "below").mkdir()
        for name in ("a", "below/b"):
            (new / name).write_text(text)


def save(folder: Path, text: str) -> None:
    """What `bias.save` and the readers of a store write."""
    save_addon(folder, "bias", {"weight": torch.full((3,), float(len(text)))}, {"text": text}, {})


def loaded(folder: Path) -> str:
    addon = read_addon(folder, "bias")
    assert addon.tensors["weight"].tolist() == [float(len(addon.config["text"]))] * 3
    return addon.config["text"]


def content(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def whole(text: str) -> dict[str, str]:
    return {"a": text, "below/b": text}


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for text in ("one", "two"):
        fill(target, text)
        assert content(target) == whole(text)
        assert list(tmp_path.iterdir()) == [target]
        (target / "more").write_text("of somebody")
    with pytest.raises(KeyError), write_folder(target) as new:  # noqa: PT012
        (new / "a").write_text("three")
        raise KeyError
    assert content(target) == {**whole("two"), "more": "of somebody"}
    assert list(tmp_path.iterdir()) == [target]


def test_of_a_link_the_folder_that_it_points_to_is_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "x", "one")
    (tmp_path / "link").symlink_to("x")
    fill(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "x") == whole("two")


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(NotADirectoryError, match="expected a folder to write, got the file"),
        write_folder(tmp_path / "file"),
    ):
        pass
    with pytest.raises(IsADirectoryError, match="expected a file to write, got the folder"), write_atomically(tmp_path):
        pass
    for writer in (write_atomically, write_folder):
        with pytest.raises(FileNotFoundError, match="create it first"), writer(tmp_path / "none" / "x"):
            pass


def kept(target: Path) -> dict[str, str]:
    """A folder, or what a death between two renames has left of it beside its place."""
    return content(target if target.exists() else next(iter(target.parent.glob(f".{target.name}.*.old"))))


@pytest.mark.parametrize(
    ("write", "read", "value"), [(put, Path.read_text, str), (fill, kept, whole), (save, loaded, str)]
)
def test_a_writer_that_dies_anywhere_leaves_the_old_or_the_new(tmp_path: Path, write, read, value) -> None:
    with dying(tmp_path) as disk:
        for _ in range(2):
            write(tmp_path / "x", "0")
    assert disk.count > 6
    for first in range(disk.count):
        (tmp_path / str(first)).mkdir()
        target = tmp_path / str(first) / "x"
        write(target, "0")
        with pytest.raises(Died), dying(tmp_path, first, first):  # noqa: PT012 - until the death
            while True:
                write(target, str(first))
        assert read(target) in (value("0"), value(str(first)))
        for left in target.parent.glob(".*.part"):
            os.utime(left, (0, 0))
        write(target, "end")
        assert read(target) == value("end")
        assert not list(target.parent.glob(".*.part")), "what the dead have left is removed after a day"


def test_what_a_living_writer_writes_is_not_swept(tmp_path: Path) -> None:
    with write_folder(tmp_path / "x") as slow, write_atomically(tmp_path / "y") as file:
        fill(tmp_path / "x", "fast")
        put(tmp_path / "y", "fast")
        (slow / "a").write_text("slow")
        file.write(b"slow")
    assert content(tmp_path / "x") == {"a": "slow"}
    assert (tmp_path / "y").read_text() == "slow"
    assert len(list(tmp_path.iterdir())) == 2


WRITER = """
import sys
from pathlib import Path
from attnflow._core.files import write_folder
for turn in range(200):
    with write_folder(sys.argv[1]) as new:
        (new / "a").write_text(f"{sys.argv[2]} {turn}")
        (new / "b").write_text(f"{sys.argv[2]} {turn}")
"""


def test_processes_that_replace_one_folder_at_once_never_mix_it(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "x")]
    writers = [subprocess.Popen([*command, name], env=environment) for name in ("one", "two")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    held = content(tmp_path / "x")
    assert held["a"] == held["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
