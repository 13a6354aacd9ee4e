"""Fewer files: small ones become large ones, and versions that nobody looks at any more go.

LanceDB writes a file of rows and a list of all files with every commit, and removes none by itself. What is removed is
on the disk in its new form first.
"""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Final

from attnflow.knowledge.store.durable import SyncedTree
from attnflow.knowledge.store.errors import of_engine, reason
from attnflow.knowledge.store.table import ENTRIES, Database, EntryTable

KEEP: Final = datetime.timedelta(minutes=10)  # versions that readers of other processes may still be looking at

_LOG = logging.getLogger(__name__)
_FOREVER: Final = datetime.timedelta(days=36_500)
_NOW: Final = datetime.timedelta(milliseconds=1)  # LanceDB warns of less
_FEW = 8  # commits that need no compaction
_MANY = 128  # commits that need one, however little they hold: each list of files names all of them
_SHARE: Final = 4  # rows are written anew when a quarter as many bytes have come: at most 5 bytes for each
_SMALL: Final = 64 << 20  # bytes that are compacted whenever a store is closed


class Compaction:
    """Of one table, on a budget of bytes."""

    def __init__(self, database: Database, table: EntryTable, tree: SyncedTree) -> None:
        self._database, self._table, self._tree = database, table, tree
        self._versions = database.directory / f"{ENTRIES}.lance" / "_versions"
        self._commits = max(0, sum(1 for _ in self._versions.glob("*.manifest")) - 1)  # those of earlier processes, too
        self._bytes = 0
        self._looked = False  # since the last commit

    def count(self, written: int) -> None:
        """One more commit, of so many bytes."""
        self._commits += 1
        self._bytes += written
        self._looked = False

    def is_due(self, closing: bool = False) -> bool:
        """Whether it pays now."""
        if self._commits < 2:
            return False
        size = self._table.raw.count_rows() * 4 * sum(self._table.widths)
        if closing and size <= _SMALL:
            return True
        return self._commits >= _MANY or (self._commits >= _FEW and self._bytes * _SHARE >= size)

    def run(self, keep: datetime.timedelta = _NOW) -> None:
        """Write small files together, and drop versions that are older than `keep`."""
        try:
            self._run(keep)
        except BaseException as error:
            if not of_engine(error) or not self._remove_unreadable():
                raise
            self._run(keep)
        self._commits = self._bytes = 0

    def run_if_due(self, closing: bool = False) -> bool:
        """False where it fails: the writes are done all the same, and it is tried again with a later one."""
        if self._looked and not closing:
            return True
        self._looked = True
        try:
            if self.is_due(closing):
                self.run(KEEP)
        except BaseException as error:
            if not of_engine(error):
                raise
            self._commits = self._bytes = 0
            _LOG.warning("%s was not compacted: %s", self._database.directory, reason(error))
            return False
        return True

    def _run(self, keep: datetime.timedelta) -> None:
        self._table.raw.optimize(cleanup_older_than=_FOREVER)
        self._tree.sync()  # before what it was made of goes; nobody else writes: files of no version are of nobody
        self._table.raw.optimize(cleanup_older_than=keep, delete_unverified=True)

    def _remove_unreadable(self) -> bool:
        """Lists of files of old versions that are damaged: they serve nobody, and keep others from being dropped."""
        removed = False
        for path in self._versions.glob("*.manifest"):
            number = version(path)
            if number == self._table.raw.version:
                continue
            try:
                self._database.open().raw.checkout(number)
            except BaseException as error:
                if not of_engine(error):
                    raise
                _LOG.warning("%s: the list of files of version %d was damaged, and is removed", path.parent, number)
                path.unlink(missing_ok=True)
                removed = True
        return removed


def version(manifest: Path) -> int:
    """The version that a manifest of LanceDB describes, by its name: newer layouts count down from 2**64 - 1."""
    number = int(manifest.stem)
    return 2**64 - 1 - number if number >= 2**63 else number
