"""How the runs of a study are read: every arm of every part, at the learning rate that its choosing seeds gave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from experiments.runner.jobs import DIVERGED, Job, Record, chosen
from experiments.runner.study import read_study

SOLVED: Final = 0.95  # accuracy
_UNSOLVED: Final = 100.0  # nats, more than any loss


def choosing_loss(run: Record) -> float:
    """By which the learning rate of an arm is chosen, on data that are not those of the results.

    Of a probe by the share of the seeds that solve it, and by their mean loss where that share is the same.
    """
    accuracy = run.get("choosing_accuracy")
    return run["choosing"] + (_UNSOLVED if accuracy is not None and accuracy < SOLVED else 0.0)


@dataclass(frozen=True)
class Result:
    """One arm of a part, at its own learning rate."""

    part: str  # its name
    arm: str  # its name
    rate: float  # chosen by the choosing seeds
    at_end: bool  # whether it is the lowest or the highest that was tried
    tried: Mapping[float, float]  # mean loss for choosing, by rate; infinite if a seed diverged
    runs: Mapping[int, Record]  # with its rate, by seed of the results
    # with every rate that all seeds of the results have run, by rate and seed
    by_rate: Mapping[float, Mapping[int, Record]]

    @property
    def parameters(self) -> int:
        return self._any["parameters"]

    @property
    def steps(self) -> list[int]:
        return [entry["step"] for entry in self._any["measured"]]

    @property
    def probe(self) -> bool:
        """Whether it has an accuracy."""
        return "accuracy" in self._any["measured"][-1]

    @property
    def _any(self) -> Record:
        return next(iter(self.runs.values()))

    def end(self, quantity: str = "loss", rate: float | None = None) -> dict[int, float]:
        runs = self.runs if rate is None else self.by_rate[rate]
        return {seed: run["measured"][-1][quantity] for seed, run in runs.items()}

    def curve(self, quantity: str = "loss") -> dict[int, list[float]]:
        return {seed: [entry[quantity] for entry in run["measured"]] for seed, run in self.runs.items()}

    def extra(self, take: Callable[[Any], float]) -> dict[int, float]:
        return {seed: take(run["extras"]) for seed, run in self.runs.items()}


Results = Mapping[tuple[str, str], Result]


def read_results(folder: Path) -> tuple[Mapping[str, Any], dict[tuple[str, str], Result]]:
    """(config, every arm whose learning rates have all been tried) of a study.

    Where all seeds choose, a seed counts once every arm of the part has run with it at every rate of the config: a
    study that is still running has results for its complete seeds.
    """
    about, finished = read_study(folder)
    runs = {Job(**run["job"]): run for run in finished}
    config, results = about["config"], dict[tuple[str, str], Result]()
    for part in config["parts"]:
        names = {arm: f"{part['name']} {arm}" for arm in part["arms"]}
        seeds, choosing = config["seeds"], config["choosing"]
        if choosing >= len(seeds):
            whole = [Job(name, rate) for name in names.values() for rate in part["rates"]]
            seeds = [seed for seed in seeds if all(Job(job.arm, job.rate, seed) in runs for job in whole)]
            choosing = len(seeds)
        for arm, name in names.items() if seeds else ():
            found = _read(part["name"], arm, name, part["rates"], seeds, choosing, config["fresh"], runs)
            if found is not None and found.runs:
                results[part["name"], arm] = found
    return config, results


def _read(
    part: str,
    arm: str,
    name: str,
    rates: Sequence[float],
    seeds: Sequence[int],
    choosing: int,
    fresh: bool,
    runs: Mapping[Job, Record],
) -> Result | None:
    try:
        best = chosen(name, rates, seeds, runs, choosing_loss, choosing)
    except ValueError:  # it diverged with every rate
        return None
    if best is None:
        return None
    judged = seeds[choosing:] if fresh else seeds

    def ran(rate: float, where: Sequence[int]) -> dict[int, Record]:
        found = {seed: runs.get(Job(name, rate, seed)) for seed in where}
        return {seed: run for seed, run in found.items() if run and DIVERGED not in run}

    tried: dict[float, float] = {}
    for rate in best.tried:
        losses = [choosing_loss(run) for run in ran(rate, seeds[:choosing]).values()]
        tried[rate] = sum(losses) / len(losses) if len(losses) == choosing else float("inf")
    by_rate = {rate: found for rate in best.tried if len(found := ran(rate, judged)) == len(judged)}
    return Result(part, arm, best.rate, best.at_end, tried, ran(best.rate, judged), by_rate)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    return [one[seed] - other[seed] for seed in one if seed in other]
