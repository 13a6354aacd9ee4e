"""The small file that makes a directory a store: its format, its widths, and the ids that it has given out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from attnflow._core.checks import integer
from attnflow._core.files import json_checksum, write_atomically
from attnflow.knowledge.index import SearchMode
from attnflow.knowledge.store.errors import NewerFormat, NotAStore, StoreError

FILE = "store.json"
FORMAT = 2  # 1: rows and metadata without checksums
_CHECK = "crc"


@dataclass(frozen=True)
class Metadata:
    """What does not change with single entries.

    Attributes:
        dim: width of an embedding.
        num_thresholds: threshold columns.
        next_id: all ids that the store has lost are below it.
        snapshots: their names, oldest first.
        format: of what is there.
    """

    dim: int
    num_thresholds: int
    next_id: int = 0
    snapshots: Sequence[str] = ()
    format: int = FORMAT


Kind = TypeVar("Kind", bound=Metadata)


class Wanted(NamedTuple):
    """What `Store.open` was asked for."""

    dim: int | None
    num_thresholds: int | None
    read_only: bool
    search: SearchMode
    target_recall: float

    def new(self, place: str, kind: type[Kind] = Metadata) -> Kind:
        """What there will be where there is nothing yet."""
        if self.read_only or self.dim is None:
            how = "there is nothing to read" if self.read_only else "give dim, the width of an embedding, to make one"
            raise NotAStore(f"there is no store at {place}: {how}")
        return kind(self.dim, self.num_thresholds or 0)

    def check(self, place: str, stored: Metadata) -> None:
        """Refuse to open a store as another one than it is."""
        for name in ("dim", "num_thresholds"):
            asked, has = getattr(self, name), getattr(stored, name)
            if asked not in (None, has):
                raise ValueError(
                    f"the store at {place} has {name}={has}, got {name}={asked}: leave it out, or open another"
                )


def encode(metadata: Metadata) -> str:
    """As JSON, with the format's number and a checksum of the rest."""
    values = asdict(metadata)
    values = {"attnflow_store": values.pop("format")} | values
    return json.dumps(values | {_CHECK: json_checksum(values)})


def decode(place: str, text: str, kind: type[Kind] = Metadata) -> Kind:
    """From JSON of this format, or of an earlier one.

    Raises:
        NewerFormat: a later version wrote it.
        NotAStore: it is something else.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        version, check = integer("format", values["attnflow_store"]), values.pop(_CHECK, None)
        if version > FORMAT:
            raise NewerFormat(
                f"{place} has format {version}, and this version of attnflow reads up to {FORMAT}: upgrade it"
            )
        if version > 1 and check != json_checksum(values):
            raise ValueError("its checksum is another")
        metadata = kind(**{"format" if name == "attnflow_store" else name: value for name, value in values.items()})
        for name, least in (("dim", 1), ("num_thresholds", 0), ("next_id", 0)):
            integer(name, getattr(metadata, name), least)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotAStore(f"{place} does not describe a store of attnflow, or is damaged") from None
    return metadata


def load(directory: Path) -> Metadata:
    """Of a directory that is a store."""
    path = directory / FILE
    try:
        text = path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise NotAStore(f"{directory} is not a store of attnflow: it has no {FILE}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    return decode(str(path), text)


def save(directory: Path, metadata: Metadata) -> None:
    """Write it as a whole or not at all."""
    with write_atomically(directory / FILE) as file:
        file.write(encode(metadata).encode())
