"""Rows in a directory, in the format of LanceDB: a write is one commit of a new version of the table."""

from __future__ import annotations

import datetime
import errno
import logging
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from attnflow._core.checks import IntArray
from attnflow._core.errors import MissingExtra
from attnflow.knowledge.store import metadata
from attnflow.knowledge.store.cached_index import CachedIndex
from attnflow.knowledge.store.entry import Rows, Stamped, Summary
from attnflow.knowledge.store.errors import NotAStore, ReadOnly, failures
from attnflow.knowledge.store.lock import FileLock
from attnflow.knowledge.store.metadata import Metadata, Wanted

TABLE = "entries"

_LOG = logging.getLogger(__name__)
_COMPACT_AFTER = 100  # commits: each leaves a file of rows and a manifest that lists all files
_ROWS_A_COMMIT = 1000  # and one commit for so many rows, since up to a million of them are written anew
_KEEP = datetime.timedelta(minutes=10)  # versions that readers of other processes may still be looking at


class LanceBackend(CachedIndex):
    """One table, one row an entry; old versions are dropped in passing."""

    def __init__(self, directory: Path, wanted: Wanted) -> None:
        lancedb, self._arrow = _packages()
        with failures(f"{directory} cannot be looked at"):
            absent = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        if absent:
            _create(directory, wanted.new(str(directory)))
        self._directory = directory
        self._unreadable = f"{directory} cannot be read; if another process writes there, refresh()"
        self._metadata = metadata.load(directory)
        wanted.check(str(directory), self._metadata)
        super().__init__(self._metadata, wanted)
        self._file_lock = None if wanted.read_only else FileLock(directory / "writer.lock")
        try:
            self._metadata = metadata.load(directory)  # whoever had the lock until now may have changed it
            self.next_id = self._metadata.next_id
            with failures(f"{directory} cannot be opened"):
                self._database: Any = lancedb.connect(directory)
                self._table: Any = self._database.open_table(TABLE)
            self._refresh()
            if self._table.schema != self._arrow.schema(self.dim, self.num_thresholds):
                raise NotAStore(f"{directory} is damaged: {metadata.FILE} says dim={self.dim}, not so the entries")
        except BaseException:
            self.close()
            raise
        # Those of processes that ended before it was time to compact count, too.
        self._commits = 0 if wanted.read_only else len(self._table.list_versions())

    def _write(self, rows: Rows) -> None:
        """Append where all ids are new, merge otherwise; one commit."""
        table = self._arrow.to_table(rows, self.dim, self.num_thresholds)
        with self._committing("the entries were not written"):
            if rows.version.max() == 1:
                self._table.add(table)
            else:
                merge = self._table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
                merge.execute(table)
        self.next_id = max(self.next_id, int(rows.id.max()) + 1)

    def _delete(self, ids: IntArray) -> None:
        """One commit, after the largest id is on record."""
        with self._committing("the entries were not deleted"):
            self._record_ids()
            self._table.delete(_among(ids))

    def read(self, ids: IntArray) -> Rows:
        """A scan of the column of ids."""
        with failures(self._unreadable):
            table = self._table.search().where(_among(ids)).to_arrow() if len(ids) else self._table.schema.empty_table()
        return self._arrow.to_rows(table, self.dim, self.num_thresholds)

    def stamps(self) -> tuple[IntArray, IntArray]:
        """Two columns."""
        with failures(self._unreadable):
            table = self._table.search().select(["id", "updated"]).to_arrow()
        return table["id"].to_numpy(), self._arrow.times(table["updated"])

    def load(self, ids: IntArray | None = None) -> Stamped:
        """Batch by batch, straight into the matrix."""
        columns = ["id", "updated", "embedding"] + (["thresholds"] if self.num_thresholds else [])
        with failures(self._unreadable):
            query = self._table.search().select(columns)
            if ids is not None:
                query = query.where(_among(ids)) if len(ids) else query.where("false")
            count = self._table.count_rows() if ids is None else len(ids)
            return self._arrow.to_stamped(query.to_batches(), count, self.dim, self.num_thresholds)

    def snapshot(self, name: str) -> None:
        """A copy in a table of its own, which counts once the metadata name it.

        A tag on a version would cost nothing at first, but LanceDB 0.40 then keeps all later files of rows for good.
        """
        with failures("the snapshot was not made"):
            self._database.drop_table(_snapshot(name), ignore_missing=True)  # what a crash in this place has left
            self._database.create_table(_snapshot(name), self._table.search().to_batches())
            self._record(snapshots=[*self.snapshots(), name])

    def snapshots(self) -> list[str]:
        """As the metadata list them."""
        return list(metadata.load(self._directory).snapshots)

    def _restore(self, name: str) -> None:
        """The rows of the copy in place of all others; one commit."""
        with self._committing("the snapshot was not restored"):
            self._record_ids()
            rows = self._database.open_table(_snapshot(name)).search().to_batches()
            self._table.add(rows, mode="overwrite")

    def drop_snapshot(self, name: str) -> None:
        """First from the metadata, then the table."""
        with failures("the snapshot was not dropped"):
            self._record(snapshots=[other for other in self.snapshots() if other != name])
            self._database.drop_table(_snapshot(name))

    def _refresh(self) -> None:
        """The newest version: of another process, or of a commit of this one that was taken for failed."""
        with failures(f"{self._directory} cannot be refreshed"):
            self._table.checkout_latest()
        self.next_id = max(self.next_id, int(self.stamps()[0].max(initial=-1)) + 1)

    def summary(self) -> Summary:
        """Two columns, and the sizes of all files."""
        with failures(self._unreadable):
            table = self._table.search().select(["version", "encoder"]).to_arrow()
        versions, encoders = (
            {row["values"]: row["counts"] for row in table[name].value_counts().to_pylist()}
            for name in ("version", "encoder")
        )
        return Summary(versions, encoders, _bytes(self._directory))

    def close(self) -> None:
        """Let others write."""
        self._table = self._database = None
        if self._file_lock is not None:
            self._file_lock.release()

    def _record_ids(self) -> None:
        """Before rows go: the largest id that there has been must not be forgotten with them."""
        if self._metadata.next_id < self.next_id:
            self._record(next_id=self.next_id)

    def _record(self, **changes: Any) -> None:
        changed = replace(self._metadata, **changes)
        metadata.save(self._directory, changed)
        self._metadata = changed

    @contextmanager
    def _committing(self, what: str) -> Generator[None]:
        with failures(what):
            yield
        self._commits += 1
        if self._commits >= _COMPACT_AFTER and self._commits >= self._table.count_rows() // _ROWS_A_COMMIT:
            self._commits = 0
            try:
                self._table.optimize(cleanup_older_than=_KEEP)
            except Exception as error:  # the write is done and stays; compaction is tried again later
                _LOG.warning("%s was not compacted: %s", self._directory, error)


def _packages() -> tuple[Any, Any]:
    """(lancedb, our module of Arrow tables): imported on use."""
    try:
        import lancedb

        from attnflow.knowledge.store import arrow
    except ImportError as error:
        raise MissingExtra("lancedb", "knowledge", "a store in a directory") from error
    return lancedb, arrow


def _create(directory: Path, described: Metadata) -> None:
    """A store appears at its place as a whole: it is made beside it and renamed."""
    beside = directory.with_name(f".{directory.name}.{uuid4().hex}.new")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
    except OSError as error:
        raise ReadOnly(f"a store at {directory} cannot be made: {error.strerror}") from None
    try:
        with failures(f"a store at {directory} cannot be made"):
            lancedb, arrow = _packages()
            lancedb.connect(beside).create_table(TABLE, schema=arrow.schema(described.dim, described.num_thresholds))
            metadata.save(beside, described)
            try:
                beside.rename(directory)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise  # else another was faster: then that store is opened
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _snapshot(name: str) -> str:
    return f"snapshot-{name}"


def _among(ids: IntArray) -> str:
    return f"id IN ({','.join(map(str, ids.tolist()))})"


def _bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # files of old versions go at any time
            total += path.stat().st_size
    return total
