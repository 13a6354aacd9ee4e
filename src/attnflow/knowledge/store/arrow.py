"""Rows as Arrow tables, and back. Imports pyarrow: for the LanceDB engine alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as arrow

from attnflow._core.checks import IntArray
from attnflow.knowledge.store.entry import Rows, Stamped

CHECK = "check"  # absent from tables of format 1


def schema(dim: int, num_thresholds: int) -> Any:
    """Of a table of entries; without threshold columns there is no field for them."""
    number, text, time = arrow.int64(), arrow.string(), arrow.timestamp("us", tz="UTC")
    fields = [("id", number), ("text", text), ("source", text), ("encoder", text), ("version", number)]
    fields += [("created", time), ("updated", time), (CHECK, number), ("embedding", arrow.list_(arrow.float32(), dim))]
    if num_thresholds:
        fields += [("thresholds", arrow.list_(arrow.float32(), num_thresholds))]
    return arrow.schema(fields)


def to_table(rows: Rows, checks: IntArray, dim: int, num_thresholds: int) -> Any:
    """One Arrow row for each entry, with its checksum."""
    described = schema(dim, num_thresholds)
    values = vars(rows) | {"embedding": rows.vector[:, :dim], "thresholds": rows.vector[:, dim:]}
    values[CHECK] = checks
    return arrow.table([_array(values[field.name], field.type) for field in described], schema=described)


def to_rows(table: Any, dim: int, num_thresholds: int) -> Rows:
    """The entries of a table, as they are there."""
    ids, updated, vectors, _ = to_stamped(table.to_batches(), len(table), dim, num_thresholds)
    text, source, encoder = (np.array(table[name].to_pylist(), dtype=object) for name in ("text", "source", "encoder"))
    version, created = table["version"].to_numpy(), times(table["created"])
    return Rows(ids, text, source, encoder, version, created, updated, vectors)


def to_stamped(batches: Iterable[Any], count: int, dim: int, num_thresholds: int) -> Stamped:
    """At most `count` rows, straight into one matrix: vectors are never held twice. No checksum is 0."""
    ids, updated, checks = (np.zeros(count, dtype=np.int64) for _ in range(3))
    vectors = np.empty((count, dim + num_thresholds), dtype=np.float32)
    lists = {"embedding": vectors[:, :dim]} | ({"thresholds": vectors[:, dim:]} if num_thresholds else {})
    done = 0
    for batch in batches:
        place = slice(done, done + len(batch))
        ids[place], updated[place] = batch["id"].to_numpy(), times(batch["updated"])
        if CHECK in batch.schema.names:
            checks[place] = batch[CHECK].to_numpy()
        for name, values in lists.items():
            values[place] = batch[name].flatten().to_numpy().reshape(len(batch), values.shape[1])
        done += len(batch)
    return Stamped(ids[:done], updated[:done], vectors[:done], checks[:done])


def as_table(part: Any) -> Any:
    """A batch, or a table as it is."""
    return arrow.Table.from_batches([part]) if isinstance(part, arrow.RecordBatch) else part


def reader(described: Any, batches: Iterator[Any]) -> Any:
    """Batches of a schema, one after the other."""
    return arrow.RecordBatchReader.from_batches(described, batches)


def to_bytes(table: Any) -> bytes:
    """A table of some rows in one batch, without its schema."""
    (batch,) = table.combine_chunks().to_batches()
    return batch.serialize().to_pybytes()


def from_bytes(data: bytes, described: Any) -> Any:
    """The table again."""
    return arrow.Table.from_batches([arrow.ipc.read_record_batch(arrow.py_buffer(data), described)])


def times(column: Any) -> IntArray:
    """Microseconds since 1970."""
    return column.cast(arrow.int64()).to_numpy()


def _array(values: Any, kind: Any) -> Any:
    if arrow.types.is_fixed_size_list(kind):
        return arrow.FixedSizeListArray.from_arrays(np.ascontiguousarray(values).ravel(), kind.list_size)
    return arrow.array(values).cast(kind)
