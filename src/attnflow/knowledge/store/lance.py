"""Rows in a directory, in the format of LanceDB: a write is one commit of a new version of the table."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnflow._core.checks import IntArray
from attnflow.knowledge.store import metadata
from attnflow.knowledge.store.cached_index import CachedIndex
from attnflow.knowledge.store.check import StoreCheck, examine, examine_snapshot
from attnflow.knowledge.store.checksums import checksums
from attnflow.knowledge.store.entry import Rows, Stamped, Summary
from attnflow.knowledge.store.errors import StoreError, failures
from attnflow.knowledge.store.lock import FileLock
from attnflow.knowledge.store.metadata import Wanted
from attnflow.knowledge.store.opening import create, open_entries, upgraded
from attnflow.knowledge.store.table import ENTRIES, Database, packages

_LOG = logging.getLogger(__name__)
_COMPACT_AFTER = 100  # commits: each leaves a file of rows and a manifest that lists all files
_ROWS_A_COMMIT = 1000  # and one commit for so many rows, since up to a million of them are written anew
_KEEP = datetime.timedelta(minutes=10)  # versions that readers of other processes may still be looking at


class LanceBackend(CachedIndex):
    """One table, one row an entry; old versions are dropped in passing."""

    def __init__(self, directory: Path, wanted: Wanted) -> None:
        packages()
        with failures(f"{directory} cannot be looked at"):
            absent = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        if absent:
            create(directory, wanted.new(str(directory)))
        self._directory = directory
        self._metadata = metadata.load(directory)
        wanted.check(str(directory), self._metadata)
        super().__init__(self._metadata, wanted)
        self._file_lock = None if wanted.read_only else FileLock(directory / "writer.lock")
        try:
            self._metadata = metadata.load(directory)  # whoever had the lock until now may have changed it
            self._database = Database(directory, self.dim, self.num_thresholds)
            self._table = open_entries(self._database, self._metadata)
            if not wanted.read_only:
                self._metadata = upgraded(directory, self._table, self._metadata)
            self.next_id = self._metadata.next_id
            self._refresh()
            # Those of processes that ended before it was time to compact count, too.
            self._commits = sum(1 for _ in (directory / f"{ENTRIES}.lance" / "_versions").glob("*.manifest"))
        except BaseException:
            self.close()
            raise

    def _write(self, rows: Rows) -> IntArray:
        """Append where all ids are new, merge otherwise; one commit."""
        checks = checksums(rows)
        with self._committing("the entries were not written"):
            (self._table.append if rows.version.max() == 1 else self._table.merge)(rows, checks)
        self.next_id = max(self.next_id, int(rows.id.max()) + 1)
        return checks

    def _delete(self, ids: IntArray) -> None:
        """One commit, after the largest id is on record."""
        with self._committing("the entries were not deleted"):
            self._record_ids()
            self._table.delete(ids)

    def read(self, ids: IntArray) -> Rows:
        """From the table."""
        return self._table.read(ids)

    def stamps(self) -> tuple[IntArray, IntArray, IntArray]:
        """From the table."""
        return self._table.stamps()

    def load(self, ids: IntArray | None = None) -> Stamped:
        """From the table."""
        return self._table.load(ids)

    def snapshot(self, name: str) -> None:
        """A copy in a table of its own, which counts once the metadata name it.

        A tag on a version would cost nothing at first, but LanceDB 0.40 then keeps all later files of rows for good.
        """
        with failures("the snapshot was not made"):
            self._database.connection.drop_table(_snapshot(name), ignore_missing=True)  # what a crash has left
            self._database.create(_snapshot(name), self._table.raw.search().to_batches())
            self._record(snapshots=[*self.snapshots(), name])

    def snapshots(self) -> list[str]:
        """As the metadata list them."""
        return list(metadata.load(self._directory).snapshots)

    def _restore(self, name: str) -> None:
        """The rows of the copy in place of all others; one commit."""
        with self._committing("the snapshot was not restored"):
            copy = self._database.open(_snapshot(name))
            for _ in copy.whole_rows():
                """Before anything is written: all are as they were."""
            self._record_ids()
            self._table.replace(copy.whole_rows())

    def drop_snapshot(self, name: str) -> None:
        """First from the metadata, then the table."""
        with failures("the snapshot was not dropped"):
            self._record(snapshots=[other for other in self.snapshots() if other != name])
            self._database.connection.drop_table(_snapshot(name))

    def _refresh(self) -> None:
        """The newest version: of another process, or of a commit of this one that was taken for failed."""
        with failures(f"{self._directory} cannot be refreshed"):
            self._table.raw.checkout_latest()
        self.next_id = max(self.next_id, int(self.stamps()[0].max(initial=-1)) + 1)

    def summary(self) -> Summary:
        """Two columns, and the sizes of all files."""
        table = self._table.columns("version", "encoder")
        versions, encoders = (
            {row["values"]: row["counts"] for row in table[name].value_counts().to_pylist()}
            for name in ("version", "encoder")
        )
        return Summary(versions, encoders, _bytes(self._directory))

    def verify(self, uri: str) -> StoreCheck:
        """All bytes of all rows, those of snapshots too."""
        if not self._table.checked:
            raise StoreError(f"{uri} is of format 1, without checksums: open it to write once, which adds them")
        check, names = examine(uri, self._table), self.snapshots()
        of_snapshots = (examine_snapshot(uri, self._database, name, _snapshot(name)) for name in names)
        return replace(check, faults=check.faults + tuple(fault for faults in of_snapshots for fault in faults))

    def close(self) -> None:
        """Let others write."""
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
        if self._commits >= _COMPACT_AFTER and self._commits >= self._table.raw.count_rows() // _ROWS_A_COMMIT:
            self._commits = 0
            try:
                self._table.raw.optimize(cleanup_older_than=_KEEP)
            except Exception as error:  # the write is done and stays; compaction is tried again later
                _LOG.warning("%s was not compacted: %s", self._directory, error)


def _snapshot(name: str) -> str:
    return f"snapshot-{name}"


def _bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # files of old versions go at any time
            total += path.stat().st_size
    return total
