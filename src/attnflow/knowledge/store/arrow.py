"""Rows as Arrow tables, and back. Imports pyarrow: for the LanceDB engine alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as arrow

from attnflow._core.checks import IntArray
from attnflow.knowledge.store.rows import Floats, Rows, Stamped

_TIME = arrow.timestamp("us", tz="UTC")


def schema(dim: int, num_thresholds: int) -> Any:
    """Of a table of entries; without threshold columns there is no field for them."""
    number, text = arrow.int64(), arrow.string()
    fields = [("id", number), ("text", text), ("source", text), ("encoder", text), ("version", number)]
    fields += [("created", _TIME), ("updated", _TIME), ("embedding", arrow.list_(arrow.float32(), dim))]
    if num_thresholds:
        fields += [("thresholds", arrow.list_(arrow.float32(), num_thresholds))]
    return arrow.schema(fields)


def to_table(rows: Rows, dim: int, num_thresholds: int) -> Any:
    """One Arrow row for each entry."""
    columns = [
        arrow.array(rows.ids),
        *(arrow.array(texts, type=arrow.string()) for texts in (rows.texts, rows.sources, rows.encoders)),
        arrow.array(rows.versions),
        arrow.array(rows.created).cast(_TIME),
        arrow.array(rows.updated).cast(_TIME),
        _lists(rows.vectors[:, :dim]),
    ]
    if num_thresholds:
        columns.append(_lists(rows.vectors[:, dim:]))
    return arrow.table(columns, schema=schema(dim, num_thresholds))


def to_rows(table: Any, dim: int, num_thresholds: int) -> Rows:
    """The entries of a table."""
    vectors = np.empty((len(table), dim + num_thresholds), dtype=np.float32)
    _fill(vectors, table, dim)
    return Rows(
        ids=table["id"].to_numpy(),
        vectors=vectors,
        texts=np.array(table["text"].to_pylist(), dtype=object),
        sources=np.array(table["source"].to_pylist(), dtype=object),
        encoders=np.array(table["encoder"].to_pylist(), dtype=object),
        versions=table["version"].to_numpy(),
        created=times(table["created"]),
        updated=times(table["updated"]),
    )


def to_stamped(batches: Iterable[Any], count: int, dim: int, num_thresholds: int) -> Stamped:
    """At most `count` rows, straight into one matrix: vectors are never held twice."""
    ids, updated = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    vectors = np.empty((count, dim + num_thresholds), dtype=np.float32)
    done = 0
    for batch in batches:
        place = slice(done, done + len(batch))
        ids[place], updated[place] = batch["id"].to_numpy(), times(batch["updated"])
        _fill(vectors[place], batch, dim)
        done += len(batch)
    return Stamped(ids[:done], updated[:done], vectors[:done])


def times(column: Any) -> IntArray:
    """Microseconds since 1970."""
    return column.cast(arrow.int64()).to_numpy()


def _fill(vectors: Floats, table: Any, dim: int) -> None:
    start = 0
    for name, width in (("embedding", dim), ("thresholds", vectors.shape[1] - dim)):
        if width:
            column = table[name]
            done = 0
            for chunk in getattr(column, "chunks", [column]):
                vectors[done : done + len(chunk), start : start + width] = chunk.flatten().to_numpy().reshape(-1, width)
                done += len(chunk)
        start += width


def _lists(values: Floats) -> Any:
    flat = arrow.array(np.ascontiguousarray(values).ravel())
    return arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
