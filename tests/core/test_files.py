"""Files and folders that are whole or not there, whenever their writer dies, and folders that say that they are."""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnflow._core import files
from attnflow._core.files import SEAL, seal, sealed, unseal, write_atomically, write_folder
from attnflow.models.addons import read_addon, write_addon
from tests.dying import Died, changes, dying


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
    write_addon(folder, "bias", {"weight": torch.full((3,), float(len(text)))}, {"text": text}, {})


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


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_as_a_whole(tmp_path: Path, exchange: bool, monkeypatch, caplog) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    target = tmp_path / "x"
    for text in ("one", "two"):
        fill(target, text)
        assert content(target) == whole(text)
        assert list(tmp_path.iterdir()) == [target]
        (target / "more").write_text("of somebody")
    assert ("cannot exchange folders: a kill now" in caplog.text) == (not exchange)
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


@pytest.mark.parametrize(
    ("write", "read", "value"), [(put, Path.read_text, str), (fill, content, whole), (save, loaded, str)]
)
def test_a_writer_that_dies_anywhere_twice_leaves_the_old_or_the_new(tmp_path: Path, write, read, value) -> None:
    target = tmp_path / "x"
    points = len(changes(tmp_path, lambda: [write(target, "0"), write(target, "0")]))
    assert points > 8
    for first in range(points):
        before = read(target)
        for at in (first, random.Random(first).randrange(points)):
            with pytest.raises(Died), dying(tmp_path, at, first):  # noqa: PT012 - until the death
                while True:
                    write(target, str(first))
        assert read(target) in (before, value(str(first)))
    write(target, "end")
    assert read(target) == value("end")
    assert list(tmp_path.iterdir()) == [target], "what the dead have left is removed"


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


def test_a_folder_that_appears_while_the_first_is_put_there_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x"
    with monkeypatch.context() as patched, write_folder(target) as new:
        (new / "a").write_text("mine")
        target.mkdir()
        (target / "a").write_text("of another process")
        patched.setattr(Path, "exists", lambda path: path != target and os.path.exists(path))
    assert content(target) == {"a": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_sealed_folder_says_what_is_not_as_it_was(tmp_path: Path) -> None:
    fill(tmp_path, "text")
    with pytest.raises(ValueError, match=f"is not complete: it has no {SEAL}, which is written last"):
        sealed(tmp_path)
    seal(tmp_path, {"step": 3})
    assert sealed(tmp_path) == {"step": 3}
    (tmp_path / "new").write_text("of somebody")
    assert sealed(tmp_path) == {"step": 3}
    good = (tmp_path / SEAL).read_bytes()
    for damaged in (good[:-9], good.replace(b'"step": 3', b'"step": 4'), b"[]", b'{"files": 3}'):
        (tmp_path / SEAL).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"its {SEAL} is damaged"):
            sealed(tmp_path)
    (tmp_path / SEAL).write_bytes(good)
    (tmp_path / "a").write_text("texT")
    assert sealed(tmp_path, contents=False) == {"step": 3}
    with pytest.raises(ValueError, match="is damaged: a is not as it was written"):
        sealed(tmp_path)
    (tmp_path / "a").write_text("tex")
    with pytest.raises(ValueError, match="is damaged: a has 3 bytes, written were 4"):
        sealed(tmp_path, contents=False)
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match="is not complete: a is missing"):
        sealed(tmp_path)
    unseal(tmp_path)
    unseal(tmp_path / "none")
    assert not (tmp_path / SEAL).exists()


def test_an_error_of_the_exchange_is_not_taken_for_a_lack_of_it(tmp_path: Path, monkeypatch) -> None:
    fill(tmp_path / "x", "one")
    monkeypatch.setattr(files.ctypes, "get_errno", lambda: errno.EACCES)
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: type("Library", (), {"renameat2": lambda *_: -1}))
    with pytest.raises(PermissionError):
        fill(tmp_path / "x", "two")
    assert content(tmp_path / "x") == whole("one")
