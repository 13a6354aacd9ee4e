"""Readings of an answer against removal, as the runner takes it, and what came out: a table, CSV and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.explain_agreement.study import COVERED, KINDS, READINGS, Agreement, miniature, setup, small
from experiments.geometry_in_use.summary import spearman
from experiments.runner.experiment import Experiment, no_claim
from experiments.runner.files import write, write_table
from experiments.runner.statistics import student
from experiments.runner.study import read_study

_CAUSES: Final = 10  # the strongest by removal
_PAIRS: Final = (("effect", "carried"), ("effect", "direct"), ("carried", "direct"))
_HEAD: Final = ["model", "kind", "what", "reading", "quantity", "prompts", "mean", "low", "high"]

Record = Mapping[str, Any]


def agreements(items: Sequence[Record], seeds: Sequence[int]) -> dict[tuple[str, str], float]:
    """(reading, quantity) -> value of one prompt; a shuffled reading gives each candidate the amount of another."""
    removed = np.array([item["removed"] for item in items])
    strongest = np.argsort(-np.abs(removed), kind="stable")[:_CAUSES]
    order = np.random.default_rng(seeds).permutation(len(items))
    values: dict[tuple[str, str], float] = {}
    for reading in READINGS:
        for name, given in ((reading, range(len(items))), (f"{reading}, shuffled", order)):
            amounts = np.array([items[place][reading] for place in given])
            top = np.array([reading in items[place]["top"] for place in given])
            values[name, "rank"] = spearman(amounts, removed)
            values[name, "rank of sizes"] = spearman(np.abs(amounts), np.abs(removed))
            values[name, "same sign"] = float(np.mean((amounts * removed)[strongest] > 0))
            values[name, "found"] = float(top[strongest].mean())
    quantities = dict.fromkeys(quantity for _, quantity in values)
    for one, other in _PAIRS:
        values |= {(f"{one} less {other}", q): values[one, q] - values[other, q] for q in quantities}
    return values


def summarise(folder: Path, results: Path) -> str:
    """Write results.json and results.csv, and return the table."""
    about, runs = read_study(folder)
    samples: dict[tuple[str, ...], list[float]] = {}  # values of prompts
    for kind in ("all", *KINDS):
        for run in runs:
            if "edges" not in run or kind not in ("all", run["kind"]):
                continue
            found = {("edges", "carried", f"covered by {count}"): run["covered"][str(count)] for count in COVERED}
            for number, what in enumerate(("edges", "entries")):
                seeds = [run["job"]["seed"], KINDS.index(run["kind"]), number]
                found |= {(what, *key): value for key, value in agreements(run[what], seeds).items()}
            for key, value in found.items():
                samples.setdefault((run["model"], kind, *key), []).append(value)
    rows = [[*key, len(values), *(round(x, 5) for x in student(values).numbers)] for key, values in samples.items()]
    outcomes = [dict(zip(_HEAD, row, strict=True)) for row in rows]
    interval = "mean, and 95 % of Student's t over prompts"
    write(results / "results.json", {"interval": interval, "config": about["config"], "outcomes": outcomes})
    write_table(results / "results.csv", _HEAD, rows)
    return aligned([_HEAD[1:], *([str(cell) for cell in row[1:]] for row in rows)], left=range(4))


EXPERIMENT: Final = Experiment(
    name="explain_agreement",
    question="How far does what an edge or an entry carries, and its effect, rank what an answer loses without it?",
    recipes={"tiny": Agreement, "small": small},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=no_claim,
    packages=("torch", "transformers", "attnflow"),
)
