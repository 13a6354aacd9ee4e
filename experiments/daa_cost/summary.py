"""What the measurement says: parameters and operations of every arm, ratios of times to the base, and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attnflow._core.markup import aligned
from experiments.daa_cost.study import BASE, OPERATIONS, arms
from experiments.runner.figures import SIZE, canvas, colour
from experiments.runner.files import write, write_table
from experiments.runner.statistics import student
from experiments.runner.study import read_study

WHAT: Final = ("training", "decoding")
PRINTED: Final = {"training": 0.09, "decoding": 0.12}  # Table 5: throughput lost, latency added


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, runs = read_study(folder)
    rounds = [run for run in runs if run["job"]["arm"] == "round"]
    counts = next((run for run in runs if run["job"]["arm"] == OPERATIONS), None)
    if counts is None or not rounds:
        raise FileNotFoundError(f"{folder}: expected the job {OPERATIONS!r} and a round, got {len(rounds)} rounds")
    content: dict[str, Any] = {
        "about": "[mean, low, high] over rounds: throughput lost in training, 1 - t(base) / t; latency added in "
        "decoding, t / t(base) - 1; each round has its own base",
        "shape": about["config"]["shape"],
        "layers": about["config"]["layers"],
        "length": about["config"]["length"],
        "device": about["config"]["device"],
        "rounds": len(rounds),
        "threads": sorted({run["threads"] for run in rounds}),
        "highest load before a round": max(run["load before"] for run in rounds),
        "seconds of the base": {what: student([run["seconds"][BASE][what] for run in rounds]).mean for what in WHAT},
        "cost": {name: {what: costs(rounds, name, what) for what in WHAT} for name in arms() if name != BASE},
        "operations": counts["measured"],
        "shapes": counts["shapes"],
    }
    write(results / "results.json", content)
    rows = [
        [run["job"]["seed"], name, what, f"{run['seconds'][name][what]:.5f}"]
        for run in rounds for name in arms() for what in WHAT
    ]  # fmt: skip
    write_table(results / "results.csv", ["round", "arm", "what", "seconds"], rows)
    figure(content).savefig(results / "figure.png", dpi=110)
    return table(content)


def costs(rounds: Sequence[Mapping[str, Any]], arm: str, what: str) -> list[float]:
    """[mean, low, high] over rounds of what an arm costs, as Table 5 counts it."""
    ratios = [run["seconds"][arm][what] / run["seconds"][BASE][what] for run in rounds]
    return student([1 - 1 / ratio if what == "training" else ratio - 1 for ratio in ratios]).numbers


def table(content: Mapping[str, Any]) -> str:
    base = content["operations"][BASE]
    first = [["bias", "parameters", "operations of a pass", "throughput lost", "latency added"]]
    shape = content["shapes"][content["shape"]]
    for name, one in content["cost"].items():
        more = shape["arms"].get(name)
        first.append(
            [
                name,
                f"{more['parameters']:,}" if more else "",
                f"{100 * (content['operations'][name] / base - 1):+.2f} %",
                *(_said(one[what]) for what in WHAT),
            ]
        )
    second = [["model", "tokens", "base, TFLOP", "g as printed, a layer", "g separated, a layer", "parameters of g"]]
    for name, one in content["shapes"].items():
        network = one["operations of g in a layer"]
        second.append(
            [
                name,
                str(one["length"]),
                *(f"{value / 1e12:.4f}" for value in (one["operations of the base"], *network.values())),
                f"{one['arms']['guidance, every other']['parameters']:,}",
            ]
        )
    rounds = f"{content['rounds']} rounds, load before a round at most {content['highest load before a round']:.1f}"
    return f"{aligned(first, left=[0])}\n\n{aligned(second, left=[0])}\n{rounds}"


def figure(content: Mapping[str, Any]) -> Any:
    """Cost of every arm in training and in decoding, with intervals over rounds; a line where Table 5 has it."""
    drawn, panels = canvas(14.0, 5.5, 1, 2)
    names = list(content["cost"])
    titles = {"training": "throughput lost in training, %", "decoding": "latency added in decoding, %"}
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        for place, name in enumerate(names):
            mean, low, high = (100 * value for value in content["cost"][name][what])
            style = {"color": colour(name.partition(",")[0]), "fmt": "o", "markersize": 8, "capsize": 4}
            axes.errorbar([mean], [place], xerr=[[mean - low], [high - mean]], **style)
        axes.axvline(0, color="0.4", linewidth=0.8)
        axes.axvline(100 * PRINTED[what], color="0.4", linewidth=1.2, linestyle="--")
        axes.set_yticks(range(len(names)), names if what == "training" else [""] * len(names))
        axes.invert_yaxis()
        axes.set_title(title, fontsize=SIZE)
        axes.tick_params(labelsize=SIZE - 1)
    return drawn


def _said(numbers: Sequence[float]) -> str:
    return "{:+.1f} % [{:+.1f}, {:+.1f}]".format(*(100 * value for value in numbers))
