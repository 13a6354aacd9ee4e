"""A CSV file that grows by whole records, survives a crash at any moment and goes on where training resumes."""

from __future__ import annotations

import csv
import io
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from attnflow._core.files import write_atomically
from attnflow.geometry.table import MatrixScores

COLUMNS: Final = ("step", "layer", "head", "tower", "kind", "symmetry", "directionality", "norm")

_LOG: Final = logging.getLogger(__name__)
_HEADER: Final = ",".join(COLUMNS) + "\n"


class RecordFile:
    """Scores by step, in the columns of `COLUMNS`; `pandas.read_csv` reads it at any time.

    Args:
        path: the file; its folder must exist.
        rows: rows of one record. A last record with fewer was cut off by a crash.
        step: where training starts. Later records in the file are made again, so they are taken out; the file as it
            was is then kept beside it, with ".old" after its name.

    Raises:
        ValueError: the file holds something else, such as records of another model.
    """

    def __init__(self, path: Path, rows: int, step: int) -> None:
        self._path = path
        self._rows = rows
        earlier: list[tuple[int, str]] = []
        if path.exists():
            text = path.read_bytes().decode(errors="replace")
            records = list(self._records(text))
            earlier = [(at, record) for at, record in records if at <= step]
            whole = _HEADER + "".join(record for _, record in earlier)
            if len(earlier) < len(records):
                old = path.with_name(path.name + ".old")
                shutil.copy2(path, old)
                _LOG.warning(
                    "%s held steps after %d, which are recorded again; it was kept as %s", path, step, old.name
                )
            if whole != text:
                _replace(path, whole)
        else:
            _replace(path, _HEADER)
        self.last = earlier[-1][0] if earlier else None

    def append(self, step: int, rows: Sequence[MatrixScores]) -> None:
        """Add a record, and return when it is on the disk."""
        assert len(rows) == self._rows
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows((step, *_cells(row)) for row in rows)
        with open(self._path, "ab", buffering=0) as file:
            file.write(text.getvalue().encode())
            os.fsync(file.fileno())
        self.last = step

    def _records(self, text: str) -> Iterator[tuple[int, str]]:
        """Every step with its lines; a record cut off at the end is left out."""
        if _HEADER.startswith(text):
            return
        if not text.startswith(_HEADER):
            raise ValueError(f"{self._path} is not a record of geometry: its first line is not {_HEADER.strip()}")
        complete = text[: text.rfind("\n") + 1].removeprefix(_HEADER)
        lines = complete.splitlines(keepends=True)
        groups = [(at, "".join(group)) for at, group in groupby(lines, self._step)]
        for number, (at, record) in enumerate(groups):
            count = record.count("\n")
            if count == self._rows:
                yield at, record
            elif count > self._rows or number < len(groups) - 1:
                raise ValueError(
                    f"{self._path} has {count} rows for step {at} where this model gives {self._rows}: it records "
                    "another model or other options; record to another file"
                )

    def _step(self, line: str) -> int:
        step, _, _ = line.partition(",")
        if not step.isdecimal():
            raise ValueError(f"{self._path} is damaged: a line starts with {step[:20]!r} rather than a step")
        return int(step)


def _cells(row: MatrixScores) -> tuple[object, ...]:
    """The columns of a row after the step."""
    scores = (f"{value:.7g}" for value in (row.symmetry, row.directionality, row.norm))
    return row.layer, row.head, row.tower, row.kind, *scores


def _replace(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write(text.encode())
