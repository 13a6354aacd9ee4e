"""Whether the files of a store hold what was written to them."""

from __future__ import annotations

from dataclasses import dataclass

from attnflow._core.checks import preview
from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.knowledge.store.checksums import Digest
from attnflow.knowledge.store.errors import of_engine, reason
from attnflow.knowledge.store.recent import Recent, others
from attnflow.knowledge.store.table import Database, EntryTable, snapshot_table


@dataclass(frozen=True)
class StoreCheck(Result):
    """What reading every byte of a store's rows has shown.

    Attributes:
        uri: where it is.
        count: number of entries that are whole.
        damaged: ids of entries whose bytes are not those that were written.
        faults: what else is wrong, one sentence each: rows that cannot be read, rows that are missing, snapshots.
        leftovers: files of calls that were cut short; they do no harm, and the next writer removes them.
    """

    uri: str
    count: int
    damaged: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all is as it was written."""
        return not self.damaged and not self.faults

    def __str__(self) -> str:
        whole = f"{self.uri}: {plural(self.count, 'entry', 'entries')} whole"
        damaged = [f"damaged: {preview(self.damaged)}"] if self.damaged else []
        left = [f"left over: {', '.join(self.leftovers)}"] if self.leftovers else []
        return "\n".join([whole, *damaged, *self.faults, *left])


def examine(uri: str, entries: EntryTable, recent: Recent, written: Digest) -> StoreCheck:
    """Every row of a table, with the recent ones in place of theirs, against its checksum, and all against theirs."""
    _, checks, hidden = recent.rows()
    there, damaged, faults = Digest().plus(checks), list[int](), list[str]()
    for piece in entries.pieces():
        seen = others(piece.rows.id, hidden)
        there = there.plus(piece.checks[piece.whole & seen])
        damaged += piece.rows.id[~piece.whole & seen].tolist()
        faults += [piece.problem] * bool(piece.problem)
    if there != written and not damaged and not faults:
        faults.append(f"{written.rows:,} entries were written, and {there.rows:,} are there, or others")
    return StoreCheck(uri, there.rows, tuple(damaged), tuple(faults))


def examine_snapshot(uri: str, database: Database, name: str) -> tuple[str, ...]:
    """What is wrong with a snapshot, in a sentence; nothing where it is whole."""
    try:
        wrong = sum(
            int((~piece.whole).sum()) + bool(piece.problem) for piece in database.open(snapshot_table(name)).pieces()
        )
    except BaseException as error:
        if not of_engine(error):
            raise
        return (f"snapshot {name!r} cannot be opened: {reason(error)}",)
    return (f"snapshot {name!r} is damaged: {plural(wrong, 'entry', 'entries')} of it",) if wrong else ()
