"""Progress of long work: one call, `progress(done, total, what)`, and one way to show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from io import TextIOBase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Progress = Callable[[int, int, str], object]  # (done, total, what); total is 0 where it is not known


class Reporter:
    """Shows progress on stderr: a bar on a terminal, elsewhere a line now and then, or nothing if `seconds` is None.

    with Reporter() as progress:
        audit.check(model, inputs, progress=progress)
    """

    def __init__(
        self,
        stream: TextIOBase | None = None,
        seconds: float | None = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream: Any = sys.stderr if stream is None else stream
        self._seconds, self._clock = seconds, clock
        self._last = clock()
        self._bar: Bar | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` steps are done; a total of 0 means unknown."""
        if self._stream.isatty():
            self._draw(done, total, what)
        elif self._seconds is not None and self._clock() - self._last >= self._seconds:
            self._last = self._clock()
            print(f"{what} {done}/{total}" if total else what, file=self._stream, flush=True)

    def stage(self, what: str) -> None:
        if self._stream.isatty():
            self._draw(0, 0, what)

    def pause(self) -> None:
        """Hide the bar so that something can be printed; the next call shows it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def _draw(self, done: int, total: int, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is not None and bool(total) != (len(self._bar.columns) > 2):  # with a count it looks different
            self.pause()
        if self._bar is None:
            name = TextColumn("{task.description}", markup=False)
            columns = (SpinnerColumn(), name, *((BarColumn(), MofNCompleteColumn()) if total else ()))
            # By default it would send what is printed on stdout to stderr, past a redirection of stdout.
            console = Console(file=self._stream, highlight=False, emoji=False)
            self._bar = Bar(*columns, console=console, transient=True, redirect_stdout=False)
            self._bar.add_task(what)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=what, completed=done, total=total or None)
