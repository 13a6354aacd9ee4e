"""What the arms have: a table with intervals, paired differences from the base, CSV, JSON and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.runner.figures import SIZE, canvas, colour
from experiments.runner.files import write, write_table
from experiments.runner.jobs import DIVERGED
from experiments.runner.statistics import Interval, interval, proportion, said
from experiments.runner.study import read_study

BASE: Final = "base"
LOSS: Final = "nats per token"
ZERO: Final = ("perplexity", "hellaswag", "humaneval", "gsm8k zero-shot", "quality")

Row = Mapping[str, Any]


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, finished = read_study(folder)
    runs = [run for run in finished if DIVERGED not in run]
    rows = values_of(runs)
    waits = [arm for arm in about["config"]["arms"] if arm not in {row["arm"] for row in rows}]
    diverged = [
        f"{run['job']['arm']}, seed {run['job']['seed']}: {run[DIVERGED]}" for run in finished if DIVERGED in run
    ]
    content = {
        "interval": "mean, 95 %: Wilson's for what is right or wrong, by items; else Student's t over seeds and items",
        "difference": "from the base on the same items: Student's t over items",
        "rows": rows,
        "not_run": {name: why for name, (_, _, why) in about["items"].items() if why},
        "arms_to_come": waits,
        "diverged": diverged,
        "training": {f"{run['job']['arm']}-{run['job']['seed']}": run["training"] for run in runs if run["training"]},
        "seconds": {f"{run['job']['arm']}-{run['job']['seed']}": run["seconds_here"] for run in runs},
    }
    write(results / "results.json", content)
    head = ["arm", "benchmark", "measure", "seeds", "items", "of", "value", "low", "high", "less_base", "from", "to"]
    cells = [
        [
            *(row[key] for key in ("arm", "benchmark", "measure", "seeds", "items", "total")),
            *(f"{number:.6f}" for number in (*row["value"], *(row["difference"] or ()))),
        ]
        for row in rows
    ]
    write_table(results / "results.csv", head, ([*row, *[""] * (len(head) - len(row))] for row in cells))
    if any(row["arm"] == BASE for row in rows):
        figure(rows).savefig(results / "figure.png", dpi=150)
    return table(rows, content["not_run"], waits)


def values_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each arm and benchmark that has been run, all seeds together."""
    held: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        for name, score in run["scores"].items():
            if not score["not_run"]:
                held.setdefault((run["job"]["arm"], name), []).append(score)
    rows: list[dict[str, Any]] = []
    for (arm, name), scores in held.items():
        values = np.array([score["values"] for score in scores])
        loss = scores[0]["measure"] == LOSS
        found = interval(values) if loss else _share(values)
        base = held.get((BASE, name))
        compared: Interval | None = None
        if arm != BASE and base is not None:
            compared = interval(values - np.array(base[0]["values"])[None])
        rows.append(
            {
                "arm": arm,
                "benchmark": name,
                "measure": scores[0]["measure"],
                "seeds": len(scores),
                "items": len(scores[0]["values"]),
                "total": scores[0]["total"],
                "value": found.numbers,
                "difference": None if compared is None else compared.numbers,
                "right": None if loss else int(values.sum()),
                "by_item": [score["values"] for score in scores],
                "tokens": [scores[0]["tokens_before"], scores[0]["tokens_after"]],
                "not_shared": scores[0]["not_shared"],
            }
        )
    return rows


def _share(values: np.ndarray[Any, np.dtype[np.float64]]) -> Interval:
    """Wilson's interval as if the seeds were one: they answer the same items, so the items alone are counted."""
    one = proportion(round(float(values.mean(axis=0).sum())), values.shape[1])
    return Interval(float(values.mean()), one.low, one.high)


def table(rows: Sequence[Row], not_run: Mapping[str, str], waits: Sequence[str]) -> str:
    cells = [["benchmark", "arm", "value, 95 %", "less base", "items"]]
    for row in sorted(rows, key=lambda row: row["benchmark"]):
        digits = ".4f" if row["measure"] == LOSS else ".1%"
        difference = "" if row["difference"] is None else said(row["difference"], f"+{digits}")
        items = f"{row['items']} of {row['total']}"
        cells.append([row["benchmark"], row["arm"], said(row["value"], digits), difference, items])
    lines = [aligned(cells, left=range(5))]
    lines += [f"{name}: not run, {why}" for name, why in not_run.items()]
    lines += [f"to come: {', '.join(waits)}"] if waits else []
    return "\n".join(lines)


def figure(rows: Sequence[Row]) -> Any:
    """A panel for each benchmark: every arm with its interval."""
    names = list(dict.fromkeys(row["benchmark"] for row in rows if row["benchmark"] in ZERO))
    drawn, panels = canvas(4.2 * len(names), 4.6, 1, len(names))
    for axes, name in zip(panels, names, strict=True):
        chosen = [row for row in rows if row["benchmark"] == name]
        if name.startswith("gsm8k"):  # prompting of the base belongs beside the arms, which answer without examples
            chosen += [row for row in rows if row["benchmark"].startswith("gsm8k") and row["benchmark"] != name]
        loss = chosen[0]["measure"] == LOSS
        for place, row in enumerate(chosen):
            mean, low, high = (number if loss else 100 * number for number in row["value"])
            axes.errorbar(
                [mean], [place], xerr=[[mean - low], [high - mean]], fmt="o", color=colour(row["arm"]), markersize=8
            )
            prompting = row["benchmark"].removeprefix("gsm8k ") if row["benchmark"] != name else ""
            axes.annotate(
                prompting or row["arm"], (mean, place), xytext=(0, 8), textcoords="offset points",
                ha="center", fontsize=0.85 * SIZE, color=colour(row["arm"]),
            )  # fmt: skip
        axes.set_ylim(-0.5, len(chosen) - 0.1)
        axes.set_yticks([])
        axes.set_title(name, fontsize=SIZE)
        axes.set_xlabel(LOSS if loss else f"{chosen[0]['measure']}, %", fontsize=0.85 * SIZE)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.25)
    return drawn
