"""What the runs say: a table with intervals, CSV, JSON and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from experiments.facts.world import GROUPS
from experiments.runner.figures import canvas, colour, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.jobs import Record
from experiments.runner.statistics import Interval, interval
from experiments.runner.study import read_study

_LETTERS: Final = {"r": "right", "o": "old", "u": "unknown", "x": "other"}
_STYLES: Final = {
    "entries": ("o", "entries of the store"),
    "context": ("s", "3 nearest facts in the context"),
    "context, 1 fact": ("v", "the nearest fact in the context"),
    "context or unknown": ("D", "the same, or unknown if not near"),
    "shuffled entries": ("x", "entries, values shuffled"),
}
_SEARCHED: Final = ("^", "the 8 best entries, by search")

Names = tuple[str, int, str, str, str, str]


@dataclass(frozen=True)
class Share:
    """How often a group of facts was answered so."""

    arm: str  # what was trained
    size: int  # facts in the store
    way: str  # of reading
    phase: str  # "before" or "after" the edits
    group: str  # "untouched", "corrected", "deleted" or "inserted"
    wording: str  # "trained" or "paraphrased"
    seeds: int  # how many
    questions: int  # of each seed
    right: Interval  # share of right answers, with its interval over seeds and questions
    right_by_seed: list[float]  # the same for each seed
    old: float  # share that said the value before the edit (of inserted facts: the one to come)
    unknown: float  # share that said "unknown" where that was not right
    other: float  # share that said anything else


def shares(runs: Sequence[Record]) -> list[Share]:
    said: dict[Names, list[str]] = {}
    for run in runs:
        for told in run["told"]:
            names = (run["arm"], *(told[name] for name in ("size", "way", "phase", "group", "wording")))
            said.setdefault(cast(Names, names), []).append(told["said"])
    return [_share(names, letters) for names, letters in said.items()]


def _share(names: Names, letters: Sequence[str]) -> Share:
    table = np.array([list(row) for row in letters])
    of = {name: (table == letter).astype(np.float64) for letter, name in _LETTERS.items()}
    others = [float(of[name].mean()) for name in ("old", "unknown", "other")]
    return Share(
        *names, len(letters), len(letters[0]), interval(of["right"]), of["right"].mean(axis=1).tolist(), *others
    )


def costs(runs: Sequence[Record]) -> dict[str, dict[int, dict[str, Any]]]:
    """arm -> size -> recall and milliseconds, means over seeds."""
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for run in runs:
        for one in run["sizes"]:
            found.setdefault(run["arm"], {}).setdefault(one["size"], []).append(one)
    return {arm: {size: _mean(rows) for size, rows in sizes.items()} for arm, sizes in found.items()}


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    runs = read_study(folder)[1]
    every, spent = shares(runs), costs(runs)
    about = "right, low, high of results.csv: mean, and 95 % of Student's t over seeds and questions"
    write(results / "results.json", {"about": about, "recall_and_milliseconds": spent})
    names = ["arm", "size", "way", "phase", "group", "wording", "seeds", "questions"]
    rows: list[list[object]] = []
    for one in every:
        numbers = (*one.right.numbers, one.old, one.unknown, one.other)
        by_seed = " ".join(f"{number:.4f}" for number in one.right_by_seed)
        rows.append([*(getattr(one, name) for name in names), *(f"{number:.4f}" for number in numbers), by_seed])
    head = [*names, "right", "low", "high", "old", "unknown", "other", "right_by_seed"]
    write_table(results / "results.csv", head, rows)
    shown = "main" if "main" in spent else every[0].arm
    drawn = figure([one for one in every if one.arm == shown], spent[shown])
    drawn.savefig(results / "figure.png", dpi=130)
    return table(every)


def table(every: Sequence[Share]) -> str:
    """Markdown: right answers to paraphrased questions, before and after the edits."""
    lines = ["| trained | facts | read from | " + " | ".join(GROUPS) + " | old said of corrected, deleted |"]
    lines.append("|---|---|---|" + "---|" * (len(GROUPS) + 1))
    chosen = {(one.arm, one.size, one.way, one.phase, one.group): one for one in every if one.wording == "paraphrased"}
    for arm, size, way in dict.fromkeys((one.arm, one.size, one.way) for one in every):
        cells: list[str] = []
        for group in GROUPS:
            before, after = (chosen[arm, size, way, phase, group].right for phase in ("before", "after"))
            cells.append(f"{before.mean:.3f} -> {after.mean:.3f} [{after.low:.3f}, {after.high:.3f}]")
        old = [f"{chosen[arm, size, way, 'after', group].old:.3f}" for group in ("corrected", "deleted")]
        lines.append(f"| {arm} | {size} | {way} | " + " | ".join(cells) + f" | {', '.join(old)} |")
    return "\n".join(lines)


def figure(every: Sequence[Share], spent: Mapping[int, Mapping[str, Any]]) -> Any:
    """Right answers to paraphrased questions after the edits against the size of the store, and time."""
    drawn, panels = canvas(14.0, 3.8, 1, len(GROUPS) + 1)
    for axes, group in zip(panels, GROUPS, strict=False):
        for way, (mark, label) in _STYLES.items():
            rows = [
                one
                for one in every
                if (one.way, one.group, one.wording, one.phase) == (way, group, "paraphrased", "after")
            ]
            if rows:
                curve = zip(*(one.right.numbers for one in rows), strict=True)
                plot_band(axes, [one.size for one in rows], *curve, color=colour(way), marker=mark, label=label)
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(f"{group} facts: right after the edits", fontsize=9)
    for way in ("entries", "best entries", "context", "context, 1 fact"):
        mark, label = _STYLES.get(way, _SEARCHED)
        times = [spent[size]["milliseconds"][way] for size in spent]
        panels[-1].plot(list(spent), times, color=colour(way), marker=mark, markersize=4.5, label=label)
    panels[-1].set_ylim(bottom=0)
    panels[-1].set_title("milliseconds of one answer", fontsize=9)
    handles = {line.get_label(): line for axes in (panels[0], panels[-1]) for line in axes.get_lines()}
    drawn.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
    )
    for axes in panels:
        axes.set_xscale("log", base=4)
        axes.set_xticks(list(spent), [str(size) for size in spent])
        axes.minorticks_off()
        axes.set_xlabel("facts in the store", fontsize=9)
    return drawn


def _mean(rows: Sequence[Any]) -> Any:
    """Means of numbers with the same names, at any depth."""
    if isinstance(rows[0], Mapping):
        return {name: _mean([row[name] for row in rows]) for name in cast("Mapping[str, Any]", rows[0])}
    return float(np.mean(rows))
