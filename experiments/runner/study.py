"""One study in one folder: its settings, its jobs, and going on where it was killed."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

import torch

from attnflow._core.files import write_atomically
from attnflow._core.progress import Progress
from experiments.runner import git
from experiments.runner.experiment import ROOT, Experiment, Setup
from experiments.runner.files import read, write
from experiments.runner.jobs import DIVERGED, Job, Plan, Record
from experiments.runner.processes import Launch, launched
from experiments.runner.training import Diverged

SETTINGS: Final = "study.json"
RUNS: Final = "runs"
LINES: Final = "runs.jsonl"  # the same in one file, beside results
REPOSITORY: Final = ROOT.parent
_FREE: Final = ("seeds",)  # more seeds may be asked for later; a seed is a job of its own


@dataclass(frozen=True)
class Origin:
    """Where the numbers of a study come from."""

    commit: str  # that was checked out when it began; with "+" behind it, if files differed from it
    prediction: str = ""  # digest of the predictions in that commit; "" for a trial that needs none


def committed(experiment: Experiment[Any]) -> Origin:
    """The origin of a study whose results may be kept."""
    commit = git.clean_commit(REPOSITORY, f"experiments/{experiment.name}/results/")
    text = git.prediction(REPOSITORY, f"experiments/{experiment.name}/README.md")
    return Origin(commit, hashlib.sha256(text.encode()).hexdigest()[:16])


def trial() -> Origin:
    """The origin of a study that is tried out."""
    try:
        return Origin(git.head(REPOSITORY) + "+" * bool(git.changes(REPOSITORY)))
    except git.NotReproducible:  # a copy without a repository: results/ stays out of reach, as `committed` says
        return Origin("none+")


def describe(folder: Path, experiment: Experiment[Any], config: Any, setup: Setup, scale: str, origin: Origin) -> None:
    """Write the settings of a study; those that are there already must be the same."""
    path = folder / SETTINGS
    plain: dict[str, Any] = json.loads(json.dumps({"config": _plain(config), **setup.about}))
    if not path.is_file():
        versions = {name: metadata.version(name) for name in experiment.packages}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
        more = {
            "experiment": experiment.name,
            "scale": scale,
            "origin": asdict(origin),
            "versions": {**versions, "python": platform.python_version()},
            "device": f"{platform.machine()}, {device} a process",
        }
        write(path, {**plain, **more})
        return
    _check_settings(folder, read(path), plain)
    begun = check_origin(folder, origin)
    if not origin.commit.endswith("+") and not begun.commit.endswith("+"):
        code = ("src/attnflow", "experiments/runner", f"experiments/{experiment.name}")
        differ = git.code_differs(REPOSITORY, begun.commit, origin.commit, code)
        if differ:
            raise ValueError(
                f"the study in {folder} was begun by commit {begun.commit[:12]}, and {', '.join(differ[:5])} differ "
                "now: go on in a worktree of that commit, or choose another --work folder"
            )


def check_origin(folder: Path, origin: Origin) -> Origin:
    """Where the runs of a study come from, if what is added to them, or written of them, may come from `origin`."""
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"no study in {folder}: it has no {SETTINGS}")
    begun = Origin(**read(folder / SETTINGS)["origin"])
    if begun.prediction != origin.prediction:
        what = "the predictions have changed since" if begun.prediction else "no predictions were committed before"
        raise ValueError(f"{what} the study in {folder} began: choose another --work folder")
    return begun


def _check_settings(folder: Path, held: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    def fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {key: settings.get(key) for key in plain}
        config = chosen["config"]
        return {**chosen, "config": {key: value for key, value in config.items() if key not in _FREE}}

    before, now = fixed(held), fixed(plain)
    if before != now:
        differ = [key for key in now["config"] if before["config"].get(key) != now["config"][key]]
        differ += [key for key in now if key != "config" and before[key] != now[key]]
        raise ValueError(
            f"{folder} holds a study with other settings ({', '.join(differ)}): choose another --work folder"
        )


def _plain(config: Any) -> dict[str, Any]:
    return config.to_dict() if hasattr(config, "to_dict") else asdict(config)


@dataclass
class Study:
    """The jobs of a study; some are done."""

    folder: Path  # `runs/JOB.json` of each finished job, `work/JOB/` with checkpoints of those that are not
    setup: Setup  # what runs them
    plan: Plan  # which; by default all of the setup
    progress: Progress  # of the whole study
    # whose processes run every job together; the first one writes. All must see the folder.
    launch: Launch = field(default_factory=launched)
    _began: float = field(default_factory=time.monotonic, init=False)
    _before: int = field(default=0, init=False)  # jobs that were done when this process began
    _part: float = field(default=0.0, init=False)  # of the job that is running, since this process began it

    def run(self) -> None:
        """Run what is not there yet. Several processes may do so with one folder: each takes jobs that no other has."""
        (self.folder / RUNS).mkdir(parents=True, exist_ok=True)
        self._began, self._before = time.monotonic(), self._finished()
        jobs: Sequence[Job] = self.plan.first
        while jobs:
            busy = [job for job in jobs if not self._run(job, wait=False)]
            for job in busy:  # by another process, which may have been killed meanwhile
                self._run(job, wait=True)
            jobs = [job for job in self.plan.then(self.record) if not self.launch.share(self.path(job).is_file())]

    def path(self, job: Job) -> Path:
        return self.folder / RUNS / f"{job.name}.json"

    def record(self, job: Job) -> Record:
        return cast(Record, read(self.path(job)))

    def _run(self, job: Job, wait: bool) -> bool:
        """Run a job, if that is not done; False if another process is at it."""
        if self.launch.share(self.path(job).is_file()):
            return True
        work = self.folder / "work" / job.name
        work.mkdir(parents=True, exist_ok=True)
        with taken(work / "lock", wait, self.launch) as alone:
            if not alone:
                return False
            if self.launch.share(self.path(job).is_file()):
                return True
            began, start = time.perf_counter(), list[float]()

            def show(done: int, total: int, what: str) -> None:
                start.append(done / total)
                self._part = done / total - start[0]
                self._show(f"{job.name}, step {done} of {total}: {what}", 1.0 - done / total)

            self._show(job.name)
            try:
                content = self.setup.run(job, work, show)
            except Diverged as error:  # a result too: of a learning rate, say
                content = {DIVERGED: str(error)}
            result = {"job": asdict(job), **content, "seconds_here": time.perf_counter() - began}
            self.launch.once(lambda: write(self.path(job), result))
            self._part = 0.0
            self._show(f"{job.name} is done")
        return True

    def _finished(self) -> int:
        return sum(1 for _ in (self.folder / RUNS).glob("*.json"))

    def _show(self, what: str, left_of_job: float = 1.0) -> None:
        total, finished = max(self.plan.count, 1), self._finished()
        done = finished - self._before + self._part
        left = max(0.0, total - finished - 1 + left_of_job)
        spent = time.monotonic() - self._began
        ahead = f", {duration(spent / done * left)} left" if done > 0.01 and left > 0 else ""
        self.progress(min(finished, total), total, f"{what}{ahead}; jobs")


def duration(seconds: float) -> str:
    """For people.

    >>> duration(42), duration(600), duration(7300)
    ('42 s', '10 min', '2 h 2 min')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def locked(path: Path, wait: bool) -> Generator[bool]:
    """Whether this process has the lock of a file; a process that is killed has none. Without locks (Windows): yes."""
    try:
        import fcntl
    except ImportError:
        yield True
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def taken(path: Path, wait: bool, launch: Launch) -> Generator[bool]:
    """Whether the processes of a launch have the lock of a file, which the first of them holds for all."""
    if launch.rank:
        yield launch.share(False)
        return
    with locked(path, wait) as alone:
        yield launch.share(alone)


def read_study(folder: Path) -> tuple[Mapping[str, Any], list[Record]]:
    """(settings, results of all finished jobs by name) of a folder; those that diverged hold `DIVERGED` alone."""
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"no study in {folder}: it has no {SETTINGS}")
    runs = [read(path) for path in sorted((folder / RUNS).glob("*.json"))]
    if not runs and (folder / LINES).is_file():
        runs = [json.loads(line) for line in (folder / LINES).read_text(encoding="utf-8").splitlines()]
    if not runs:
        raise FileNotFoundError(f"{folder} holds no finished run, neither in {RUNS} nor in {LINES}")
    return read(folder / SETTINGS), runs


def keep(folder: Path, results: Path) -> None:
    """Put the settings and every finished run of a study beside its results, one run a line.

    All that the results say can then be computed again, and `take_up` goes on from there.
    """
    settings, runs = read_study(folder)
    write(results / SETTINGS, settings)
    text = "".join(json.dumps(run, separators=(",", ":")) + "\n" for run in runs)
    with write_atomically(results / LINES) as file:
        file.write(text.encode())


def take_up(results: Path, folder: Path) -> None:
    """Make the folder of a study from what `keep` has put beside its results."""
    settings, runs = read_study(results)
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    for run in runs:
        write(folder / RUNS / f"{Job(**run['job']).name}.json", run)
    write(folder / SETTINGS, settings)
