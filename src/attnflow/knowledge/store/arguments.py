"""What callers may give to a store, checked before anything happens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from attnflow._core.checks import Indices, IntArray, index_array, preview
from attnflow.knowledge.store.entry import Floats, Rows, Strings

LARGEST_ID: Final = 2**63 - 1

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def identifiers(name: str, values: Indices, rows: int | None = None) -> IntArray:
    """`values` as int64 [n] in [0, 2**63), no two alike; with `rows`, n must be that."""
    ids = index_array(name, values)
    if rows is not None and len(ids) != rows:
        raise ValueError(f"{name} must hold {rows} ids, one for each row, got {len(ids)}")
    if len(ids) and ids.min() < 0:
        hint = "; where a search found fewer entries, found[i].ids leaves -1 out" if ids.min() == -1 else ""
        raise ValueError(f"{name} must hold integers from 0 to 2**63 - 1, got {int(ids.min())}{hint}")
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        raise ValueError(f"{name} holds some ids more than once: {preview(unique[counts > 1])}")
    return ids


def refuse_unknown(ids: Sequence[int]) -> None:
    """Raise where there are ids that a store does not have."""
    if ids:
        raise KeyError(f"the store has no entries with ids {preview(ids)}")


def next_ids(first: int, count: int) -> IntArray:
    """As many ids from `first` on."""
    if first + count - 1 > LARGEST_ID:
        raise ValueError("there are no integers above the largest id of this store: name the ids yourself")
    return np.arange(first, first + count, dtype=np.int64)


def rows(
    ids: IntArray,
    texts: Sequence[str | None] | None,
    sources: Sequence[str | None] | None,
    encoder: str | None,
    now: int,
    vectors: Floats,
) -> Rows:
    """New rows."""
    count, by = len(ids), None if encoder is None else _text("encoder", encoder)
    return Rows(
        id=ids,
        text=_strings("texts", texts, count),
        source=_strings("sources", sources, count),
        encoder=np.full(count, by, dtype=object),
        version=np.ones(count, dtype=np.int64),
        created=np.full(count, now),
        updated=np.full(count, now),
        vector=vectors,
    )


def _strings(name: str, values: Sequence[str | None] | None, rows: int) -> Strings:
    """`values` as an array of str or None; all None where not given."""
    result = np.full(rows, None, dtype=object)
    if values is None:
        return result
    if isinstance(values, str):
        raise TypeError(f"{name} must be a sequence of {rows} strings, got one string")
    if not isinstance(cast(object, values), Sequence | np.ndarray):
        raise TypeError(f"{name} must be a sequence of {rows} strings, got {type(values).__name__}: make it a list")
    if len(values) != rows:
        raise ValueError(f"{name} must hold {rows} strings, one for each row, got {len(values)}")
    for i, value in enumerate(values):
        result[i] = None if value is None else _text(f"{name}[{i}]", value)
    return result


def _text(name: str, value: object) -> str:
    """A string that can be stored."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string or None, got {value!r} of type {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error.reason} at position {error.start}") from None
    return value


def snapshot_name(name: str | None, taken: Sequence[str]) -> str:
    """A name that no snapshot has; the next free number where none is given."""
    if name is None:
        number = len(taken) + 1
        while f"snapshot-{number}" in taken:
            number += 1
        return f"snapshot-{number}"
    if not isinstance(cast(object, name), str) or not _NAME.fullmatch(name):
        raise ValueError(f"a snapshot's name has 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
    if name.lower() in (other.lower() for other in taken):  # on some disks "A" and "a" are one file
        raise ValueError(
            f"there is a snapshot {name!r} already (case does not count): choose another name, or drop it first"
        )
    return name
