"""What the runs say, by task: faithfulness, losses by sign of the bias, and operands; files, table and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attnflow._core.markup import aligned
from experiments.bias_faithfulness.faithful import READINGS
from experiments.bias_faithfulness.study import SIGNS
from experiments.runner.figures import SIZE, canvas, colour, enlarge
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, student
from experiments.runner.study import read_study

FAITHFUL: Final = "faithfulness of the bias less that of the weights"
_HEAD: Final = ("task", "quantity", "seed", "value")
_COLOURS: Final = {"bias": "guidance", "weights": "key", "removal": "plain", "chance": "random"}

Values = Mapping[tuple[str, str], Sequence[float]]  # (task, quantity) -> by seed


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    _, runs = read_study(folder)
    values = values_of(runs)
    rows = [
        {"task": task, "quantity": quantity, "by seed": list(each), "t": student(each).numbers}
        for (task, quantity), each in values.items()
    ]
    write(results / "results.json", {"interval": "mean, and 95 % of Student's t over seeds", "quantities": rows})
    lines = [(*key, seed, f"{value:.6f}") for key, each in values.items() for seed, value in enumerate(each)]
    write_table(results / "results.csv", _HEAD, lines)
    figure(values).savefig(results / "figure.png", dpi=90)
    shown = [["task", "quantity", "mean and interval"]]
    shown += [[row["task"], row["quantity"], f"{Interval(*row['t']):.3f}"] for row in rows]
    return aligned(shown, left=range(2))


def values_of(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """All quantities of all runs, seeds in order."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in sorted(runs, key=lambda run: run["job"]["seed"]):
        task = run["job"]["arm"].partition(" ")[0]
        for quantity, value in quantities(run).items():
            found.setdefault((task, quantity), []).append(value)
    return found


def quantities(run: Mapping[str, Any]) -> dict[str, float]:
    """Of one run.

    >>> scores = {name: {"moved": moved} for name, moved in zip(READINGS, (1.0, 2.0, 3.0, 0.5))}
    >>> found = quantities({"explained": scores})
    >>> found["faithfulness of the bias"], found["faithfulness of the bias less that of the weights"]
    (0.2, -0.4)
    """
    found: dict[str, float] = {}
    if "explained" in run:
        scores = run["explained"]
        low, high = (scores[name]["moved"] for name in ("chance", "removal"))
        faithful = {name: (scores[name]["moved"] - low) / (high - low) for name in ("bias", "weights")}
        found |= {f"faithfulness of the {name}": value for name, value in faithful.items()}
        found[FAITHFUL] = faithful["bias"] - faithful["weights"]
        found |= {f"{name}: {what}": value for name in READINGS for what, value in scores[name].items()}
    for where in ("clipped", "distracted"):
        losses = {name: one["loss"] for name, one in run.get(where, {}).items()}
        found |= {f"{where}: loss, {name}": loss for name, loss in losses.items()}
        if losses:
            found[f"{where}: loss, positive less as trained"] = losses["positive"] - losses["as trained"]
            found[f"{where}: loss, positive less negative"] = losses["positive"] - losses["negative"]
    right = {name: one["accuracy"] for name, one in run.get("operands", {}).items()}
    for name, share in right.items():
        found[f"right without the operand, {name}"] = share
        found[f"lost without the operand, {name}"] = right["none, from ="] - share
    return found


def figure(values: Values) -> Any:
    """Faithfulness of bias and weights by task, and the loss by what is kept of the bias; a dot is a seed."""
    drawn, panels = canvas(13.0, 4.8, 1, 2)
    tasks = list(dict.fromkeys(task for task, quantity in values if quantity == FAITHFUL))
    for place, task in enumerate(tasks):
        for side, name in ((-0.12, "bias"), (0.12, "weights")):
            _dots(panels[0], place + side, values[task, f"faithfulness of the {name}"], colour(_COLOURS[name]))
    panels[0].set_title("faithfulness (0: chance, 1: single removals); blue: bias, orange: weights")
    kept = [*((task, "clipped") for task in tasks), *(("recall", "distracted") for _ in tasks[1:2])]
    for place, (task, where) in enumerate(kept):
        for side, (name, shown) in enumerate(zip(list(SIGNS)[1:], ("key", "guidance", "random"), strict=True)):
            whole = values[task, f"{where}: loss, as trained"]
            less = [one - other for one, other in zip(values[task, f"{where}: loss, {name}"], whole, strict=True)]
            _dots(panels[1], place + 0.2 * (side - 1), less, colour(shown))
    panels[1].set_title("loss less that as trained; orange: negative values, blue: positive, grey: no bias")
    names = [tasks, [f"{task}\ndistracted" if where == "distracted" else task for task, where in kept]]
    for axes, labels in zip(panels, names, strict=True):
        axes.axhline(0, color="0.4", linewidth=0.8)
        enlarge(axes)
        axes.title.set_fontsize(SIZE - 4)
        axes.set_xticks(range(len(labels)), labels, fontsize=SIZE)
    return drawn


def _dots(axes: Any, place: float, values: Sequence[float], shown: str) -> None:
    axes.plot([place] * len(values), values, "o", color=shown, markersize=6, alpha=0.7)
