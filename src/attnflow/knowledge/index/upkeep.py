"""Which search an index does as its rows change: whether there are lists, and how much of them is read."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final, Literal

from attnflow._core.errors import MissingExtra
from attnflow.knowledge.index import calibration
from attnflow.knowledge.index.calibration import Measured, Questions
from attnflow.knowledge.index.exact import Floats
from attnflow.knowledge.index.partition import Partition

SearchMode = Literal["auto", "exact", "approximate"]

FEWEST: Final = 20_000  # below, exact search takes a few tenths of a millisecond (width 128), and certifies
# The part of the entries in the lists that a query reads: in batches of 128, exact search reads 6 to 10 entries in the
# time in which lists give one.
LARGEST_SHARE: Final = 0.1
_DRIFT: Final = 1 / 8  # of the rows changed since it was last measured how much is to be read: measured anew
_RECENT: Final = 8  # for sqrt(rows): rows that each query reads because they are in no list; 0.3 ms at 1,000,000
_WORSE: Final = 2  # times as much is read as after the lists were made, and _LITTLE more: they are made anew,
_LITTLE: Final = 0.01
_REVISED: Final = 1 / 16  # if that part of the rows changed since
_LOG: Final = logging.getLogger(__name__)


class Upkeep:
    """The lists of an index, if any, and how they follow its rows [n, width], which each call is given as they are now.

    Attributes:
        partition: the lists; None: there are none.
        measured: the recall, since the last change of the rows; None: not measured since.

    Args:
        dim: width of an entry.
        requested: "auto", "exact" or "approximate".
        target: recall that is promised.
    """

    def __init__(self, dim: int, requested: SearchMode, target: float) -> None:
        self._dim, self._requested, self._target = dim, requested, target
        self.partition: Partition | None = None
        self.measured: Measured | None = None
        self._asked: list[Questions] = []
        self._usual = calibration.USUAL
        self._judged = self._changed = self._unmeasured = self._seed = 0
        self._read = 1.0
        self._why = "no entries yet"

    @property
    def why(self) -> str:
        """Why there are lists, or none."""
        return self._few if self.partition is not None and self.lists is None else self._why

    @property
    def lists(self) -> Partition | None:
        """What approximate searches read; none below `FEWEST` entries, where lists may wait for more."""
        return None if self.partition is None or self._is_few(len(self.partition)) else self.partition

    def judge(self, rows: Floats) -> None:
        """Decide how to search: make lists, and calibrate."""
        self.partition = self.measured = None
        self._read = 1.0
        self._judged, self._changed = len(rows), 0
        if self._requested == "exact" or not len(rows):
            self._why = "exact search was asked for" if len(rows) else "no entries yet"
        elif self._is_few(len(rows)):
            self._why = self._few
        elif self._requested == "auto" and self._target == 1:
            self._why = "a recall of 1 needs exact search"
        else:
            try:
                self.partition = Partition(rows, self._dim)
            except MissingExtra as missing:
                self._why = str(missing)
                return
            self._read = self.calibrate(rows)
            _LOG.info("%s", self._why)

    def ask(self, rows: Floats, questions: Questions, k: int) -> None:
        """From now on, hold the recall for these queries and this k, too, and judge by them whether lists pay."""
        self._asked, self._usual = [questions], k
        if self.partition is None:
            self.judge(rows)
        else:
            self.calibrate(rows)

    def follow(self, rows: Floats, count: int) -> None:
        """After `count` rows changed: what was measured holds no longer, and lists may not, either."""
        self.measured, partition = None, self.partition
        self._changed += count
        self._unmeasured += count
        if self._requested == "exact" or not len(rows):
            self.judge(rows)
        elif self._is_few(len(rows)):
            if len(rows) < FEWEST // 2:
                self.partition, self._why = None, self._few
        elif partition is None:
            if self._changed >= self._judged or self._is_few(self._judged):
                self.judge(rows)
        elif self._changed >= self._judged:
            self.judge(rows)
        elif self._unmeasured > _DRIFT * len(rows):
            self._revise(rows, self.calibrate(rows))
        elif partition.num_recent > _RECENT * len(rows) ** 0.5:
            fits = partition.absorb()
            self._seed += 1
            asked = calibration.latest(partition, rows, self._seed)
            self._revise(rows, calibration.adapt(partition, rows, asked, self._least(rows), self._target), fits)

    def calibrate(self, rows: Floats, more: Sequence[Questions] = ()) -> float:
        """Measure anew how much is to be read, and whether that pays; returns the part of the rows."""
        partition, self.measured, self._unmeasured = self.partition, None, 0
        assert partition is not None
        partition.absorb()
        partition.measure(rows)
        if self._target == 1:
            self._why = "all lists are read for a recall of 1"
            return 1.0
        most = LARGEST_SHARE if self._requested == "auto" else 1.0
        asked, usual, least = [*self._questions(rows), *more], self._usual, self._least(rows)
        read = calibration.calibrate(partition, rows, asked, usual, self._target, most)[least]
        self._why = f"{partition.probes} of {partition.num_lists:,} lists and those that may hold more are read"
        if read > most:
            self._why = f"queries would read {read:.0%} of the entries in lists: exact search is no slower"
            self.partition = None
        elif exact := [str(k) for k, each in partition.deviations.items() if k <= usual and math.isinf(each)]:
            self._why += f", but all entries for the {' and '.join(exact)} best"
        return read

    def measure(self, rows: Floats) -> tuple[Measured | None, list[Questions]]:
        """The recall now, and the queries that it was measured with; None where searches are exact."""
        partition = self.lists
        if partition is None or self.measured is not None:
            return self.measured, []
        asked = self._questions(rows)
        self.measured = calibration.measured(partition, rows, asked, min(self._usual, partition.most or self._usual))
        return self.measured, asked

    def mend(self, rows: Floats, asked: Sequence[Questions], read_all: bool) -> None:
        """After too low a recall: calibrate with these queries, too; or let searches read all rows from now on."""
        if self.partition is not None and not read_all:
            self.calibrate(rows, asked)
        elif self.partition is not None:
            self.partition.deviations, self.measured = {1: math.inf}, None

    def _revise(self, rows: Floats, read: float, fits: bool = True) -> None:
        """Make lists anew where the present ones are full, or make queries read much more than they did at first."""
        worse = read > _WORSE * self._read + _LITTLE and self._changed > _REVISED * self._judged
        if worse or not fits:
            self.judge(rows)

    def _least(self, rows: Floats) -> int:
        """The number of entries whose search in lists is to pay."""
        return min(self._usual if self._asked else calibration.FEW, len(rows))

    def _questions(self, rows: Floats) -> list[Questions]:
        """Others at each call."""
        self._seed += 1
        assert self.partition is not None
        own = calibration.everything(self.partition, rows, self._seed)
        return [*self._asked, *(one._replace(like=one.like and not self._asked) for one in own)]

    def _is_few(self, count: int) -> bool:
        return self._requested == "auto" and count < FEWEST

    @property
    def _few(self) -> str:
        return f"fewer than {FEWEST:,} entries, where exact search is no slower"
