"""What the runs have measured, arm by arm: from the runs themselves, or from the table of an older study."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.runner.files import read
from experiments.runner.jobs import Job, Record, choosing_loss, chosen
from experiments.runner.statistics import Array
from experiments.runner.study import read_study

QUANTITIES: Final = ("held_out", "symmetry", "directionality")
TABLE: Final = "results.csv"


@dataclass(frozen=True)
class Curves:
    objective: str  # "masked" or "causal"
    arm: str  # how W_q and W_k begin, or what is added to the loss
    rate: float  # peak
    seeds: tuple[int, ...]  # that have run
    steps: tuple[int, ...]  # of the measurements
    held_out: Array  # loss, [seeds, steps]
    symmetry: Array  # S of each layer, [seeds, steps, layers]
    directionality: Array  # likewise
    seconds: float  # of a run, mean

    def end(self, quantity: str) -> Array:
        """[seeds], at the last step; of S and D the median over layers."""
        values: Array = getattr(self, quantity)[:, -1]
        return values if quantity == "held_out" else np.median(values, axis=1)

    def of_seeds(self, seeds: Sequence[int], values: Array) -> Array:
        return values[[self.seeds.index(seed) for seed in seeds]]


@dataclass(frozen=True)
class Choice:
    objective: str  # "masked" or "causal"
    arm: str  # how W_q and W_k begin
    rate: float  # the best one
    at_end: bool  # whether it is the lowest or the highest that was tried
    losses: Mapping[float, Sequence[float]]  # by rate, of each seed, on rows that are not those of the results


def read_curves(folder: Path) -> tuple[list[Curves], list[Choice]]:
    """Every arm at its best rate, or at every rate where all seeds have chosen it; then the choices are told, too.

    If all seeds choose, and the study was cut short, it is read by the seeds that have run with every arm and every
    rate.
    """
    about, finished = read_study(folder)
    config, runs = about["config"], {Job(**run["job"]): run for run in finished}
    arms = [(objective, arm) for objective in ("masked", "causal") for arm in config[objective]]
    if config.get("choosing", 1) < len(config["seeds"]):
        found = list[Curves]()
        for objective, arm in arms:
            name = f"{objective} {arm}"
            best = chosen(name, config["rates"], config["seeds"], runs, choosing_loss, config.get("choosing", 1))
            if best is not None:
                found.append(_curves(objective, arm, best.rate, best.runs))
        return found, []
    return _at_every_rate(arms, config["rates"], config["seeds"], runs)


def _at_every_rate(
    arms: Sequence[tuple[str, str]], rates: Sequence[float], planned: Sequence[int], runs: Mapping[Job, Record]
) -> tuple[list[Curves], list[Choice]]:
    jobs = {seed: [Job(f"{o} {arm}", rate, seed) for o, arm in arms for rate in rates] for seed in planned}
    seeds = [seed for seed in planned if all(job in runs for job in jobs[seed])]
    if not seeds:
        raise FileNotFoundError("no seed has run with all arms and learning rates")
    curves, choices = list[Curves](), list[Choice]()
    for objective, arm in arms:
        name = f"{objective} {arm}"
        of = {rate: {seed: runs[Job(name, rate, seed)] for seed in seeds} for rate in rates}
        best = chosen(name, rates, seeds, runs, choosing_loss, len(seeds))
        assert best is not None
        losses = {rate: [choosing_loss(run) for run in each.values()] for rate, each in of.items()}
        choices.append(Choice(objective, arm, best.rate, best.at_end, losses))
        curves += [_curves(objective, arm, rate, each) for rate, each in of.items()]
    return curves, choices


def read_table(results: Path) -> list[Curves]:
    """The curves of a study whose runs are no longer there, from its `results.csv`, which holds all they measured."""
    with (results / TABLE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    seconds = {(one["objective"], one["arm"]): one["seconds"] for one in read(results / "results.json")["arms"]}
    found = list[Curves]()
    for objective, arm, rate in dict.fromkeys((row["objective"], row["arm"], row["rate"]) for row in rows):
        mine = [row for row in rows if (row["objective"], row["arm"], row["rate"]) == (objective, arm, rate)]
        seeds, steps = (tuple(dict.fromkeys(int(row[name]) for row in mine)) for name in ("seed", "step"))
        at = {(int(row["seed"]), int(row["step"])): row for row in mine}

        def table(*columns: str, at: Any = at, seeds: Any = seeds, steps: Any = steps) -> Array:
            return np.array([[[float(at[seed, step][c]) for c in columns] for step in steps] for seed in seeds])

        layers = [name.removeprefix("S_") for name in mine[0] if name.startswith("S_")]
        held_out = table("held_out_loss")[..., 0]
        forms = (table(*(f"{letter}_{layer}" for layer in layers)) for letter in "SD")
        found.append(Curves(objective, arm, float(rate), seeds, steps, held_out, *forms, seconds[objective, arm]))
    return found


def _curves(objective: str, arm: str, rate: float, runs: Mapping[int, Record]) -> Curves:
    def table(quantity: str) -> Array:
        return np.array([[entry[quantity] for entry in run["measured"]] for run in runs.values()], dtype=np.float64)

    steps = tuple(entry["step"] for entry in next(iter(runs.values()))["measured"])
    seconds = float(np.mean([run["seconds"] for run in runs.values()]))
    return Curves(objective, arm, rate, tuple(runs), steps, *(table(name) for name in QUANTITIES), seconds)
