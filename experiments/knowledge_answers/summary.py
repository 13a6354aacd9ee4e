"""What the runs say: right answers by size of the pool and over training, with intervals over seeds and questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from attnflow._core.markup import aligned
from experiments.knowledge_answers.study import AGAIN, DECISIVE, choosing_loss
from experiments.runner.figures import canvas, colour, enlarge, label_ends, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.jobs import Job, Record, chosen
from experiments.runner.statistics import interval, said, student
from experiments.runner.study import read_study

KINDS: Final = ("right", "unknown", "moved")


@dataclass(frozen=True)
class Arm:
    name: str  # of it
    rate: float  # chosen on the first seed; of the decisive arm with new seeds, set in advance
    runs: Mapping[int, Record]  # finished ones, by seed

    def share(self, size: str, kind: str) -> list[float]:
        answers = [run["told"][size][kind] for run in self.runs.values()]
        return interval(np.array(answers, dtype=np.float64)).numbers

    def by_seed(self, size: str) -> dict[str, float]:
        return {str(seed): float(np.mean(run["told"][size]["right"])) for seed, run in self.runs.items()}

    def curve(self, kind: str) -> list[list[float]]:
        """Of each measurement in training step, mean, low, high over seeds."""
        runs = list(self.runs.values())
        places = range(len(runs[0]["measured"]))
        each = [[run["measured"][place][kind] for run in runs] for place in places]
        steps = [runs[0]["measured"][place]["step"] for place in places]
        return [[step, *student(values).numbers] for step, values in zip(steps, each, strict=True)]


def read_arms(folder: Path) -> tuple[Mapping[str, Any], list[Arm]]:
    """(settings, every arm whose learning rates have all been tried)."""
    about, finished = read_study(folder)
    runs, config, found = {Job(**run["job"]): run for run in finished}, about["config"], list[Arm]()
    new = {cast(int, job.seed): run for job, run in runs.items() if job.arm == AGAIN}
    if new:
        found.append(Arm(AGAIN, config["new_rate"], dict(sorted(new.items()))))
    for name in dict.fromkeys(job.arm for job in runs if job.arm != AGAIN):
        best = chosen(name, config["rates"], config["seeds"], runs, choosing_loss, choosing=1)
        if best is not None and best.runs:
            found.append(Arm(name, best.rate, best.runs))
    if not found:
        raise FileNotFoundError(f"no arm in {folder} has run with all its learning rates")
    return about, found


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, arms = read_arms(folder)
    sizes, pool = [str(size) for size in about["config"]["sizes"]], about["config"]["training"]["facts"]
    rows: list[dict[str, Any]] = [
        {
            "arm": one.name,
            "rate": one.rate,
            "right_by_seed": one.by_seed(str(pool)),
            "sizes": {size: {kind: one.share(size, kind) for kind in KINDS} for size in sizes},
            "curve": {kind: one.curve(kind) for kind in ("right", "unknown")},
            "seconds": float(np.mean([run["seconds"] for run in one.runs.values()])),
        }
        for one in arms
    ]
    content: dict[str, Any] = {
        "interval": "mean, and 95 % of Student's t over seeds",
        "pool": pool,
        "arms": rows,
    }
    write(results / "results.json", content)
    about_arms = [([row["arm"], f"{row['rate']:g}", len(row["right_by_seed"])], row["sizes"]) for row in rows]
    lines = [
        [*named, size, kind, *(f"{number:.4f}" for number in shares[kind])]
        for named, of_sizes in about_arms
        for size, shares in of_sizes.items()
        for kind in KINDS
    ]
    write_table(results / "results.csv", ["arm", "rate", "seeds", "facts", "answers", "share", "low", "high"], lines)
    figure(content).savefig(results / "figure.png", dpi=110)
    return table(content)


def figure(content: Mapping[str, Any]) -> Any:
    """Right answers over training; and by the facts of a pool, right ones and "unknown" where it is right."""
    drawn, panels = canvas(20.0, 7.0, 1, 3)
    repeated = any(one["arm"] == AGAIN for one in content["arms"])  # then its runs stand for the arm
    shown = [one for one in content["arms"] if not (repeated and one["arm"] == DECISIVE)]
    titles = ("right answers over training", "right answers by facts in the pool", '"unknown" where it is right')
    for axes, title, label in zip(panels, titles, ("steps", *["facts in the pool"] * 2), strict=True):
        axes.set(title=title, xlabel=label, ylim=(-0.03, 1.03))
        ends: dict[str, tuple[float, float]] = {}
        for one in shown:
            if label == "steps":
                places, *bands = zip(*one["curve"]["right"], strict=True)
            else:
                kind = "right" if title.startswith("right") else "unknown"
                axes.set_xscale("log", base=4)
                places = [int(size) for size in one["sizes"]]
                axes.set_xticks(places, list(one["sizes"]))
                bands = list(zip(*(shares[kind] for shares in one["sizes"].values()), strict=True))
            name = DECISIVE if one["arm"] == AGAIN else one["arm"]
            plot_band(axes, places, *bands, color=colour(name), linewidth=2.2)
            ends[name] = places[-1], bands[0][-1]
        label_ends(axes, ends)
        axes.minorticks_off()
        enlarge(axes)
    return drawn


def table(content: Mapping[str, Any]) -> str:
    sizes = list(content["arms"][0]["sizes"])
    head = ["trained", "rate", "seeds", *(f"right of {size}" for size in sizes), "unknown", "values moved"]
    lines = [head]
    for one in content["arms"]:
        pool = one["sizes"].get(str(content["pool"]), one["sizes"][sizes[0]])
        rights = [said(one["sizes"][size]["right"], ".1%") for size in sizes]
        ends = [said(pool[share], ".1%") for share in ("unknown", "moved")]
        lines.append([one["arm"], f"{one['rate']:g}", str(len(one["right_by_seed"])), *rights, *ends])
    return aligned(lines, left=range(len(head)))
