"""Trials of each kind of fault, in order, each written down before and after, so that a killed run goes on."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
JOURNALS = ROOT / ".cache" / "faults"
_DECLARES = re.compile(r"^PROMISE\b", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What a trial came to: `lost` is None where the promise held."""

    seed: int
    lost: str | None
    seconds: float


def names(folder: Path = FOLDER) -> list[str]:
    """The kinds of fault: files that declare a promise. They are not imported for it."""
    files = (path for path in sorted(folder.glob("*.py")) if not path.stem.startswith(("_", "test_")))
    return [path.stem for path in files if _DECLARES.search(path.read_text())]


def load(name: str, package: str = "tests.faults") -> ModuleType:
    """The module of a kind, which keeps to the protocol."""
    kind = importlib.import_module(f"{package}.{name}" if package else name)
    if not (isinstance(kind.PROMISE, str) and 0 < kind.SHORT <= kind.TRIALS and callable(kind.trial)):
        raise TypeError(f"{kind.__file__}: expected PROMISE, 0 < SHORT <= TRIALS and trial(seed, folder)")
    return kind


def attempt(kind: ModuleType, seed: int) -> Outcome:
    """One trial in a folder of its own, which is gone afterwards."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"fault-{seed}-", ignore_cleanup_errors=True) as folder:
        try:
            lost = kind.trial(seed, Path(folder))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            lost = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}"
    return Outcome(seed, lost, time.monotonic() - start)


def fingerprint() -> str:
    """Of the sources: outcomes of other sources are not gone on from."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *FOLDER.glob("*.py")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Journal:
    """The trials of one kind on disk: a line when one starts and one when it ends.

    A line is one write to a file opened for appending, so a kill leaves at most the last one torn.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source

    def begin(self, resume: bool) -> bool:
        """Whether it goes on from trials on disk; without `resume`, or of other sources, it begins anew."""
        head = next(self._lines(), {})
        if resume and head.get("source") == self.source:
            with self.path.open("rb+") as file:  # a torn last line would swallow the next one
                if not file.read().endswith(b"\n"):
                    file.write(b"\n")
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"source": self.source}) + "\n")
        return False

    def write(self, **line: object) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def outcomes(self) -> dict[int, Outcome]:
        """Of the trials that ended, by seed."""
        ended = (line for line in self._lines() if "lost" in line)
        return {line["seed"]: Outcome(line["seed"], line["lost"], line["seconds"]) for line in ended}

    def interrupted(self) -> list[int]:
        """Seeds of the trials that started and did not end."""
        return sorted({line["start"] for line in self._lines() if "start" in line} - set(self.outcomes()))

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        for line in self.path.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # torn by a kill: its trial runs again
                continue


def _trial(name: str, package: str, seed: int, journal: Journal) -> Outcome:
    kind = load(name, package)
    journal.write(start=seed)
    outcome = attempt(kind, seed)
    journal.write(seed=seed, lost=outcome.lost, seconds=outcome.seconds)
    return outcome


def _pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # a fork would share what torch and stores keep open
    return ProcessPoolExecutor(workers, mp_context=context)


def _alone(name: str, package: str, seed: int, journal: Journal) -> Outcome:
    """A trial that was interrupted: if it was the one that ended its process, it is seen to do so."""
    try:
        with _pool(1) as pool:
            return pool.submit(_trial, name, package, seed, journal).result()
    except BrokenProcessPool:
        journal.write(seed=seed, lost="it ended its process", seconds=0.0)
        return Outcome(seed, "it ended its process", 0.0)


def run(
    name: str,
    seeds: int,
    journal: Journal,
    *,
    workers: int = 0,
    package: str = "tests.faults",
    progress: Callable[[int, int, int], object] = lambda done, seeds, lost: None,
) -> list[Outcome]:
    """Trials 0 .. `seeds` - 1 of a kind that the journal lacks, then all of them.

    Args:
        workers: processes side by side; 0 runs the trials in this one.
        progress: called as `progress(done, seeds, lost)` after each trial.
    """
    outcomes = {seed: outcome for seed, outcome in journal.outcomes().items() if seed < seeds}

    def add(outcome: Outcome) -> None:
        outcomes[outcome.seed] = outcome
        progress(len(outcomes), seeds, sum(1 for o in outcomes.values() if o.lost is not None))

    while len(outcomes) < seeds:
        for seed in journal.interrupted():
            if seed < seeds:
                add(_alone(name, package, seed, journal))
        left = [seed for seed in range(seeds) if seed not in outcomes]
        if not workers:
            for seed in left:
                add(_trial(name, package, seed, journal))
            continue
        with _pool(workers) as pool:
            jobs = [pool.submit(_trial, name, package, seed, journal) for seed in left]
            try:
                for job in as_completed(jobs):
                    add(job.result())
            except BrokenProcessPool:
                if not journal.interrupted():  # no trial ended it, so nothing would change the next time
                    raise
                outcomes.update((seed, o) for seed, o in journal.outcomes().items() if seed < seeds)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [outcomes[seed] for seed in sorted(outcomes)]
