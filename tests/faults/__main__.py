"""`python -m tests.faults`: every trial of every kind of fault, counted in docs/reliability.md.

Exit codes: 0 where nothing was lost, 1 where something was.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time

from tests.faults import page, runner


class Report:
    """Lines on stderr, one every few seconds: trials done, what is lost, minutes left of this kind and of all.

    Minutes of kinds to come are those of their last run; a plus says that one has none.
    """

    def __init__(self, kind: str, to_come: list[float | None], seconds: float = 5.0) -> None:
        self.kind, self.seconds = kind, seconds
        self.later = sum(left or 0.0 for left in to_come)
        self.open = "+" if None in to_come else ""
        self.start = self.last = time.monotonic()
        self.first: int | None = None

    def __call__(self, done: int, trials: int, lost: int) -> None:
        if self.first is None:
            self.first = done - 1  # trials of an earlier run took none of this one's time
        now = time.monotonic()
        if now - self.last < self.seconds and done < trials:
            return
        self.last = now
        left = (now - self.start) / (done - self.first) * (trials - done)
        times = f"{left / 60:5.1f} min left, {(left + self.later) / 60:5.1f}{self.open} in all"
        print(f"{self.kind:<16} {done:>6}/{trials}  {lost} lost  {times}", file=sys.stderr, flush=True)


def main() -> int:
    kinds = runner.names()
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("kind", nargs="*", help=f"of: {' '.join(kinds)}; all by default")
    parser.add_argument("--trials", type=int, help="of each kind, in place of its own number")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (2)")
    options = parser.parse_args()
    if unknown := set(options.kind) - set(kinds):
        parser.error(f"no kind of fault {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    chosen = [kind for kind in kinds if not options.kind or kind in options.kind]
    rows = page.read()
    modules = {name: runner.load(name) for name in chosen}
    trials = {name: options.trials or module.TRIALS for name, module in modules.items()}
    source = runner.fingerprint()
    journals = {name: runner.Journal(runner.JOURNALS / f"{name}.jsonl", source) for name in chosen}
    for journal in journals.values():  # all at once: a run that is killed early leaves no journal of an older one
        journal.begin(options.resume)
    lost = 0
    for place, name in enumerate(chosen):
        to_come = [
            rows[n].seconds / rows[n].trials * trials[n] / options.workers if n in rows and rows[n].trials else None
            for n in chosen[place + 1 :]
        ]
        report = Report(name, to_come)
        outcomes = runner.run(name, trials[name], journals[name], workers=options.workers, progress=report)
        rows[name] = page.row(name, modules[name].PROMISE, outcomes, datetime.date.today().isoformat())
        page.write(rows, kinds)
        lost += rows[name].lost
        for loss in rows[name].losses.splitlines():
            print(f"{name}: {loss}")
    page.write(rows, kinds)  # where no kind was run, too: one may be gone or new
    for journal in journals.values():
        journal.path.unlink()
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
