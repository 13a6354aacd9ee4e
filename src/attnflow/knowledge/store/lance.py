"""Rows in a directory, in the format of LanceDB: a table, and a log of the writes since its last commit."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from attnflow._core.checks import IntArray
from attnflow.knowledge.store import metadata
from attnflow.knowledge.store.cached_index import CachedIndex
from attnflow.knowledge.store.check import StoreCheck, examine, examine_snapshot
from attnflow.knowledge.store.checksums import Digest, checksums
from attnflow.knowledge.store.compaction import Compaction
from attnflow.knowledge.store.durable import SyncedTree, sync
from attnflow.knowledge.store.entry import Rows, Stamped, Summary
from attnflow.knowledge.store.errors import Damaged, StoreError, failures, of_engine, reason
from attnflow.knowledge.store.lock import FileLock
from attnflow.knowledge.store.log import Kind, Record, State, WriteLog
from attnflow.knowledge.store.metadata import Wanted
from attnflow.knowledge.store.opening import create, leftovers, open_entries, sweep, upgraded
from attnflow.knowledge.store.recent import Recent, others
from attnflow.knowledge.store.recovery import at_agreed_version
from attnflow.knowledge.store.table import ENTRIES, Database, packages, snapshot_table

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
_LOGGED = 4 << 20  # bytes of the log that become one commit
_DIRECT = 1 << 20  # bytes that are a commit of their own
_LOOKS = 100  # of a reader, while others write


class LanceBackend(CachedIndex):
    """A table, one row an entry, under the writes of a log; `table.py` and `log.py` say how either is kept."""

    def __init__(self, directory: Path, wanted: Wanted) -> None:
        packages()
        with failures(f"{directory} cannot be looked at"):
            absent = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        if absent:
            create(directory, wanted.new(str(directory)))
        self._directory, self._writes = directory, not wanted.read_only
        self._metadata = metadata.load(directory)
        wanted.check(str(directory), self._metadata)
        super().__init__(self._metadata, wanted)
        self._file_lock = FileLock(directory / "writer.lock") if self._writes else None
        self._log = WriteLog(directory, wanted.read_only)
        self._recent = Recent(self.dim + self.num_thresholds)
        self._state, self._announced = State(), State()  # what is there; or this, where a commit was under way
        self._commits, self._edition = threading.RLock(), 0
        self._flush_at = _LOGGED
        self._sound = False  # what is there is what was written
        try:
            if self._writes:
                at_agreed_version(directory, self._attach)
                sweep(directory, self._metadata.snapshots)
                with failures(f"{directory} cannot be opened to be written"):
                    self._flush()
            else:
                self._attach()
        except BaseException:
            self._release()
            raise

    def _attach(self) -> None:
        """The newest version of the table under the log, which agree on what there is."""
        self._metadata = metadata.load(self._directory)  # whoever had the lock until now may have changed it
        self._database = Database(self._directory, self.dim, self.num_thresholds)
        self._table = open_entries(self._database, self._metadata)
        if self._writes:
            self._metadata = upgraded(self._directory, self._table, self._metadata)
            self._tree = SyncedTree(self._directory / f"{ENTRIES}.lance")
            self._compaction = Compaction(self._database, self._table, self._tree)
        self._whole = False  # an index of another version is of no use
        self._synchronise_all()
        if self._writes:
            self._tree.drop_cut_short()

    @property
    def next_id(self) -> int:
        """On record with every write."""
        return self._state.next_id

    @property
    def clock(self) -> int:
        """The latest time that a row was given."""
        return self._state.clock

    def _write(self, rows: Rows) -> IntArray:
        """To the log; many rows at once are a commit of the table."""
        checks = checksums(rows)
        digest = self._without(rows.id[self.holds(rows.id)]).plus(checks)
        next_id = max(self.next_id, int(rows.id.max()) + 1)
        state = State(digest, max(self.clock, int(rows.updated.max())), next_id)
        with failures("the entries were not written"):
            body = self._table.encode(rows, checks) if rows.vector.nbytes <= _DIRECT else b""
            if not 0 < len(body) <= _DIRECT:
                self._flush()
                write = self._table.append if rows.version.max() == 1 else self._table.merge
                self._commit(state, rows.vector.nbytes, lambda: write(rows, checks))
            else:
                self._log.append(Record(Kind.PUT, state, body))
                self._recent.put(rows, checks)
                self._state = state
        self._flush_if_due()
        return checks

    def _delete(self, ids: IntArray) -> None:
        """Likewise."""
        state = self._state._replace(digest=self._without(ids))
        with failures("the entries were not deleted"):
            if ids.nbytes > _DIRECT:
                self._flush()
                self._commit(state, 0, lambda: self._table.delete(ids))
            else:
                self._log.append(Record(Kind.DELETE, state, ids.tobytes()))
                self._recent.drop(ids)
                self._state = state
        self._flush_if_due()

    def _restore(self, name: str) -> None:
        """The rows of the copy in place of all others; one commit."""
        with failures("the snapshot was not restored"):
            copy, digest, clock, next_id = self._database.open(snapshot_table(name)), Digest(), self.clock, self.next_id
            for piece in copy.whole_rows():
                digest = digest.plus(checksums(piece.rows))
                clock = max(clock, int(piece.rows.updated.max(initial=0)))
                next_id = max(next_id, int(piece.rows.id.max(initial=-1)) + 1)
            self._flush()
            size = digest.rows * 4 * (self.dim + self.num_thresholds)
            self._commit(State(digest, clock, next_id), size, lambda: self._table.replace(copy.whole_rows()))
        self._flush_if_due()

    def read(self, ids: IntArray) -> Rows:
        """Recent rows, and those of the table."""

        def look() -> Rows:
            rows, _, hidden = self._recent.rows(ids)
            return Rows.joined([self._table.read(ids[others(ids, hidden)]), rows])

        return self._at_one_moment(look)

    def stamps(self) -> tuple[IntArray, IntArray, IntArray]:
        """Of the table and of recent rows."""
        ids, updated, checks = self._table.stamps()
        nothing = np.empty((len(ids), 0), dtype=np.float32)
        rows = self._recent.over(Stamped(ids, updated, nothing, checks))
        self._agree(rows.checks)
        return rows.ids, rows.updated, rows.checks

    def load(self, ids: IntArray | None = None) -> Stamped:
        """From the table, and recent rows."""
        return self._recent.over(self._table.load(ids), ids)

    def summary(self) -> Summary:
        """Three columns, and the sizes of all files."""

        def look() -> tuple[Counter[int], Counter[str | None]]:
            rows, _, hidden = self._recent.rows()
            table = self._table.columns("id", "version", "encoder")
            stay = others(table["id"].to_numpy(), hidden)
            versions, encoders = (Counter(table.filter(stay)[name].to_pylist()) for name in ("version", "encoder"))
            return versions + Counter(rows.version.tolist()), encoders + Counter(rows.encoder.tolist())

        return Summary(*self._at_one_moment(look), _bytes(self._directory))

    def snapshot(self, name: str) -> None:
        """A copy in a table of its own, which counts once the metadata name it.

        A tag on a version would cost nothing at first, but LanceDB 0.40 then keeps all later files of rows for good.
        """
        with failures("the snapshot was not made"):
            self._flush()
            try:
                self._database.create(snapshot_table(name), self._table.raw.search().to_batches())
                SyncedTree(self._directory / f"{snapshot_table(name)}.lance").sync()
                self._record(snapshots=[*self.snapshots(), name])
            except BaseException:
                sweep(self._directory, self.snapshots())
                raise

    def snapshots(self) -> list[str]:
        """As the metadata list them."""
        return list(metadata.load(self._directory).snapshots)

    def drop_snapshot(self, name: str) -> None:
        """First from the metadata, then the table."""
        with failures("the snapshot was not dropped"):
            self._record(snapshots=[other for other in self.snapshots() if other != name])
        sweep(self._directory, self._metadata.snapshots)

    def verify(self, uri: str) -> StoreCheck:
        """All bytes of all rows, those of snapshots too."""
        if not self._table.checked:
            raise StoreError(f"{uri} is of format 1, without checksums: open it to write once, which adds them")
        check, names = examine(uri, self._table, self._recent, self._state.digest), self.snapshots()
        of_snapshots = (examine_snapshot(uri, self._database, name) for name in names)
        faults = check.faults + tuple(fault for faults in of_snapshots for fault in faults)
        return replace(check, faults=faults, leftovers=leftovers(self._directory, names))

    def compact(self) -> None:
        """Everything that is not needed goes."""
        with failures(f"{self._directory} was not compacted"):
            self._flush()
            with self._changing_table():
                self._compaction.run()
        sweep(self._directory, self._metadata.snapshots)

    def refresh(self) -> None:
        """What others have written, then the index of it; rows that have vanished are noticed."""
        try:
            self._synchronise_all()
            if self._writes:
                self._tree.drop_cut_short()
        except StoreError:
            if not self._writes:
                raise
            self._heal()

    def _synchronise_all(self) -> None:
        self._sound = False
        super().refresh()
        self._agree(self._labels.used[:, 2].numpy())
        self._sound = True

    def _heal(self) -> None:
        """Back to the newest version that is what was written, as where a full disk has cut a commit short."""
        with self._changing_table():
            at_agreed_version(self._directory, self._attach)

    def _agree(self, checks: IntArray) -> None:
        """Raise where rows of these checksums are not what was written."""
        if not self._table.checked:
            return
        there = Digest().plus(checks)
        if there == self._announced.digest:
            self._state = self._announced
        elif there != self._state.digest:
            expected, rows = self._state.digest.rows, there.rows
            what = f"{expected:,} entries were written and {rows:,} are there"
            raise Damaged(
                str(self._directory), what if expected != rows else "other entries are there than were written"
            )

    def close(self) -> None:
        """All writes go to the table, few files stay; then others may write."""
        if self._writes and self._sound:
            try:
                self._refresh()
                self._flush()
                self._compaction.run_if_due(closing=True)
            except BaseException as error:
                if not of_engine(error):
                    raise
                _LOG.warning("%s was closed with writes left in its log: %s", self._directory, reason(error))
        self._release()

    def _release(self) -> None:
        self._writes = False
        self._log.close()
        if self._file_lock is not None:
            self._file_lock.release()

    def _refresh(self) -> None:
        """The newest version of the table under the log that belongs to it: neither was replaced meanwhile."""
        with failures(f"{self._directory} cannot be refreshed"), self._changing_table():
            if self._metadata.format < metadata.FORMAT:
                self._metadata = metadata.load(self._directory)
                self._table.raw.checkout_latest()
            for _ in range(_LOOKS if self._metadata.format == metadata.FORMAT else 0):
                if self._log.reopen() or self._writes:
                    self._log.rewind()
                self._table.raw.checkout_latest()
                self._follow(self._log.read())
                if self._log.is_current():
                    return
        if self._metadata.format == metadata.FORMAT:
            raise StoreError(f"{self._directory} is written too fast to be read at one moment: call again")

    def _follow(self, records: list[Record]) -> None:
        for record in records:
            if record.kind == Kind.COMMIT:
                self._state, self._announced = State.decode(record.body), record.state
                continue
            if record.kind == Kind.START:
                self._recent.clear()
            elif record.kind == Kind.PUT:
                self._recent.put(*self._table.decode(record.body))
            elif record.kind == Kind.DELETE:
                self._recent.drop(np.frombuffer(record.body, dtype=np.int64))
            self._state = self._announced = record.state

    def _flush_if_due(self) -> None:
        """The write is done, and stays in the log where this fails; it is tried again later."""
        try:
            if self._log.size >= self._flush_at:
                self._flush()
            self._flush_at = _LOGGED
            if not self._compaction.run_if_due():
                self._heal()
        except BaseException as error:
            if not of_engine(error):
                raise
            self._flush_at = 2 * self._log.size
            _LOG.warning("%s keeps writes in its log: %s", self._directory, reason(error))
            self._heal()

    def _flush(self) -> None:
        """The writes of the log into the table: cut short anywhere, the log is there and is read again over it."""
        if not len(self._recent):
            return
        rows, checks, ids = self._recent.rows()
        with self._changing_table():
            present = self._table.present(ids)
            if len(gone := np.setdiff1d(present, rows.id)):
                self._table.delete(gone)
            if len(rows):
                (self._table.merge if np.isin(rows.id, present).any() else self._table.append)(rows, checks)
            self._tree.sync()
            self._log.restart(self._state)
            self._recent.clear()
        self._compaction.count(rows.vector.nbytes)

    def _commit(self, state: State, size: int, step: Callable[[], None]) -> None:
        """A change of the table in one step, which the log announces: after a crash either state is right."""
        self._log.append(Record(Kind.COMMIT, state, self._state.encode()))
        with self._changing_table():
            step()
            self._tree.sync()
        with suppress(OSError):  # the table is as it was announced, and nothing is lost but the word for it
            self._log.append(Record(Kind.DONE, state))
        self._state = self._announced = state
        self._compaction.count(size)

    @contextmanager
    def _changing_table(self) -> Generator[None]:
        with self._commits:
            self._edition += 1
            try:
                yield
            finally:
                self._edition += 1

    def _at_one_moment(self, look: Callable[[], _T]) -> _T:
        """What is seen while the table does not change under it."""
        for _ in range(8):
            if (edition := self._edition) % 2:
                break  # it changes now
            try:
                seen = look()
            except StoreError:
                if edition == self._edition:
                    raise
            else:
                if edition == self._edition:
                    return seen
        with self._commits:
            return look()

    def _without(self, ids: IntArray) -> Digest:
        """The digest of the rows without those of these ids, which are there."""
        return self._state.digest.minus(self._labels.used[self._slots_of(ids), 2].numpy())

    def _record(self, **changes: Any) -> None:
        changed = replace(self._metadata, **changes)
        metadata.save(self._directory, changed)
        sync(self._directory)
        self._metadata = changed


def _bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # files of old versions go at any time
            total += path.stat().st_size
    return total
