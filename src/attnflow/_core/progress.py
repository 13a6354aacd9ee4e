"""Progress of long work: one call, `progress(done, total, what)`, and one way to show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

Progress = Callable[[int, int, str], object]  # (done, total, what); total is 0 where it is not known

_PLAIN_SECONDS: Final = 30.0


@runtime_checkable
class Stream(Protocol):
    """A text stream such as `sys.stderr`."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


class Reporter:
    """Shows progress on stderr, and is what `progress=` takes: a bar on a terminal, elsewhere a line now and then.

    with Reporter() as progress:
        audit.check(model, inputs, progress=progress)
    """

    def __init__(
        self,
        stream: Stream | None = None,
        seconds: float = _PLAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream: Stream = sys.stderr if stream is None else stream
        self._seconds, self._clock = seconds, clock
        self._last = clock()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` steps are done; a total of 0 means unknown."""
        if self._stream.isatty():
            self._draw(done, total, what)
        elif self._clock() - self._last >= self._seconds:
            self._last = self._clock()
            print(f"{what} {done}/{total}" if total else what, file=self._stream, flush=True)

    def stage(self, what: str) -> None:
        """Show, on a terminal, what is going on where nothing can be counted."""
        if self._stream.isatty():
            self._draw(0, 0, what)

    def pause(self) -> None:
        """Hide the bar so that something can be printed; the next call shows it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def _draw(self, done: int, total: int, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is None or self._task is None:
            name = TextColumn("{task.description}", markup=False)
            columns = (SpinnerColumn(), name, *((BarColumn(), MofNCompleteColumn()) if total else ()))
            # By default it would send what is printed on stdout to stderr, past a redirection of stdout.
            console = Console(file=cast("IO[str]", self._stream), highlight=False, emoji=False)
            self._bar = Bar(*columns, console=console, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task(what, total=total or None)
            self._bar.start()
        elif bool(total) != (len(self._bar.columns) > 2):  # with a count and without look different
            self.pause()
            self._draw(done, total, what)
            return
        self._bar.update(self._task, description=what, completed=done, total=total or None)
