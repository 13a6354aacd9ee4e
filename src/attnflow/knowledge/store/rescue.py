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

from attnflow.knowledge.store import log, metadata
from attnflow.knowledge.store.check import StoreCheck
from attnflow.knowledge.store.checksums import Digest, checksums
from attnflow.knowledge.store.compaction import version
from attnflow.knowledge.store.entry import Flags, Rows
from attnflow.knowledge.store.errors import NewerFormat, NotAStore, ReadOnly, StoreError, of_engine, reason
from attnflow.knowledge.store.lock import FileLock
from attnflow.knowledge.store.log import Kind, State
from attnflow.knowledge.store.metadata import Metadata
from attnflow.knowledge.store.opening import create
from attnflow.knowledge.store.recent import Recent, others
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
        table = Database(place, described.dim, described.num_thresholds).open()
        recent, state, announced = _logged(source, table, faults)
        whole = _Whole(table, recent)

        def fill(entries: EntryTable) -> State:
            for rows in whole.rows():
                (entries.append if rows.version.max() == 1 else entries.merge)(rows, checksums(rows))
            ids, updated, checks = entries.stamps()
            whole.digest = Digest().plus(checks)
            clock = max(announced.clock, int(updated.max(initial=0)))
            return State(whole.digest, clock, max(announced.next_id, int(ids.max(initial=-1)) + 1))

        create(to, described, fill)
    lost = bool(faults or whole.problems or whole.damaged)
    if table.checked and not lost and whole.digest not in (state.digest, announced.digest):
        found = f"{whole.digest.rows:,}, or others, are there"
        faults.append(f"{state.digest.rows:,} entries were written, and {found}")
    return StoreCheck(str(source), len(whole.versions), tuple(whole.damaged), (*faults, *whole.problems))


class _Whole:
    """Whole rows of a table under recent ones, and what is wrong with the others."""

    def __init__(self, table: EntryTable, recent: Recent) -> None:
        self._table, self._recent = table, recent
        self.digest = Digest()
        self.versions: dict[int, int] = {}
        self.damaged: list[int] = []
        self.problems: list[str] = []

    def rows(self) -> Iterator[Rows]:
        """Piece by piece; of an id that is there more than once, the latest version comes last."""
        recent, _, hidden = self._recent.rows()
        for piece in self._table.pieces():
            self.problems += [piece.problem] * bool(piece.problem)
            seen = others(piece.rows.id, hidden)
            self.damaged += piece.rows.id[~piece.whole & seen].tolist()
            if (rows := self._newest(piece.rows, piece.whole & seen)) is not None:
                yield rows
        if (rows := self._newest(recent, np.ones(len(recent), dtype=np.bool_))) is not None:
            yield rows

    def _newest(self, rows: Rows, chosen: Flags) -> Rows | None:
        places = dict[int, int]()
        for place in np.flatnonzero(chosen).tolist():
            key, version = int(rows.id[place]), int(rows.version[place])
            if version > self.versions.get(key, 0):
                self.versions[key], places[key] = version, place
        return rows.take(list(places.values())) if places else None


def _logged(source: Path, table: EntryTable, faults: list[str]) -> tuple[Recent, State, State]:
    """The writes of the log that are whole, what the store was after the last, and what was to become of it."""
    recent, state, announced = Recent(sum(table.widths)), State(), State()
    try:
        data = (source / log.FILE).read_bytes()
    except OSError as error:
        if table.checked:
            faults.append(f"{log.FILE} cannot be read ({error.strerror}): the latest writes are lost")
        return recent, state, announced
    for record, _ in log.scan(data):
        if not record.whole:
            faults.append(f"{log.FILE} has other bytes than were written: some of the latest writes are lost")
            continue
        if record.kind == Kind.PUT:
            recent.put(*table.decode(record.body))
        elif record.kind == Kind.DELETE:
            recent.drop(np.frombuffer(record.body, dtype=np.int64))
        announced = record.state
        state = State.decode(record.body) if record.kind == Kind.COMMIT else announced
    return recent, state, announced


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
    for manifest in sorted((copy / "_versions").glob("*.manifest"), key=version, reverse=True):
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
