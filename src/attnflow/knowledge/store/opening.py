"""How a store in a directory comes about: it is made, brought to the format of today, and rid of what crashes left."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from attnflow.knowledge.store import log, metadata
from attnflow.knowledge.store.checksums import Digest
from attnflow.knowledge.store.durable import SyncedTree, make_folders, sync
from attnflow.knowledge.store.errors import Damaged, ReadOnly, StoreError, failures
from attnflow.knowledge.store.lock import FileLock
from attnflow.knowledge.store.log import State
from attnflow.knowledge.store.metadata import Metadata
from attnflow.knowledge.store.table import ENTRIES, Database, EntryTable, snapshot_table

_PARTS: Final = (f".{metadata.FILE}.*.part", f".{log.FILE}.*.part")
_MINUTE: Final = 60.0  # seconds after which what is being made is looked at, whether somebody still makes it


def create(directory: Path, described: Metadata, fill: Callable[[EntryTable], State] | None = None) -> None:
    """A store appears at its place as a whole, with what it is filled with, on the disk; or nothing does.

    It is made beside its place and renamed.
    """
    _sweep_beside(directory)
    beside = directory.with_name(f".{directory.name}.{uuid4().hex}.new")
    made: list[Path] = []
    try:
        made = make_folders(directory.parent)
        beside.mkdir()
        lock = FileLock(beside / "writer.lock")
    except OSError as error:
        _remove(made)
        raise ReadOnly(f"a store at {directory} cannot be made: {error.strerror}") from None
    try:
        with failures(f"a store at {directory} cannot be made"):
            database = Database(beside, described.dim, described.num_thresholds)
            database.create(ENTRIES)
            state = State() if fill is None else fill(database.open())
            log.start(beside, state)
            metadata.save(beside, replace(described, next_id=max(described.next_id, state.next_id)))
            SyncedTree(beside).sync()
            try:
                beside.rename(directory)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise  # else another was faster: then that store is opened
            sync(directory.parent)
    finally:
        lock.release()
        shutil.rmtree(beside, ignore_errors=True)
        if not directory.exists():
            _remove(made)


def open_entries(database: Database, described: Metadata) -> EntryTable:
    """The table of entries, which must be the one that is described."""
    with failures(f"{database.directory} cannot be opened", "Store.rescue copies what is whole"):
        table = database.open()
    wanted = database.arrow.schema(described.dim, described.num_thresholds)
    if not table.checked and described.format == 1:
        wanted = wanted.remove(wanted.get_field_index(database.arrow.CHECK))
    if table.raw.schema != wanted:
        raise Damaged(str(database.directory), f"{metadata.FILE} says dim={described.dim}, not so the entries")
    return table


def upgraded(directory: Path, table: EntryTable, described: Metadata) -> Metadata:
    """Rows of format 1 get their checksums, in one commit, and a log; then the metadata say so."""
    if described.format < metadata.FORMAT:
        with failures(f"{directory} has format {described.format} and cannot be brought to {metadata.FORMAT}"):
            if not table.checked:
                table.replace(table.whole_rows())
            SyncedTree(directory).sync()
            ids, updated, checks = table.stamps()
            next_id = max(described.next_id, int(ids.max(initial=-1)) + 1)
            log.start(directory, State(Digest().plus(checks), int(updated.max(initial=0)), next_id))
            described = replace(described, format=metadata.FORMAT)
            metadata.save(directory, described)
            sync(directory)
    return described


def leftovers(directory: Path, snapshots: Sequence[str]) -> tuple[str, ...]:
    """What calls that were cut short have left in a store."""
    return tuple(sorted(str(path.relative_to(directory)) for path in _left(directory, snapshots)))


def sweep(directory: Path, snapshots: Sequence[str]) -> None:
    """Remove it; only the one who writes may."""
    for path in _left(directory, snapshots):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _left(directory: Path, snapshots: Sequence[str]) -> list[Path]:
    """Tables that no metadata name, and files that were not renamed to what they were to be."""
    tables = {f"{name}.lance" for name in (ENTRIES, *map(snapshot_table, snapshots))}
    left = [path for path in directory.glob("*.lance") if path.name not in tables]
    left += [path for pattern in _PARTS for path in directory.glob(pattern)]
    left += [path for table in tables for path in (directory / table).glob("*/.tmp*")]
    return left + [path for table in tables for path in (directory / table).glob("_versions/*.manifest#*")]


def _sweep_beside(directory: Path) -> None:
    """What crashes have left of stores that were being made here: old enough, and locked by nobody."""
    for path in directory.parent.glob(f".{directory.name}.{'[0-9a-f]' * 32}.new"):
        with suppress(OSError, StoreError):
            if path.is_symlink() or time.time() - os.stat(path).st_mtime < _MINUTE:
                continue
            lock = FileLock(path / "writer.lock")
            shutil.rmtree(path, ignore_errors=True)
            lock.release()


def _remove(made: Sequence[Path]) -> None:
    """Folders that were made for nothing, as far as nobody else uses them."""
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()
