"""What the runs say of each way of filling gaps, and of differences between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.infilling.figure import figure
from experiments.runner.files import write, write_table
from experiments.runner.jobs import Job, Record, choosing_loss, chosen
from experiments.runner.statistics import Array, interval, said, student
from experiments.runner.study import read_study

TABLE: Final = "neighbours"  # the way of the table
_OF_ROWS: Final = ("held_out", "right", "whole")
_COMPARED: Final = (
    ("one shot", "causal"),
    ("one shot", TABLE),
    ("random, one shot", "one shot"),
    ("random, half", "random, one shot"),
    ("random, one by one", "random, one shot"),
    ("random, one by one", "one shot"),
    ("random, one by one", "causal"),
    ("causal", TABLE),
)


@dataclass(frozen=True)
class Filler:
    """One way of filling gaps, at the chosen learning rate of its arm."""

    way: str  # its name
    arm: str  # whose models fill
    rate: float  # chosen on the first seed
    runs: Mapping[int, Record]  # finished ones of the arm, by seed

    def values(self, what: str) -> Array:
        """[seeds, rows] after all steps."""
        if what == "held_out":
            return np.array([run["measured"][-1]["held_out"][self.way] for run in self.runs.values()])
        return np.array([run["ways"][self.way][what] for run in self.runs.values()])

    def of_runs(self, what: str) -> list[Any]:
        return [run["ways"][self.way][what] for run in self.runs.values()]

    def curve(self) -> dict[int, Array]:
        """Held-out nats by step: [seeds, rows]."""
        steps = [entry["step"] for entry in next(iter(self.runs.values()))["measured"]]
        return {
            step: np.array([run["measured"][at]["held_out"][self.way] for run in self.runs.values()])
            for at, step in enumerate(steps)
        }


def read_fillers(folder: Path) -> tuple[Mapping[str, Any], dict[str, Filler]]:
    """(settings, every way whose arm has been trained with all learning rates)."""
    about, finished = read_study(folder)
    runs = {Job(**run["job"]): run for run in finished}
    config, found = about["config"], dict[str, Filler]()
    for arm in about["costs"]:
        best = chosen(arm, config["rates"], config["seeds"], runs, choosing_loss, choosing=1)
        if best is not None and best.runs:
            found |= {way: Filler(way, arm, best.rate, best.runs) for way in next(iter(best.runs.values()))["ways"]}
    return about, found


def differences(about: Mapping[str, Any], fillers: Mapping[str, Filler]) -> dict[str, dict[str, list[float]]]:
    """Of pairs of ways, by what is measured: the one less the other, on the same rows, and seeds if both have some."""
    found: dict[str, dict[str, list[float]]] = {}
    for one, other in _COMPARED:
        if one not in fillers or (other != TABLE and other not in fillers):
            continue
        here = found[f"{one} less {other}"] = {}
        for what in _OF_ROWS:
            mine = fillers[one].values(what)
            theirs = np.array([about["table"][what]]) if other == TABLE else fillers[other].values(what)
            if other != TABLE:
                seeds, others = list(fillers[one].runs), list(fillers[other].runs)
                both = [seed for seed in seeds if seed in others]
                mine, theirs = mine[[seeds.index(s) for s in both]], theirs[[others.index(s) for s in both]]
            here[what] = interval(mine - theirs).numbers
    return found


def rows_of(about: Mapping[str, Any], fillers: Mapping[str, Filler]) -> list[dict[str, Any]]:
    """Of each way: loss and quality of what it writes, passes, speed, and whether it is what the task says."""
    found: list[dict[str, Any]] = []
    for way, one in fillers.items():
        row: dict[str, Any] = {"way": way, "arm": one.arm, "rate": one.rate, "seeds": list(one.runs)}
        row |= {what: interval(one.values(what)).numbers for what in _OF_ROWS}
        row["real_words"] = student(one.of_runs("real_words")).numbers
        row["passes"] = one.of_runs("passes")[0]
        speeds = [n / s for n, s in zip(one.of_runs("letters"), one.of_runs("seconds"), strict=True)]
        row["letters_per_second"] = student(speeds).numbers
        row["training_seconds"] = float(np.mean([run["seconds"] for run in one.runs.values()]))
        agreed = [each for each in one.of_runs("agreement") if each]
        if agreed:
            row |= {key: sum(each[key] for each in agreed) for key in ("compared", "differ")}
            row["closest"] = max(each["closest"] for each in agreed)
        row["sample"] = one.of_runs("sample")[0]
        found.append(row)
    return found


def contents(about: Mapping[str, Any], fillers: Mapping[str, Filler]) -> dict[str, Any]:
    config, table_rows = about["config"], about["table"]
    tokens = config["batch_size"] * config["parts"] * config["length"]  # of a step
    of_table = {what: interval(np.array([table_rows[what]])).numbers for what in _OF_ROWS}
    return {
        "interval": "mean, and 95 % of Student's t over seeds and rows; of real_words and speed over seeds",
        "block": config["blocks"][0],
        "ways": rows_of(about, fillers),
        "differences": differences(about, fillers),
        "curves": {
            way: [
                [step * tokens, *interval(values).numbers]
                for step, values in one.curve().items()
                if step > (0 if way == "causal" else config["steps"] // 2)  # before that no gap has been seen
            ]
            for way, one in fillers.items()
        },
        "table": {**of_table, "real_words": table_rows["real_words"]},
        "real_words": about["real_words"],
        "samples": about["samples"],
        "costs": about["costs"],
    }


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, fillers = read_fillers(folder)
    if not fillers:
        raise FileNotFoundError(f"no arm in {folder} has run with all its learning rates")
    content = contents(about, fillers)
    write(results / "results.json", content)
    head = ["way", "rate", "seed", "step", *_OF_ROWS, "real_words", "letters_per_second"]
    write_table(results / "results.csv", head, [line for one in fillers.values() for line in _lines(one)])
    figure(content).savefig(results / "figure.png", dpi=110)
    return table(content)


def _lines(one: Filler) -> list[list[object]]:
    """Of each seed its curve, and what was measured at its end."""
    lines: list[list[object]] = []
    curve = one.curve()
    last = max(curve)
    for number, (seed, run) in enumerate(one.runs.items()):
        ways = run["ways"][one.way]
        for step, values in curve.items():
            end = [
                *(f"{one.values(what)[number].mean():.6f}" for what in _OF_ROWS[1:]),
                f"{ways['real_words']:.6f}",
                f"{ways['letters'] / ways['seconds']:.1f}",
            ]
            loss = f"{values[number].mean():.6f}"
            lines.append([one.way, f"{one.rate:g}", seed, step, loss, *(end if step == last else [""] * len(end))])
    return lines


def table(content: Mapping[str, Any]) -> str:
    lines = [["way", "rate", "seeds", "passes", "held-out loss", "right", "whole", "real words", "letters/s", "differ"]]
    for one in content["ways"]:
        cells = [one["way"], f"{one['rate']:g}", str(len(one["seeds"])), str(one["passes"])]
        cells += [said(one[key]) for key in (*_OF_ROWS, "real_words")] + [f"{one['letters_per_second'][0]:.0f}"]
        lines.append([*cells, f"{one['differ']} of {one['compared']}" if "compared" in one else ""])
    bar = content["table"]
    cells = [TABLE, "", "", "", *(said(bar[key]) for key in _OF_ROWS), f"{bar['real_words']:.3f}", "", ""]
    lines.append(cells)
    more = [
        f"{name}: " + ", ".join(f"{what} {said(value)}" for what, value in each.items())
        for name, each in content["differences"].items()
    ]
    text = f"letters in real words, of the text itself: {content['real_words']:.3f}"
    return "\n".join([aligned(lines, left=range(len(lines[0]))), text, *more])
