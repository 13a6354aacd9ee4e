"""One index over all entries: what is searched, by which search, and why."""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import index_array, integer
from attnflow.knowledge.certificate import Certificate, Neighbours
from attnflow.knowledge.index import arguments, calibration
from attnflow.knowledge.index.exact import Floats, GrowingMatrix, above, best, of_column, padded
from attnflow.knowledge.index.lists import faiss
from attnflow.knowledge.index.readers_writer import ReadersWriter
from attnflow.knowledge.index.upkeep import SearchMode, Upkeep

Mode = Literal["exact", "approximate"]

MOST: Final = 1 << 20  # entries asked for where there are fewer: results have room for all k


class EntryIndex:
    """Search of the best entries for a query, for all layers by one index (knowledge, sec. 4, corrected).

    A row is [e | B_1(e) .. B_L(e)]: an entry and its threshold in each layer (or head). A query of column l is
    [q ; onehot(l)], so that the inner product is score + threshold exactly. Rows have slots 0 to n - 1; removing one
    moves the last row into the hole, and says so.

    Exact search computes all scores in float32. Approximate search keeps the rows a second time, in lists of near
    ones (faiss, inverted lists), of which each query reads as many as it takes to reach `target_recall`; where that is
    no slower, and where more entries are asked for than was measured (512), it reads all rows. How many lists it takes
    is measured on queries like any rows, like rare ones, like the latest, in random directions and on sums of rows.

    It stays so under changes: the latest rows, up to 8 sqrt(n), are in no list, and every query reads them. When there
    are more they are put into lists, into new ones if they are unlike all earlier rows, and what queries like them need
    is measured; after changes of an eighth of the rows all is measured anew, and after as many changes as there
    were rows, or when queries read more than twice as much as at first, the lists are made anew. That costs about
    O(n^0.25 x width) a row on average, at once for the call that is hit. Fewer than 20,000 entries are searched
    exactly ("auto"), also when there were more.

    Threads: any number may search while one changes rows; a search sees all of a change or nothing of it.

    Attributes:
        reason: why `mode` is what it is, with the recall that is measured now.

    Args:
        dim: width of an entry and a query.
        num_thresholds: columns of thresholds.
        search: "exact"; "approximate", needs faiss; "auto": approximate from 20,000 entries on, unless a query would
            have to read more than a tenth of them to reach the recall (random vectors do that to any index).
        target_recall: share of the k best that an approximate search is to find.

    Raises:
        ValueError: arguments out of range.
        MissingExtra: an approximate search without faiss.

    >>> index = EntryIndex(2, num_thresholds=1)
    >>> index.build(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]]))
    >>> index.search(torch.tensor([1.0, 1.0]), k=2, threshold_column=0).ids
    tensor([1, 0])
    """

    def __init__(
        self, dim: int, num_thresholds: int = 0, search: SearchMode = "auto", target_recall: float = 0.99
    ) -> None:
        self.dim = integer("dim", dim, minimum=1)
        self.num_thresholds = integer("num_thresholds", num_thresholds)
        if search not in ("auto", "exact", "approximate"):
            raise ValueError(f'search must be "auto", "exact" or "approximate", got {search!r}')
        if not 0 < target_recall <= 1:
            raise ValueError(f"target_recall must be in (0, 1], got {target_recall}")
        if search == "approximate":
            faiss()
        self.requested, self.target_recall = search, float(target_recall)
        self._rows = GrowingMatrix(self.dim + self.num_thresholds)
        self._upkeep = Upkeep(self.dim, search, self.target_recall)
        self._lock = ReadersWriter()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Float[Tensor, "n width"]:
        """All rows, a view that is good until the next change."""
        return self._rows.used

    @property
    def mode(self) -> Mode:
        """How a search is done unless it says otherwise."""
        lists = self._upkeep.lists is not None or self.requested == "approximate"
        return "approximate" if lists else "exact"

    @property
    def reason(self) -> str:
        """Why `mode` is what it is; where searches are approximate, with the recall that they have now.

        Cost: an exact search for some 300 queries where the rows have changed since the last time.
        """
        now = self.measure()
        return self._upkeep.why if now is None else f"{self._upkeep.why}; {now}"

    def measure(self) -> calibration.Measured | None:
        """The recall of approximate searches now, on queries like all entries, like the latest and unlike them.

        Where it is below the target, calibrates anew first; None where searches are exact.
        """
        for read_all in (False, True):
            with self._lock.reading():
                now, asked = self._upkeep.measure(self._rows.used.numpy())
            if now is None or now.recall >= self.target_recall:
                return now
            with self._lock.writing():
                self._upkeep.mend(self._rows.used.numpy(), asked, read_all)
        with self._lock.reading():
            return self._upkeep.measure(self._rows.used.numpy())[0]

    def build(self, rows: Float[Tensor, "n width"]) -> None:
        """These rows instead of all others, at slots 0 to n - 1, partitioned anew."""
        checked = self._checked(rows)
        with self._lock.writing():
            self._rows.set(checked)
            self._upkeep.judge(self._rows.used.numpy())

    def add(self, rows: Float[Tensor, "new width"]) -> Int[Tensor, " new"]:
        """Append rows; returns their slots."""
        checked = self._checked(rows)
        with self._lock.writing():
            slots = self._rows.add(checked)
            if self._upkeep.partition is not None:
                self._upkeep.partition.add(checked.numpy(), slots.numpy())
            self._upkeep.follow(self._rows.used.numpy(), len(slots))
        return slots

    def replace(self, slots: Int[Tensor, " slots"], rows: Float[Tensor, "rows width"]) -> None:
        """Overwrite rows."""
        checked = self._checked(rows)
        with self._lock.writing():
            where = self._existing(slots)
            if len(checked) != len(where):
                raise ValueError(f"{len(where)} slots were given {len(checked)} rows")
            self._rows.used[where] = checked
            if self._upkeep.partition is not None:
                self._upkeep.partition.remove(where.numpy())
                self._upkeep.partition.add(checked.numpy(), where.numpy())
            self._upkeep.follow(self._rows.used.numpy(), len(where))

    def remove(self, slots: Int[Tensor, " slots"]) -> Int[Tensor, "moves 2"]:
        """Drop rows; returns (from, to) of each row that moved into a hole."""
        with self._lock.writing():
            gone = self._existing(slots)
            moves = self._rows.remove(gone)
            if self._upkeep.partition is not None:
                sources, targets = moves.T.numpy()
                self._upkeep.partition.remove(gone.numpy())
                self._upkeep.partition.move(self._rows.used[moves[:, 1]].numpy(), sources, targets)
            self._upkeep.follow(self._rows.used.numpy(), len(gone))
        return moves

    def search(
        self,
        queries: Float[Tensor, "*queries dim"],
        k: int,
        threshold_column: int | None = None,
        mode: Mode | None = None,
    ) -> Neighbours:
        """The k entries with the largest query . entry + threshold; among equal ones, any.

        Args:
            queries: of any number of leading dimensions.
            k: how many.
            threshold_column: whose thresholds are added; None: none.
            mode: "exact" or "approximate" where it is not to be as `mode` says.

        Returns:
            On the CPU.

        Raises:
            ValueError: another width, NaN or infinity, or approximate search of an index that is not partitioned.
        """
        flat, shape = self._flat(queries), queries.shape[:-1]
        column = arguments.column(threshold_column, self.num_thresholds)
        k = integer("k", k, minimum=1, maximum=max(len(self), MOST))
        with self._lock.reading():
            approximate, total = self._is_approximate(mode), len(self)
            if approximate and mode is None and self._upkeep.lists is not None:
                approximate = math.isfinite(self._upkeep.lists.deviations_of(min(k, total)))
            if approximate and self._upkeep.lists is not None and len(flat):
                held = self._rows.used.numpy()
                scores, slots = map(torch.from_numpy, self._upkeep.lists.best(held, flat, column, min(k, total)))
                active = None
            else:
                scores, slots, active = best(flat, *self._of_column(column), min(k, total))
                active = active.view(shape)
        last = scores[:, -1] if total else torch.full((len(flat),), -math.inf)
        scores = functional.pad(scores, (0, k - scores.shape[1]), value=-math.inf).view(*shape, k)
        slots = functional.pad(slots, (0, k - slots.shape[1]), value=-1).view(*shape, k)
        return Neighbours(slots, scores, Certificate(approximate, k, total, last.view(shape), active))

    def range(
        self,
        queries: Float[Tensor, "*queries dim"],
        threshold: float,
        threshold_column: int | None = None,
        mode: Mode | None = None,
    ) -> Neighbours:
        """All entries with query . entry + threshold of the column > `threshold`, as `search` gives them.

        The answer is as wide as the longest.
        """
        flat, shape, bound = self._flat(queries), queries.shape[:-1], arguments.score("threshold", threshold)
        column = arguments.column(threshold_column, self.num_thresholds)
        with self._lock.reading():
            approximate, total = self._is_approximate(mode), len(self)
            if approximate and self._upkeep.lists is not None and len(flat):
                scores, slots, owners = self._upkeep.lists.above(self._rows.used.numpy(), flat, column, bound)
                active = None
            else:
                scores, slots, owners, counted = above(flat, *self._of_column(column), bound)
                active = None if approximate else torch.from_numpy(counted).view(shape)
        order = np.lexsort((-scores, owners))
        ordered = (torch.from_numpy(values[order]) for values in (scores, slots, owners))
        all_scores, all_slots = (values.view(*shape, values.shape[1]) for values in padded(*ordered, count=len(flat)))
        counts, last = (all_slots >= 0).sum(dim=-1), torch.full(shape, bound)
        return Neighbours(all_slots, all_scores, Certificate(approximate, counts, total, last, active))

    def recall(self, queries: Float[Tensor, "*queries dim"], k: int = 32, threshold_column: int | None = None) -> float:
        """The share of the k best entries that a search in the present `mode` finds; equal scores count as equal."""
        if not len(self):
            return 1.0
        k = min(k, len(self))
        exact, here = (self.search(queries, k, threshold_column, mode).scores for mode in ("exact", None))
        return calibration.recall_of(*(scores.reshape(-1, k).numpy() for scores in (here, exact)))

    def calibrate(
        self, queries: Float[Tensor, "*queries dim"], k: int = 32, threshold_column: int | None = None
    ) -> None:
        """Hold the recall for these queries and this k, too, and judge by them whether lists pay, now and later."""
        flat, column = self._flat(queries), arguments.column(threshold_column, self.num_thresholds)
        if not len(flat):
            raise ValueError("calibration needs at least one query")
        columns = np.full(len(flat), -1 if column is None else column)
        with self._lock.writing():
            asked = calibration.Questions("given", flat, columns)
            self._upkeep.ask(self._rows.used.numpy(), asked, integer("k", k, minimum=1))

    def _of_column(self, column: int | None) -> tuple[Floats, Floats | None]:
        return of_column(self._rows.used.numpy(), self.dim, column)

    def _is_approximate(self, mode: Mode | None) -> bool:
        if mode not in (None, "exact", "approximate"):
            raise ValueError(f'mode must be "exact", "approximate" or None, got {mode!r}')
        if (mode or self.mode) == "exact":
            return False
        if self._upkeep.lists is None and len(self):
            raise ValueError(
                f"this index has no partition to search approximately ({self._upkeep.why}): make it with "
                'search="approximate"'
            )
        return True

    def _flat(self, queries: Tensor) -> Floats:
        return arguments.queries(queries, self.dim).view(-1, self.dim).numpy()

    def _checked(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(arguments.matrix("rows [entry | thresholds]", rows, self._rows.used.shape[1]))

    def _existing(self, slots: Tensor) -> Tensor:
        where = index_array("slots", slots, limit=len(self))
        if len(np.unique(where)) != len(where):
            raise ValueError("slots must be different from each other")
        return torch.from_numpy(where)
