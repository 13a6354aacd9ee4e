"""One table of entries in a directory, in the format of LanceDB: a write is one commit.

Rows are read with their checksums: those that do not match are never handed out, but by `pieces`, which says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from attnflow._core.checks import IntArray
from attnflow._core.errors import MissingExtra
from attnflow.knowledge.store import checksums
from attnflow.knowledge.store.entry import Flags, Rows, Stamped
from attnflow.knowledge.store.errors import changed_rows, failures, of_engine, reason

ENTRIES: Final = "entries"
SNAPSHOT: Final = "snapshot-"

# Bytes of lists of files and the like; LanceDB's own limits are 1 GB and more, and every commit adds to what is held.
_CACHE: Final = 4 << 20
_PIECE: Final = 8192  # rows
_HELP: Final = (
    "if another process writes there, refresh(); if not, its files are damaged: Store.rescue copies what is whole"
)


class Piece(NamedTuple):
    """Some rows of a table in their order: those that are there, which of them are whole, and what cannot be read."""

    rows: Rows
    checks: IntArray  # of the rows as they are
    whole: Flags
    problem: str = ""


class Database:
    """The tables of a directory."""

    def __init__(self, directory: Path, dim: int, num_thresholds: int) -> None:
        lancedb, self.arrow = packages()
        self.directory, self.dim, self.num_thresholds = directory, dim, num_thresholds
        limits = lancedb.Session(index_cache_size_bytes=_CACHE, metadata_cache_size_bytes=_CACHE)
        self.connection: Any = lancedb.connect(directory, session=limits)

    def create(self, name: str, batches: Any = None) -> None:
        """A table, empty or of these batches."""
        schema = self.arrow.schema(self.dim, self.num_thresholds)
        self.connection.create_table(name, batches, schema=schema)

    def open(self, name: str = ENTRIES) -> EntryTable:
        """A table that is there."""
        return EntryTable(self, self.connection.open_table(name))


class EntryTable:
    """A table at one of its versions, until `checkout_latest`."""

    def __init__(self, database: Database, table: Any) -> None:
        self.raw, self._arrow = table, database.arrow
        self.widths = database.dim, database.num_thresholds
        self._place = str(database.directory)
        self._unreadable = f"{self._place} cannot be read"
        self.checked = self._arrow.CHECK in table.schema.names  # not so in format 1
        self._nothing = Rows.of([], sum(self.widths))

    def read(self, ids: IntArray) -> Rows:
        """Whole rows of those of these ids that there are, by a scan of the column of ids."""
        if not len(ids):
            return self._nothing
        with failures(self._unreadable, _HELP):
            table = self.raw.search().where(_among(ids)).to_arrow()
            rows, checks = self._arrow.to_rows(table, *self.widths), self._checks(table)
        if self.checked:
            self._refuse(rows.id, checksums.checksums(rows) == checks)
        return rows

    def stamps(self) -> tuple[IntArray, IntArray, IntArray]:
        """Ids, times of update and checksums."""
        names = ["id", "updated"] + [self._arrow.CHECK] * self.checked
        with failures(self._unreadable, _HELP):
            table = self.raw.search().select(names).to_arrow()
            return table["id"].to_numpy(), self._arrow.times(table["updated"]), self._checks(table)

    def load(self, ids: IntArray | None = None) -> Stamped:
        """What a search needs of all rows, or of those of these ids that there are, batch by batch into one matrix."""
        names = ["id", "updated"] + [self._arrow.CHECK] * self.checked
        names += ["embedding"] + ["thresholds"] * (self.widths[1] > 0)
        with failures(self._unreadable, _HELP):
            query = self.raw.search().select(names)
            if ids is not None:
                query = query.where(_among(ids)) if len(ids) else query.where("false")
            count = self.raw.count_rows() if ids is None else len(ids)
            loaded = self._arrow.to_stamped(query.to_batches(), count, *self.widths)
        if self.checked:
            self._refuse(loaded.ids, checksums.vectors_hold(loaded.checks, *loaded[:3]))
        return loaded

    def columns(self, *names: str) -> Any:
        """Some columns, as an Arrow table."""
        with failures(self._unreadable, _HELP):
            return self.raw.search().select(list(names)).to_arrow()

    def present(self, ids: IntArray) -> IntArray:
        """Which of these ids there are."""
        with failures(self._unreadable, _HELP):
            return self.raw.search().where(_among(ids)).select(["id"]).to_arrow()["id"].to_numpy()

    def encode(self, rows: Rows, checks: IntArray) -> bytes:
        """Rows as bytes, without a schema."""
        return self._arrow.to_bytes(self._arrow.to_table(rows, checks, *self.widths))

    def decode(self, data: bytes) -> tuple[Rows, IntArray]:
        """Rows of such bytes, and their checksums."""
        table = self._arrow.from_bytes(data, self._arrow.schema(*self.widths))
        return self._arrow.to_rows(table, *self.widths), table[self._arrow.CHECK].to_numpy()

    def append(self, rows: Rows, checks: IntArray) -> None:
        """Rows of ids that are not there; one commit."""
        self.raw.add(self._arrow.to_table(rows, checks, *self.widths))

    def merge(self, rows: Rows, checks: IntArray) -> None:
        """Rows in place of those of the same ids, if there are any; one commit."""
        merge = self.raw.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(self._arrow.to_table(rows, checks, *self.widths))

    def delete(self, ids: IntArray) -> None:
        """Rows no longer; one commit."""
        self.raw.delete(_among(ids))

    def replace(self, pieces: Iterator[Piece]) -> None:
        """These rows in place of all; one commit, in the format of today."""
        tables = (self._arrow.to_table(piece.rows, piece.checks, *self.widths) for piece in pieces)
        schema = self._arrow.schema(*self.widths)
        batches = (batch for table in tables for batch in table.to_batches())
        self.raw.add(self._arrow.reader(schema, batches), mode="overwrite")
        self.checked = True

    def whole_rows(self) -> Iterator[Piece]:
        """All rows, piece by piece.

        Raises:
            Damaged: some are not as they were written.
        """
        with failures(self._unreadable, _HELP):
            for batch in self.raw.search().to_batches():
                piece = self._piece(batch)
                self._refuse(piece.rows.id, piece.whole)
                yield piece

    def pieces(self) -> Iterator[Piece]:
        """All rows, piece by piece, with what is wrong with them; parts that cannot be read are named and left out."""
        done = 0
        try:
            for batch in self.raw.search().to_batches():
                yield self._piece(batch)
                done += len(batch)
        except BaseException as error:
            if not of_engine(error):
                raise
            total = self.raw.count_rows()
            for start in range(done, total, _PIECE):
                yield from self._halves(start, min(start + _PIECE, total))

    def _halves(self, start: int, stop: int) -> Iterator[Piece]:
        """Rows from `start` to `stop`, in ever smaller parts where they cannot be read together."""
        try:
            table = self.raw.search().offset(start).limit(stop - start).to_arrow()
            yield self._piece(table)
        except BaseException as error:
            if not of_engine(error):
                raise
            if stop - start > 1:
                middle = (start + stop) // 2
                yield from self._halves(start, middle)
                yield from self._halves(middle, stop)
            else:
                said = f"{self._named(start)} cannot be read: {reason(error)}"
                yield Piece(self._nothing, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_), said)

    def _named(self, place: int) -> str:
        """The id of a row that cannot be read otherwise, if that can."""
        try:
            table = self.raw.search().select(["id"]).offset(place).limit(1).to_arrow()
            return f"entry {table['id'][0].as_py()}"
        except BaseException as error:
            if not of_engine(error):
                raise
            return f"row {place}"

    def _piece(self, part: Any) -> Piece:
        table = self._arrow.as_table(part)
        rows = self._arrow.to_rows(table, *self.widths)
        checks = checksums.checksums(rows)
        return Piece(
            rows, checks, checks == self._checks(table) if self.checked else np.ones(len(rows), dtype=np.bool_)
        )

    def _checks(self, table: Any) -> IntArray:
        return table[self._arrow.CHECK].to_numpy() if self.checked else np.zeros(len(table), dtype=np.int64)

    def _refuse(self, ids: IntArray, whole: Flags) -> None:
        if not whole.all():
            raise changed_rows(self._place, ids[~whole].tolist())


def snapshot_table(name: str) -> str:
    """What the table of a snapshot is called."""
    return f"{SNAPSHOT}{name}"


def packages() -> tuple[Any, Any]:
    """(lancedb, our module of Arrow tables): imported on use."""
    try:
        import lancedb

        from attnflow.knowledge.store import arrow
    except ImportError as error:
        raise MissingExtra("lancedb", "knowledge", "a store in a directory") from error
    return lancedb, arrow


def _among(ids: IntArray) -> str:
    return f"id IN ({','.join(map(str, ids.tolist()))})"
