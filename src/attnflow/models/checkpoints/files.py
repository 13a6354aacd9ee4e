"""Files of a checkpoint, on disk or elsewhere: listed, chosen by format, and read by ranges of bytes."""

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
    """A file that is read by ranges of bytes; messages call it by its name."""

    name: str
    size: int

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes from `start` to the one before `stop`; all of them, or an error."""
        ...


@runtime_checkable
class Folder(Protocol):
    """The files of one checkpoint, those at its top level; results and messages call it by its name."""

    name: str
    files: tuple[str, ...]

    def file(self, name: str) -> File:
        """One of its files."""
        ...

    def local(self, name: str) -> Path | None:
        """Where a file is on this machine; None if it is not here."""
        ...


class LocalFile:
    """A file on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        self.size = path.stat().st_size

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes of a range; `BadCheckpoint` if the file ends before."""
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
        """One of its files."""
        return LocalFile(self._path / name)

    def local(self, name: str) -> Path:
        """Where a file is."""
        return self._path / name


@dataclass(frozen=True)
class Format:
    """How the files of a format are called: by `usual`, or by another name with one of the suffixes."""

    name: str
    suffixes: tuple[str, ...]
    usual: str = ""

    def find(self, folder: Folder) -> list[str]:
        """The files that hold the model: the shards of the index, or the one file; empty if there are none.

        Raises:
            BadCheckpoint: a shard is missing, or which of several files holds the model is not clear.
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
    """A JSON file of the folder; `BadCheckpoint` if it holds no object."""
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
    """The files that an index names, all of them there."""
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
    """Refuse a config of more layers than there are tensors before a module is made of each, which takes for ever.

    Raises:
        BadCheckpoint: it asks for more than there are, and more than a model has.
    """
    for word, size in _sizes(config):
        if size > max(_MOST_LAYERS, tensors):
            raise BadCheckpoint(f"{name}: {word} of its config is {size}, with {tensors} tensors in its weights")


def _sizes(config: Mapping[Any, object]) -> Iterator[tuple[str, int]]:
    """The numbers of modules that a config asks for, in configs within configs, too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(cast(Mapping[Any, object], value))
        elif isinstance(name, str) and any(word in name for word in ("layer", "depth", "expert")):
            if isinstance(value, int):
                yield name, value
            elif isinstance(value, list | tuple):
                yield f"the length of {name}", len(cast(Sequence[object], value))


def first_line(error: Exception) -> str:
    """What an error says, without what follows in other lines."""
    return str(error).strip().split("\n")[0][:300]
