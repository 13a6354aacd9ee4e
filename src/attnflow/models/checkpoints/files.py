"""Files of a checkpoint, on disk or elsewhere: listed, chosen by format, and read by byte ranges."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

from attnflow._core.errors import AttnflowError


class BadCheckpoint(AttnflowError, ValueError):
    """A checkpoint is damaged, incomplete, or in a form that is not opened; the message names the file."""


@runtime_checkable
class File(Protocol):
    """A file read by byte ranges; messages call it by its name."""

    name: str
    size: int

    def read(self, start: int, stop: int) -> bytearray:
        """Return exactly the bytes from `start` to before `stop`, or raise."""
        ...


@runtime_checkable
class Folder(Protocol):
    """The top-level files of one checkpoint; results and messages call it by its name."""

    name: str
    files: tuple[str, ...]

    def file(self, name: str) -> File:
        """Return one of its files."""
        ...

    def local(self, name: str) -> Path | None:
        """Return a file's path on this machine, or None."""
        ...


class LocalFile:
    """A file on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        self.size = path.stat().st_size

    def read(self, start: int, stop: int) -> bytearray:
        """Return a byte range; `BadCheckpoint` if the file ends before it."""
        # Read, not mapped: the pages of a map would stay in memory and count as this process's.
        if not 0 <= start <= stop <= self.size:  # before memory is taken for it
            raise BadCheckpoint(f"{self.name} is truncated or damaged: bytes {start} to {stop} of {self.size}")
        buffer = bytearray(stop - start)
        with self._path.open("rb", buffering=0) as file:
            file.seek(start)
            view, done = memoryview(buffer), 0
            while done < len(buffer):
                count = file.readinto(view[done:])
                if not count:
                    raise BadCheckpoint(f"{self.name} is truncated: it ends at byte {start + done}, not {stop}")
                done += count
        return buffer


class LocalFolder:
    """A folder on disk, or one file in it with its config beside it."""

    def __init__(self, path: Path, only: str | None = None) -> None:
        self._path = path
        self.name = str(path / only) if only else str(path)
        there = sorted(entry.name for entry in path.iterdir() if entry.is_file())
        self.files = tuple(name for name in there if only in (None, name) or name.endswith(".json"))

    def file(self, name: str) -> LocalFile:
        """Return one of its files."""
        return LocalFile(self._path / name)

    def local(self, name: str) -> Path:
        """Return a file's path."""
        return self._path / name


@dataclass(frozen=True)
class Format:
    """A format's file names: the `usual` one, or another with one of its suffixes."""

    name: str
    suffixes: tuple[str, ...]
    usual: str = ""

    def find(self, folder: Folder) -> list[str]:
        """List the files that hold the model: the index's shards, or one file; empty if there are none.

        `BadCheckpoint` for a missing shard, or several files of which any may hold the model.
        """
        there = [name for name in folder.files if name.endswith(self.suffixes) and not name.startswith(_NO_MODEL)]
        indices = [name for name in folder.files if name.endswith(f"{self.suffixes[0]}.index.json")]
        if indices and there != [self.usual]:
            preferred = f"{self.usual}.index.json"
            return shards(folder, preferred if preferred in indices else indices[0])
        if self.usual in there:
            return [self.usual]
        if len(there) > 1:
            raise BadCheckpoint(
                f"{folder.name} holds {len(there)} {self.name} files and no index ({', '.join(there[:3])}); pass one "
                "of them"
            )
        return there


_LARGEST_JSON: Final = 100_000_000
_MOST_LAYERS: Final = 2048  # that are made without asking whether there are weights for them: a second or two
_NO_MODEL: Final = ("adapter_", "training_args.bin")
SAFETENSORS: Final = Format("safetensors", (".safetensors",), "model.safetensors")
TORCH: Final = Format("torch", (".bin", ".pt", ".pth", ".ckpt"), "pytorch_model.bin")
GGUF: Final = Format("GGUF", (".gguf",))


def read_json(folder: Folder, name: str) -> Mapping[str, object]:
    """Read a JSON file of the folder; `BadCheckpoint` unless it holds an object."""
    file = folder.file(name)
    if file.size > _LARGEST_JSON:
        raise BadCheckpoint(f"{file.name} has {file.size} bytes; no config or index is longer than {_LARGEST_JSON}")
    try:
        content = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{file.name} holds no JSON object")
    return cast(Mapping[str, object], content)


def shards(folder: Folder, index: str) -> list[str]:
    """List the files that an index names; all must exist."""
    names = read_json(folder, index).get("weight_map")
    if not isinstance(names, dict):
        raise BadCheckpoint(f"{folder.name}/{index} has no weight_map")
    files = sorted({str(name) for name in cast(dict[str, object], names).values()})
    outside = [name for name in files if "/" in name or "\\" in name or name in ("", ".", "..")]
    if outside:
        raise BadCheckpoint(f"{folder.name}/{index} names a file outside of its folder: {outside[0]!r:.80}")
    missing = [name for name in files if name not in folder.files]
    if missing:
        raise BadCheckpoint(
            f"{folder.name} lacks {len(missing)} of {len(files)} shards ({', '.join(missing[:3])}); download it again"
        )
    return files


def check_sizes(name: str, config: Mapping[str, object], tensors: int) -> None:
    """Refuse, with `BadCheckpoint`, a config of more layers than tensors before any module is built."""
    for word, size in _sizes(config):
        if size > max(_MOST_LAYERS, tensors):
            raise BadCheckpoint(f"{name}: {word} of its config is {size}, with {tensors} tensors in its weights")


def _sizes(config: Mapping[Any, object]) -> Iterator[tuple[str, int]]:
    """Yield the module counts that a config and its nested configs ask for."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(cast(Mapping[Any, object], value))
        elif isinstance(name, str) and any(word in name for word in ("layer", "depth", "expert")):
            if isinstance(value, int):
                yield name, value
            elif isinstance(value, list | tuple):
                yield f"the length of {name}", len(cast(Sequence[object], value))


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0][:300]
