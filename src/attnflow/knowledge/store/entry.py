"""`StoredEntry` and `StoreStats`, which a store returns, and the checks of values before they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core.checks import Indices, IntArray, index_array, preview
from attnflow._core.markup import plural, shorten
from attnflow._core.results import Result

Floats = npt.NDArray[np.float32]
Vectors = Tensor | npt.NDArray[Any] | Sequence[Any]  # numbers, or rows of numbers
_LARGEST: Final = 1e16  # scores of larger numbers overflow float32, and infinity minus infinity is NaN
_BLOCK: Final = 1 << 16  # rows checked at once
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, eq=False)
class StoredEntry:
    """One entry of a store."""

    id: int  # permanent
    text: str | None  # None if unknown
    source: str | None  # where it comes from, None if unknown
    version: int  # 1 when inserted, and one more with every upsert
    embedding: Tensor  # e, float32 [dim]
    thresholds: Tensor  # added to its score, one number per threshold column, float32 [num_thresholds]
    encoder: str | None  # name and version of what made the embedding
    created: datetime  # when it was inserted, UTC
    updated: datetime  # when it was written last, UTC

    def __repr__(self) -> str:
        text = "" if self.text is None else f" {shorten(self.text, 60)!r}"
        source = f", {self.source}" if self.source else ""
        return f"StoredEntry({self.id}:{text}{source}, version {self.version}, width {len(self.embedding)})"


@dataclass(frozen=True)
class StoreStats(Result):
    """The size, search mode, encoders and snapshots of a store."""

    uri: str  # where it is
    backend: str  # "lancedb", or "memory"
    count: int  # number of entries
    dim: int  # width of an embedding
    num_thresholds: int  # threshold columns
    bytes_on_disk: int | None  # size of a directory's files, with snapshots and old versions; None elsewhere
    mode: str  # the default search mode: "exact" or "approximate"
    reason: str  # why; after an approximate search, with its measured recall
    versions: Mapping[int, int]  # number of entries by version
    encoders: Mapping[str, int]  # number of entries by encoder; "" where none is recorded
    snapshots: tuple[str, ...]  # their names, oldest first

    def __str__(self) -> str:
        size = "" if self.bytes_on_disk is None else f", {self.bytes_on_disk / 2**10:,.0f} KiB"
        columns = f" and {plural(self.num_thresholds, 'threshold column')}" if self.num_thresholds else ""
        held = f"{plural(self.count, 'entry', 'entries')} of width {self.dim}{columns}{size}"
        counts = sorted(self.encoders.items(), key=lambda item: -item[1])
        return "\n".join(
            [
                f"{self.uri} ({self.backend}): {held}",
                f"search     {self.mode}: {self.reason}",
                *(f"encoder    {name or '(unknown)'}: {plural(count, 'entry', 'entries')}" for name, count in counts),
                "versions   " + (", ".join(f"{v}: {n:,}" for v, n in sorted(self.versions.items())) or "none"),
                "snapshots  " + (", ".join(self.snapshots) or "none"),
            ]
        )


def identifiers(name: str, values: Indices, rows: int | None = None) -> IntArray:
    """Check `values` and return them as distinct int64 ids, `rows` of them if given."""
    ids = index_array(name, values)
    if rows is not None and len(ids) != rows:
        raise ValueError(f"{name} must hold {rows} ids, one for each row, got {len(ids)}")
    if len(ids) and ids.min() < 0:
        hint = ": a search pads ids with -1; found[i].ids leaves the padding out" if ids.min() == -1 else ""
        raise ValueError(f"{name} must hold integers from 0 to 2**63 - 1, got {int(ids.min())}{hint}")
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        raise ValueError(f"{name} must be distinct, but some are given more than once: {preview(unique[counts > 1])}")
    return ids


def strings(name: str, values: Sequence[str | None] | None, rows: int) -> list[str | None]:
    if values is None:
        return [None] * rows
    if isinstance(values, str) or not isinstance(cast(object, values), Sequence | np.ndarray):
        raise TypeError(f"{name} must be a sequence of {rows} strings, got {type(values).__name__}: make it a list")
    if len(values) != rows:
        raise ValueError(f"{name} must hold {rows} strings, one for each row, got {len(values)}")
    return [string(f"{name}[{i}]", value) for i, value in enumerate(values)]


def string(name: str, value: object) -> str | None:
    if not isinstance(value, str | None):
        raise TypeError(f"{name} must be a string or None, got {value!r} of type {type(value).__name__}")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error.reason} at position {error.start}") from None
    return value


def columns(
    ids: IntArray,
    texts: list[str | None],
    sources: list[str | None],
    encoder: str | None,
    old: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """Build all columns except the vectors; entries in `old` keep what is not given, and their version goes up."""
    before = [old.get(key, {}) for key in ids.tolist()]
    now = datetime.now(UTC)
    if old:  # later than before, whatever the clock says
        now = max(now, max(record["updated"] for record in old.values()) + timedelta(microseconds=1))
    return {
        "id": ids,
        "text": [was.get("text") if text is None else text for text, was in zip(texts, before, strict=True)],
        "source": [was.get("source") if name is None else name for name, was in zip(sources, before, strict=True)],
        "encoder": [encoder] * len(ids),
        "version": [was.get("version", 0) + 1 for was in before],
        "created": [was.get("created", now) for was in before],
        "updated": [now] * len(ids),
    }


def snapshot_name(name: str | None, taken: Sequence[str]) -> str:
    if name is None:
        return next(free for i in count(len(taken) + 1) if (free := f"snapshot-{i}") not in taken)
    if not isinstance(cast(object, name), str) or not _NAME.fullmatch(name):
        raise ValueError(f"a snapshot's name has 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
    if name.lower() in (other.lower() for other in taken):  # on some disks "A" and "a" are the same file
        raise ValueError(f"there is a snapshot {name!r} already (ignoring case): choose another name, or drop it first")
    return name


def matrix(name: str, values: Vectors, width: int, rows: int | None = None) -> Floats:
    """Check `values` and return them as finite float32 [rows, width], copied only if needed."""
    array = _floats(name, values)
    if array.ndim != 2 or array.shape[1] != width or (rows is not None and len(array) != rows):
        expected = f"[{'n' if rows is None else rows}, {width}]"
        raise ValueError(f"{name} must have shape {expected}, got {list(array.shape)}")
    for start in range(0, len(array), _BLOCK):
        fits = (np.abs(array[start : start + _BLOCK]) <= _LARGEST).all(axis=1)  # not so for NaN
        if not fits.all():
            raise ValueError(
                f"row {int((~fits).argmax()) + start} of {name} must hold float32 numbers of at most {_LARGEST:.0e}, "
                "not NaN or infinity (to exclude an entry from a column, use a finite penalty such as -1e9)"
            )
    return np.ascontiguousarray(array)


def queries(values: Vectors, width: int) -> tuple[Floats, tuple[int, ...]]:
    """Check queries [..., width] and return them as float32 [n, width], with their leading dimensions."""
    array = _floats("query", values)
    if not array.ndim or array.shape[-1] != width:
        raise ValueError(f"query must have shape [{width}] or [..., {width}], got {list(array.shape)}")
    return matrix("query", array.reshape(-1, width), width), array.shape[:-1]


def _floats(name: str, values: Vectors) -> npt.NDArray[Any]:
    if isinstance(values, Tensor):
        if values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must hold real numbers, got dtype {values.dtype}")
        return values.detach().to("cpu", torch.float32).numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"the rows of {name} must all have the same length") from None
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # what does not fit float32 becomes infinity, which is refused with its row
        return array.astype(np.float32, copy=False)
