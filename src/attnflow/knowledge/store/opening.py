"""How a store in a directory comes about: it is made, or brought to the format of today."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from attnflow.knowledge.store import metadata
from attnflow.knowledge.store.errors import Damaged, ReadOnly, failures
from attnflow.knowledge.store.metadata import Metadata
from attnflow.knowledge.store.table import ENTRIES, Database, EntryTable


def create(directory: Path, described: Metadata, fill: Callable[[EntryTable], Metadata] | None = None) -> None:
    """A store appears at its place as a whole, with what it is filled with: it is made beside it and renamed."""
    beside = directory.with_name(f".{directory.name}.{uuid4().hex}.new")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
    except OSError as error:
        raise ReadOnly(f"a store at {directory} cannot be made: {error.strerror}") from None
    try:
        with failures(f"a store at {directory} cannot be made"):
            database = Database(beside, described.dim, described.num_thresholds)
            database.create(ENTRIES)
            if fill is not None:
                described = fill(database.open())
            metadata.save(beside, described)
            try:
                beside.rename(directory)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise  # else another was faster: then that store is opened
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def open_entries(database: Database, described: Metadata) -> EntryTable:
    """The table of entries, which must be the one that is described."""
    with failures(f"{database.directory} cannot be opened", "Store.rescue copies what is whole"):
        table = database.open()
    named = {field.name: field.type for field in table.raw.schema}
    wanted = database.arrow.schema(described.dim, described.num_thresholds)
    if table.checked or described.format > 1:
        fits = table.raw.schema == wanted
    else:
        fits = named == {field.name: field.type for field in wanted if field.name != database.arrow.CHECK}
    if not fits:
        raise Damaged(str(database.directory), f"{metadata.FILE} says dim={described.dim}, not so the entries")
    return table


def upgraded(directory: Path, table: EntryTable, described: Metadata) -> Metadata:
    """Rows of format 1 get their checksums, in one commit; then the metadata say so."""
    if described.format < metadata.FORMAT:
        if not table.checked:
            with failures(f"{directory} has format {described.format} and cannot be brought to {metadata.FORMAT}"):
                table.replace(table.whole_rows())
        described = replace(described, format=metadata.FORMAT)
        metadata.save(directory, described)
    return described
