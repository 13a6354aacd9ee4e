"""What the finished runs say: accuracy by rung and arm, differences, ceilings, and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attnflow._core.markup import aligned
from experiments.pairwise_control.ceilings import best_end, best_key_only, key_only_bound
from experiments.pairwise_control.study import choosing_loss, name_of
from experiments.pairwise_control.task import Task
from experiments.runner.figures import SIZE, canvas, colour
from experiments.runner.files import write, write_table
from experiments.runner.jobs import DIVERGED, Chosen, Job, Record, chosen
from experiments.runner.statistics import Interval, student
from experiments.runner.study import read_study

_MEASURED: Final = ("accuracy", "loss", "attends to the right one", "attends to an end")
_SHOWN: Final = {  # what stands before attention
    "nothing": "nothing",
    "norm": "RMSNorm",
    "attention": "an attention\nlayer",
    "network": "a feed-forward\nlayer",
    "block": "a whole block,\nRMSNorm",
}


def summarise(folder: Path, results: Path) -> str:
    """Write results.csv, results.json and figure.png, and return the table."""
    settings, records = read_study(folder)
    runs = {Job(**run["job"]): run for run in records}
    config: dict[str, Any] = {**settings["config"], "seeds": _complete(settings["config"], runs)}
    if not config["seeds"]:
        raise FileNotFoundError(f"no seed in {folder} has run with every arm and rate")
    found = {
        (rung, arm): one
        for rung in config["rungs"]
        for arm in config["arms"]
        if (one := _chosen(name_of(rung, arm), config, runs)) is not None
    }
    task = Task(**config["task"])
    content = {
        "seeds": config["seeds"],
        "added parameters": settings["added parameters"],
        "ceilings": {
            "guess": 1 / task.candidates,
            "best end": best_end(task),
            "best key-only found": best_key_only(task),
            "key-only bound": key_only_bound(task),
        },
        "rows": [_row(rung, arm, one) for (rung, arm), one in found.items()],
        "differences": _differences(found, config, runs),
    }
    write(results / "results.json", content)
    write_table(results / "results.csv", *_table(found, runs))
    figure(content).savefig(results / "figure.png", dpi=130)
    return _printed(content)


def _complete(config: Mapping[str, Any], runs: Mapping[Job, Record]) -> list[int]:
    """The seeds that have run with every arm and every rate of the study."""
    names = [name_of(rung, arm) for rung in config["rungs"] for arm in config["arms"]]
    jobs = [(name, rate) for name in names for rate in config["rates"]]
    return [seed for seed in config["seeds"] if all(Job(name, rate, seed) in runs for name, rate in jobs)]


def _chosen(name: str, config: Mapping[str, Any], runs: Mapping[Job, Record]) -> Chosen | None:
    seeds = config["seeds"]
    return chosen(name, config["rates"], seeds, runs, choosing_loss, choosing=len(seeds))


def _row(rung: str, arm: str, one: Chosen) -> dict[str, Any]:
    values = {name: [run[name] for run in one.runs.values()] for name in _MEASURED}
    return {
        "rung": rung,
        "arm": arm,
        "rate": one.rate,
        "tried": one.tried,
        "at end": one.at_end,
        **{name: student(each).numbers for name, each in values.items()},
        "by seed": values["accuracy"],
    }


def _differences(
    found: Mapping[tuple[str, str], Chosen], config: Mapping[str, Any], runs: Mapping[Job, Record]
) -> list[dict[str, Any]]:
    """Accuracy of guidance less every other arm, paired by seed: each at its best rate, and both at each rate."""
    rows: list[dict[str, Any]] = []
    for (rung, arm), one in found.items():
        own = found.get((rung, "guidance"))
        if arm == "guidance" or own is None:
            continue
        best = [own.runs[seed]["accuracy"] - run["accuracy"] for seed, run in one.runs.items() if seed in own.runs]
        same: dict[str, list[float]] = {}
        for rate in config["rates"]:
            pairs = [
                [runs[Job(name_of(rung, name), rate, seed)] for name in ("guidance", arm)] for seed in config["seeds"]
            ]
            if not any(DIVERGED in run for pair in pairs for run in pair):
                same[f"{rate:g}"] = student([mine["accuracy"] - other["accuracy"] for mine, other in pairs]).numbers
        rows.append({"rung": rung, "less": arm, "best rates": student(best).numbers, "equal rates": same})
    return rows


def _table(found: Mapping[tuple[str, str], Chosen], runs: Mapping[Job, Record]) -> tuple[list[str], list[list[object]]]:
    """A line for every run; those with the rate that was chosen are marked."""
    head = ["rung", "arm", "rate", "chosen", "seed", "choosing loss", *_MEASURED]
    rows: list[list[object]] = []
    for job, run in sorted(runs.items(), key=lambda item: item[0].name):
        rung, arm = job.arm.split()
        one = found.get((rung, arm))
        marked = "" if one is None else "yes" if job.rate == one.rate else "no"
        said = ["diverged"] * 5 if DIVERGED in run else [f"{run[name]:.5f}" for name in ("choosing", *_MEASURED)]
        rows.append([rung, arm, f"{job.rate:g}", marked, job.seed, *said])
    return head, rows


def _printed(content: Mapping[str, Any]) -> str:
    rows = [["rung", "arm", "rate", "right", "attends to the right one", "attends to an end"]]
    for row in content["rows"]:
        shares = [f"{Interval(*row[name]):.3f}" for name in ("accuracy", *_MEASURED[2:])]
        rows.append([row["rung"], row["arm"], f"{row['rate']:g}{' (end)' * row['at end']}", *shares])
    ceilings = ", ".join(f"{name} {value:.3f}" for name, value in content["ceilings"].items())
    return f"{aligned(rows, left=range(2))}\n{ceilings}"


def figure(content: Mapping[str, Any]) -> Any:
    """Accuracy by rung and arm with 95 % intervals; lines at what two forms of score can reach without a network."""
    rungs = list(dict.fromkeys(row["rung"] for row in content["rows"]))
    arms = list(dict.fromkeys(row["arm"] for row in content["rows"]))
    drawn, panels = canvas(12.5, 5.6, 1, 1)
    axes = panels[0]
    for place, arm in enumerate(arms):
        rows = [row for row in content["rows"] if row["arm"] == arm]
        shift = 0.15 * (place - (len(arms) - 1) / 2)
        places = [rungs.index(row["rung"]) + shift for row in rows]
        middle = [100 * row["accuracy"][0] for row in rows]
        # An interval of Student's t knows no bounds, a share does.
        reach = [
            [100 * (row["accuracy"][0] - max(0.0, row["accuracy"][1])) for row in rows],
            [100 * (min(1.0, row["accuracy"][2]) - row["accuracy"][0]) for row in rows],
        ]
        axes.errorbar(places, middle, reach, fmt="o", color=colour(arm), markersize=8, capsize=4, label=arm)
    for number in range(1, len(rungs)):
        axes.axvline(number - 0.5, color="0.85", linewidth=1)
    _draw_ceilings(axes, content["ceilings"])
    axes.set_xticks(range(len(rungs)), [_SHOWN[rung] for rung in rungs], fontsize=SIZE)
    axes.set_xlabel("what stands before the attention that answers", fontsize=SIZE)
    axes.set_ylabel("right answers, %", fontsize=SIZE)
    axes.tick_params(axis="y", labelsize=SIZE)
    axes.set_ylim(0, 105)
    axes.set_xlim(-0.5, len(rungs) - 0.5)
    drawn.legend(loc="outside upper center", ncols=len(arms), frameon=False, fontsize=SIZE)
    return drawn


def _draw_ceilings(axes: Any, ceilings: Mapping[str, float]) -> None:
    """Across the first rung, where they hold."""
    lines: Sequence[tuple[str, str, str, float]] = (
        ("key-only bound", "key", "bound of key-only scores", 6),
        ("best key-only found", "key", "best key-only scores found", 6),
        ("best end", "plain", "best choice of an end", -20),  # below the points, which lie on the line
    )
    for name, arm, text, away in lines:
        height = 100 * ceilings[name]
        axes.plot([-0.5, 0.5], [height, height], color=colour(arm), linestyle="--", linewidth=1.5)
        axes.annotate(
            text,
            (-0.48, height),
            xytext=(0, away),
            textcoords="offset points",
            color=colour(arm),
            fontsize=0.7 * SIZE,
        )
