"""What a backend must do: keep rows durably (`Engine`) and search them (`Searcher`). `Store` does the rest."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow.knowledge.store.entry import Found
from attnflow.knowledge.store.rows import Flags, Floats, Rows, Stamped

Mode = Literal["exact", "approximate"]
SearchMode = Literal["auto", "exact", "approximate"]


class Summary(NamedTuple):
    """Counts of rows by version and by encoder, and bytes on disk (None: on a server)."""

    versions: dict[int, int]
    encoders: dict[str | None, int]
    bytes_on_disk: int | None


@runtime_checkable
class Engine(Protocol):
    """Keeps rows. Every writing method is one step: when it raises, or the process dies in it, nothing has changed.

    Attributes:
        dim: width of an embedding.
        num_thresholds: threshold columns.
    """

    dim: int
    num_thresholds: int

    @property
    def next_id(self) -> int:
        """Above every id that the store has held; survives deletes, restores and reopening."""
        ...

    def write(self, rows: Rows) -> None:
        """Insert rows, and replace those whose ids are there already."""
        ...

    def delete(self, ids: IntArray) -> None:
        """Drop rows that exist."""
        ...

    def read(self, ids: IntArray) -> Rows:
        """Those of the rows that exist, in any order."""
        ...

    def stamps(self) -> tuple[IntArray, IntArray]:
        """Ids of all rows, and when each was updated."""
        ...

    def load(self, ids: IntArray | None = None) -> Stamped:
        """What a search needs of all rows, or of those of these that exist."""
        ...

    def snapshot(self, name: str) -> None:
        """Keep the present rows under a new name."""
        ...

    def snapshots(self) -> list[str]:
        """Names of snapshots, oldest first."""
        ...

    def restore(self, name: str) -> None:
        """Make the rows what they were at a snapshot, which is kept."""
        ...

    def drop_snapshot(self, name: str) -> None:
        """Forget a snapshot."""
        ...

    def refresh(self) -> None:
        """See what other processes have written."""
        ...

    def summary(self) -> Summary:
        """Counts for `Store.stats`."""
        ...

    def close(self) -> None:
        """Let go of files, connections and locks."""
        ...


@runtime_checkable
class Searcher(Protocol):
    """Finds rows, and knows which there are. It follows the engine: `put` and `drop` come after the commit."""

    @property
    def mode(self) -> Mode:
        """How it searches."""
        ...

    @property
    def reason(self) -> str:
        """Why it searches so."""
        ...

    def __len__(self) -> int: ...

    def ids(self) -> IntArray:
        """Ids of all rows."""
        ...

    def holds(self, ids: IntArray) -> Flags:
        """Which of these ids there are."""
        ...

    def vectors(self, ids: IntArray | None = None) -> Floats:
        """[embedding | thresholds] of rows in the order of `ids`; of all at one moment, by ascending id.

        Raises:
            KeyError: an id is unknown.
        """
        ...

    def put(self, rows: Rows) -> None:
        """Rows were written."""
        ...

    def drop(self, ids: IntArray) -> None:
        """Rows were deleted."""
        ...

    def synchronise(self) -> None:
        """Become equal to the engine, whatever has changed there."""
        ...

    def search(self, queries: Tensor, k: int, threshold_column: int | None, mode: Mode | None) -> Found:
        """The best k rows for queries [..., dim]."""
        ...

    def range(self, queries: Tensor, threshold: float, threshold_column: int | None, mode: Mode | None) -> Found:
        """All rows that score above a threshold."""
        ...

    def recall(self, queries: Tensor, k: int, threshold_column: int | None) -> float:
        """The share of the true best k that a search finds."""
        ...

    def calibrate(self, queries: Tensor, k: int, threshold_column: int | None) -> None:
        """Make an approximate search reach the target recall on these queries."""
        ...

    def reindex(self) -> None:
        """Build the index anew."""
        ...
