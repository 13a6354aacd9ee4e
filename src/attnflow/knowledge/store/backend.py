"""What a backend of a store does: it keeps rows durably and searches them. `Store` does the rest."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow.knowledge.index import Neighbours
from attnflow.knowledge.store.rows import Flags, Floats, Rows

Mode = Literal["exact", "approximate"]
SearchMode = Literal["auto", "exact", "approximate"]


class Summary(NamedTuple):
    """Counts of rows by version and by encoder, and bytes on disk (None: on a server)."""

    versions: dict[int, int]
    encoders: dict[str | None, int]
    bytes_on_disk: int | None


@runtime_checkable
class Backend(Protocol):
    """Keeps and searches rows. Every writing method is one step: when it raises, or the process dies, nothing changed.

    A method that was cut short after its step may leave what is searched behind what is kept, until `refresh`.

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
        """Ids of all rows, in any order."""
        ...

    def holds(self, ids: IntArray) -> Flags:
        """Which of these ids there are."""
        ...

    def read(self, ids: IntArray) -> Rows:
        """Those of the rows that exist, in any order."""
        ...

    def vectors(self, ids: IntArray | None = None) -> Floats:
        """[embedding | thresholds] of rows in the order of `ids`; of all at one moment, by ascending id.

        Raises:
            KeyError: an id is unknown.
        """
        ...

    def write(self, rows: Rows) -> None:
        """Insert rows, and replace those whose ids are there already."""
        ...

    def delete(self, ids: IntArray) -> None:
        """Drop rows that exist."""
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
        """See what other processes have written, and search what is kept."""
        ...

    def summary(self) -> Summary:
        """Counts for `Store.stats`."""
        ...

    def search(self, queries: Tensor, k: int, threshold_column: int | None, mode: Mode | None) -> Neighbours:
        """The best k rows for queries [..., dim]."""
        ...

    def range(self, queries: Tensor, threshold: float, threshold_column: int | None, mode: Mode | None) -> Neighbours:
        """All rows that score above a threshold."""
        ...

    def recall(self, queries: Tensor, k: int, threshold_column: int | None) -> float:
        """The share of the true best k that a search gives."""
        ...

    def calibrate(self, queries: Tensor, k: int, threshold_column: int | None) -> None:
        """Make an approximate search reach the target recall on these queries."""
        ...

    def reindex(self) -> None:
        """Build the index anew."""
        ...

    def close(self) -> None:
        """Let go of files, connections and locks."""
        ...
