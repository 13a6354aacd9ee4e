"""What the authors' runs say: each quantity over sizes and corpora, Table 1 computed again, files and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnflow._core.markup import aligned
from experiments.geometry_training.measures import CORPORA, LAYERS, OBJECTIVES, SHOWN, courses
from experiments.runner.figures import SIZE, canvas, colour
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, student
from experiments.runner.study import read_study

_HEAD = ("quantity", "definition", "model", "corpus", "value")
_PARTS = {"early": ":", "middle": "--", "late": "-"}


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    _, runs = read_study(folder)
    content = {
        "interval": "mean, and 95 % of Student's t over model sizes and corpora, one run each",
        "quantities": quantities(runs),
        "table 1": [{"model": run["model"], "corpus": run["corpus"], **run["table 1"]} for run in runs],
    }
    write(results / "results.json", content)
    rows = [
        (quantity, definition, run["model"], run["corpus"], f"{value:.5f}")
        for run in runs
        for quantity, values in run["measures"].items()
        for definition, value in values.items()
    ]
    write_table(results / "results.csv", _HEAD, rows)
    figure().savefig(results / "figure.png", dpi=90)
    return table(content)


def quantities(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each quantity and definition; the first definition of a quantity is the main one."""
    return [
        {
            "quantity": quantity,
            "definition": definition,
            "values": {f"{run['model']} {run['corpus']}": run["measures"][quantity][definition] for run in runs},
            "t": student([run["measures"][quantity][definition] for run in runs]).numbers,
        }
        for quantity, values in runs[0]["measures"].items()
        for definition in values
    ]


def table(content: Mapping[str, Any]) -> str:
    lines = [["quantity", "definition", "mean and interval", "above 0"]]
    for row in content["quantities"]:
        above = sum(value > 0 for value in row["values"].values())
        cells = [row["quantity"], row["definition"], f"{Interval(*row['t']):.3f}", f"{above} of {len(row['values'])}"]
        lines.append(cells)
    printed = [["model", "corpus", "default", "symmetric", "speed-up", "over itself"]]
    printed += [
        [row["model"], SHOWN[row["corpus"]], f"{row['default']:.3f}", f"{row['symmetric']:.3f}"]
        + [f"{row[name]:.0%}" for name in ("speed-up", "over itself")]
        for row in content["table 1"]
    ]
    return f"{aligned(lines, left=range(2))}\n{aligned(printed, left=range(2))}"


def figure() -> Any:
    """S and D by step, means over early, middle and late layers: a column for each size and score, a row a corpus."""
    drawn, panels = canvas(18.0, 11.0, len(CORPORA), 4)
    columns = [(model, score) for score in ("symmetry", "directionality") for model in LAYERS]
    for row, corpus in enumerate(CORPORA):
        for axes, (model, score) in zip(panels[row], columns, strict=True):
            axes.axhline(0, color="0.4", linewidth=0.8)
            axes.set_title(f"{score[0].upper()}, {LAYERS[model]} layers, {SHOWN[corpus]}", fontsize=SIZE)
            axes.tick_params(labelsize=SIZE)
            for objective in OBJECTIVES:
                _draw(axes, model, objective, corpus, score)
    for axes in panels[-1]:
        axes.set_xlabel("training step, thousands", fontsize=SIZE)
    drawn.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=SIZE)
    return drawn


def _draw(axes: Any, model: str, objective: str, corpus: str, score: str) -> None:
    course, third = courses()[model, objective, corpus], LAYERS[model] // 3
    values = getattr(course, score)
    parts = (values[:, :third], values[:, third:-third], values[:, -third:])
    name = {"encoder": "masked", "decoder": "causal"}[objective]  # the colours of these objectives elsewhere
    for (part, style), some in zip(_PARTS.items(), parts, strict=True):
        shown = {"color": colour(name), "linestyle": style, "label": f"{objective}, {part} layers"}
        axes.plot(course.steps / 1000, np.mean(some, axis=1), linewidth=1.6, **shown)
