"""A new store from what is whole of a damaged one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from attnflow.knowledge.store import metadata
from attnflow.knowledge.store.check import StoreCheck
from attnflow.knowledge.store.checksums import checksums
from attnflow.knowledge.store.entry import Rows
from attnflow.knowledge.store.errors import NewerFormat, NotAStore, ReadOnly, StoreError, of_engine, reason
from attnflow.knowledge.store.lock import FileLock
from attnflow.knowledge.store.metadata import Metadata
from attnflow.knowledge.store.opening import create
from attnflow.knowledge.store.table import ENTRIES, Database, EntryTable

_TABLE: Final = f"{ENTRIES}.lance"


def rescue(source: Path, to: Path) -> StoreCheck:
    """Copy whole rows, with their versions and times; says what was lost. Snapshots are not copied."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise StoreError(f"{to} is there already: name a new folder for what is rescued")
    if not (source / _TABLE).is_dir():
        raise NotAStore(f"{source} is not a store of attnflow in a directory: it has no {_TABLE}")
    with ExitStack() as held:
        with suppress(ReadOnly):  # what cannot be written is not being written
            held.callback(FileLock(source / "writer.lock").release)
        faults = list[str]()
        place = _openable(source, Path(held.enter_context(tempfile.TemporaryDirectory())), faults)
        described = _described(source, place, faults)
        whole = _Whole(Database(place, described.dim, described.num_thresholds).open())

        def fill(entries: EntryTable) -> Metadata:
            for rows in whole.rows():
                (entries.append if rows.version.max() == 1 else entries.merge)(rows, checksums(rows))
            return replace(described, next_id=max(described.next_id, max(whole.versions, default=-1) + 1))

        create(to, described, fill)
    return StoreCheck(str(source), len(whole.versions), tuple(whole.damaged), (*faults, *whole.problems))


class _Whole:
    """Whole rows of a table, and what is wrong with the others."""

    def __init__(self, table: EntryTable) -> None:
        self._table = table
        self.versions: dict[int, int] = {}
        self.damaged: list[int] = []
        self.problems: list[str] = []

    def rows(self) -> Iterator[Rows]:
        """Piece by piece; of an id that is there more than once, the latest version comes last."""
        for piece in self._table.pieces():
            self.problems += [piece.problem] * bool(piece.problem)
            self.damaged += piece.rows.id[~piece.whole].tolist()
            chosen = dict[int, int]()
            for row in np.flatnonzero(piece.whole).tolist():
                key, version = int(piece.rows.id[row]), int(piece.rows.version[row])
                if version > self.versions.get(key, 0):
                    self.versions[key], chosen[key] = version, row
            if chosen:
                yield piece.rows.take(list(chosen.values()))


def _described(source: Path, place: Path, faults: list[str]) -> Metadata:
    """As the metadata say, or as the table is."""
    fields = {field.name: field.type for field in Database(place, 1, 0).open().raw.schema}
    try:
        widths = (
            int(fields["embedding"].list_size),
            int(fields["thresholds"].list_size if "thresholds" in fields else 0),
        )
    except (KeyError, AttributeError):
        raise NotAStore(f"{source} is not a store of attnflow: its table has no embeddings") from None
    try:
        described = metadata.load(source)
    except NewerFormat:
        raise
    except StoreError as error:
        faults.append(f"{error}; ids that were given out and deleted may be given out again")
        described = Metadata(*widths)
    return replace(described, dim=widths[0], num_thresholds=widths[1], snapshots=(), format=metadata.FORMAT)


def _openable(source: Path, aside: Path, faults: list[str]) -> Path:
    """The folder, or one of links to its files without the newest lists of rows, as many as cannot be read."""
    if (said := _problem(source)) is None:
        return source
    copy = aside / _TABLE
    shutil.copytree(source / _TABLE / "_versions", copy / "_versions")
    (copy / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
    for folder in ("data", "_deletions", "_transactions"):
        (copy / folder).symlink_to((source / _TABLE / folder).absolute(), target_is_directory=True)
    for manifest in sorted((copy / "_versions").glob("*.manifest"), key=_version, reverse=True):
        if _problem(aside) is None:
            faults.append(
                f"the newest list of rows cannot be read ({said}): an earlier one was taken, later writes are lost"
            )
            return aside
        manifest.unlink()
    raise StoreError(f"nothing of {source} can be rescued: no list of its rows can be read ({said})")


def _problem(place: Path) -> str | None:
    """Why the table of entries does not open."""
    try:
        table = Database(place, 1, 0).open().raw
        table.count_rows()
        if "embedding" not in table.schema.names:  # a list of zeros is one of no rows, and of no columns
            return "it has no embeddings"
    except BaseException as error:
        if not of_engine(error):
            raise
        return reason(error)
    return None


def _version(manifest: Path) -> int:
    """The version that a manifest of LanceDB describes, by its name: newer layouts count down from 2**64 - 1."""
    number = int(manifest.stem)
    return 2**64 - 1 - number if number >= 2**63 else number
