"""A store's entries as a table for other programs: Parquet, CSV and pandas, written by pyarrow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from attnflow._core.files import write_atomically
from attnflow.knowledge.store.table import EntryTable


def export(table: EntryTable, path: str | os.PathLike[str]) -> Path:
    """Write entries in batches, by the suffix; see `Store.export`."""
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (".parquet", ".csv"):
        raise ValueError(f"the name must end in .parquet or .csv, got {target.name!r}")
    schema = _schema(table, vectors=suffix == ".parquet")
    with write_atomically(target) as file, _writer(suffix, file, schema) as writer:
        for batch in _batches(table, schema):
            writer.write_batch(batch)
    return target


def to_pandas(table: EntryTable) -> Any:
    if find_spec("pandas") is None:
        raise ImportError("a table as a DataFrame needs pandas, which is not installed: pip install pandas")
    import pyarrow

    schema = _schema(table, vectors=True)
    return pyarrow.Table.from_batches(list(_batches(table, schema)), schema).to_pandas()


def _writer(suffix: str, file: Any, schema: Any) -> Any:
    if suffix == ".csv":
        from pyarrow.csv import CSVWriter

        return CSVWriter(file, schema)
    from pyarrow.parquet import ParquetWriter

    return ParquetWriter(file, schema)


def _schema(table: EntryTable, vectors: bool) -> Any:
    import pyarrow

    fields = [field for field in table.schema if field.name != "vector"]
    widths = {"embedding": table.dim, "thresholds": table.num_thresholds} if vectors else {}
    fields += [(name, pyarrow.list_(pyarrow.float32(), width)) for name, width in widths.items() if width]
    return pyarrow.schema(fields)


def _batches(table: EntryTable, schema: Any) -> Iterator[Any]:
    import pyarrow

    for batch in table.batches():
        rows = batch["vector"].flatten().to_numpy().reshape(len(batch), -1)
        parts = {"embedding": rows[:, : table.dim], "thresholds": rows[:, table.dim :]}
        columns = [
            pyarrow.FixedSizeListArray.from_arrays(np.ascontiguousarray(parts[name]).ravel(), parts[name].shape[1])
            if name in parts
            else batch[name]
            for name in schema.names
        ]
        yield pyarrow.RecordBatch.from_arrays(columns, schema=schema)
