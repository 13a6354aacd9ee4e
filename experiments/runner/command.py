"""`python -m experiments`: list the experiments, run one, write its results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from attnflow._core.markup import aligned
from attnflow._core.progress import Reporter
from experiments.runner.experiment import ROOT, Experiment, find, names
from experiments.runner.processes import launched
from experiments.runner.study import (
    LINES,
    RUNS,
    SETTINGS,
    Origin,
    Study,
    check_origin,
    committed,
    describe,
    keep,
    take_up,
    trial,
)

WORK: Final = ROOT.parent / "out" / "experiments"  # which git ignores: the state stays clean while a study runs


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("name", nargs="?", help="of the experiment; without one they are listed")
    parser.add_argument("--list", action="store_true", help="a table of the experiments")
    parser.add_argument("--scale", default="tiny", help="tiny (default), small, paper; --list shows which there are")
    parser.add_argument("--dry-run", action="store_true", help="try the recipe at a size of seconds; keep nothing")
    parser.add_argument("--seeds", type=int, help="how many; those of the recipe if not given")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with an interrupted study, or with the runs beside results",
    )
    parser.add_argument("--arms", help="only these, separated by commas; several processes may share a study anyway")
    parser.add_argument("--summary", action="store_true", help="run nothing; write the results of what has finished")
    parser.add_argument(
        "--work", type=Path, help="folder for checkpoints and finished runs; out/experiments/NAME/SCALE"
    )
    parser.add_argument("--results", type=Path, help="folder for results of a trial, which needs no clean commit")
    parser.add_argument(
        "--sharded", type=int, default=0, metavar="N", help="refuse to run unless N processes share each model (FSDP)"
    )
    given = parser.parse_args(arguments)
    if given.list or given.name is None:
        print(listed())
        return 0
    try:
        text = run(find(given.name), given)
        if launched().rank == 0:
            print(text)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def listed() -> str:
    """All experiments, with their scales and what has been run."""
    rows = [["experiment", "scales", "results", "question"]]
    for name in names():
        one = find(name)
        done = [scale for scale in one.recipes if (one.results(scale) / "results.json").is_file()]
        rows.append([name, " ".join(one.recipes), " ".join(done) or "none yet", one.question])
    run_one = "Run one: python -m experiments NAME --scale tiny; what is known of it: experiments/NAME/README.md"
    evaluate = "A language model on benchmarks: python -m experiments evaluate MODEL"
    return f"{aligned(rows, left=range(4))}\n\n{run_one}\n{evaluate}"


def run(experiment: Experiment[Any], given: argparse.Namespace) -> str:
    """Run a study as asked, write its results, and return the table."""
    if given.scale not in experiment.recipes:
        raise ValueError(f"{experiment.name} has the scales {', '.join(experiment.recipes)}, not {given.scale!r}")
    config = experiment.recipes[given.scale]()
    if given.seeds is not None:
        if not hasattr(config, "seeds"):
            raise ValueError(f"{experiment.name} has no seeds to choose from")
        if given.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {given.seeds}")
        config = replace(config, seeds=tuple(range(given.seeds)))
    if given.dry_run:
        return dry_run(experiment, config, given.arms.split(",") if given.arms else ())
    launch = launched()  # before models are loaded
    launch.expect(given.sharded)
    work: Path = given.work or WORK / experiment.name / given.scale
    origin = launch.once(lambda: trial() if given.results else committed(experiment))
    if not given.summary:
        launch.once(lambda: _begin(work, given.resume, given.results or experiment.results(given.scale)))
        setup = experiment.setup(config)
        plan = setup.plan if given.arms is None else setup.plan.only(given.arms.split(","))
        launch.once(lambda: describe(work, experiment, config, setup, given.scale, origin))
        with Reporter() if launch.rank == 0 else nullcontext(_silent) as progress:
            Study(work, setup, plan, progress, launch).run()
        if given.arms is not None:
            return f"done: {given.arms}. Write the results with --summary when all arms are"
    return launch.once(lambda: _finish(experiment, given, work, origin))


def dry_run(experiment: Experiment[Any], config: Any, arms: Sequence[str] = ()) -> str:
    """Build a recipe at a size of seconds, and run its first job, or one of each arm; nothing is kept."""
    setup = experiment.setup(experiment.miniature(config))
    json.dumps(setup.about)
    jobs = [setup.plan.only([arm]).first[-1] for arm in arms] or setup.plan.first[:1]
    with TemporaryDirectory() as work:
        for job in jobs:
            folder = Path(work, job.name)
            folder.mkdir()
            json.dumps(setup.run(job, folder, _silent))
    names = ", ".join(job.name for job in jobs)
    return f"{experiment.name}: {setup.plan.count} jobs in miniature, of which {names} ran; nothing was kept"


def _silent(done: int, total: int, what: str) -> None:
    del done, total, what


def _begin(work: Path, resume: bool, results: Path) -> None:
    if resume and not (work / SETTINGS).is_file() and (results / LINES).is_file():
        take_up(results, work)
    if (work / SETTINGS).is_file() and not resume:
        done = sum(1 for _ in (work / RUNS).glob("*.json"))
        raise ValueError(f"{work} holds a study, {done} jobs of it are done: pass --resume to go on, or remove it")
    work.mkdir(parents=True, exist_ok=True)


def _finish(experiment: Experiment[Any], given: argparse.Namespace, work: Path, origin: Origin) -> str:
    if not (given.summary or given.results) and committed(experiment) != origin:
        raise ValueError("the repository has changed while the study ran: write its results with --summary")
    check_origin(work, origin)
    return write_results(experiment, work, given.results or experiment.results(given.scale))


def write_results(experiment: Experiment[Any], work: Path, results: Path) -> str:
    """Write the results of the finished jobs, with the settings beside them; returns the table."""
    results.mkdir(parents=True, exist_ok=True)
    table = experiment.summarise(work, results)
    if work.resolve() != results.resolve():
        keep(work, results)
    return table
