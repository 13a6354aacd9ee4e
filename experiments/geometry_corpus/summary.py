"""What the measurement says: a row for each model and for each text, cut and objective, and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.geometry_corpus.counts import OBJECTIVES, shares
from experiments.runner.figures import SIZE, canvas, colour
from experiments.runner.files import write, write_table
from experiments.runner.statistics import interval, said
from experiments.runner.study import read_study

ORDERS: Final = {
    "the model's own scores": "own scores",
    "form of a head": "form of a head",
    "form of a head without the norm": "form, no norm",
    "full form": "form of all heads",
}
HULLS: Final = {"values": "hull of values", "tokens": "hull of tokens"}


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    _, runs = read_study(folder)
    content: dict[str, Any] = {
        "about": "of models [mean, low, high] over texts of means over layers; shares of tokens whose ratio of context "
        "to prediction has an interval without 1, and of those above 1",
        "models": [_model(run) for run in runs if run["kind"] == "model"],
        "texts": [row for run in runs if run["kind"] == "text" for row in _text(run)],
    }
    write(results / "results.json", content)
    lines: list[Sequence[object]] = [
        [run["job"]["arm"], "layer", number, name, value, "", ""]
        for run in runs if run["kind"] == "model"
        for number, layer in enumerate(run["layers"])
        for name, value in layer.items()
    ]  # fmt: skip
    lines += [
        [run["job"]["arm"], objective, piece, "context for each prediction", *ratio]
        for run in runs if run["kind"] == "text"
        for objective in OBJECTIVES
        for piece, ratio in zip(run["pieces"], run[objective]["ratios"], strict=True)
    ]  # fmt: skip
    numbers = [[f"{cell:.6g}" if isinstance(cell, float) else cell for cell in line] for line in lines]
    write_table(results / "results.csv", ["of", "what", "which", "quantity", "value", "low", "high"], numbers)
    figure(content, runs).savefig(results / "figure.png", dpi=110)
    return table(content)


def table(content: Mapping[str, Any]) -> str:
    head = ["model", *ORDERS.values(), *(f"distance, {name}" for name in HULLS.values())]
    rows = [
        [one["model"]]
        + [said(one[f"order, {name}"], ".4f") for name in ORDERS]
        + [said(one[f"distance to the hull of {name}"], ".4f") for name in HULLS]
        for one in content["models"]
    ]
    counted = [["text", "objective", "rows", "tokens", "apart from 1", "above 1", "lowest", "highest"]]
    counted += [
        [
            one["text"],
            one["objective"],
            str(one["rows"]),
            *(str(one[name]) for name in ("tokens", "apart", "above")),
            *(f"{one[name]:.3f}" for name in ("lowest", "highest")),
        ]
        for one in content["texts"]
    ]
    return f"{aligned([head, *rows], left=[0])}\n\n{aligned(counted, left=[0, 1])}"


def figure(content: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Any:
    """Order and hulls of every model, and the ratios of the most frequent tokens of one text."""
    drawn, panels = canvas(17.0, 6.5, 1, 3)
    names = [one["model"] for one in content["models"]]
    for axes, prefix, parts in ((panels[0], "order, ", ORDERS), (panels[1], "distance to the hull of ", HULLS)):
        for shift, (part, label) in enumerate(parts.items()):
            numbers = np.array([one[prefix + part] for one in content["models"]])
            places = np.arange(len(names)) + 0.16 * (shift - (len(parts) - 1) / 2)
            reach = np.abs(numbers[:, 1:] - numbers[:, :1]).T
            style = {"color": colour(label), "fmt": "o", "markersize": 8, "capsize": 4, "label": label}
            axes.errorbar(places, numbers[:, 0], reach, **style)
        axes.set_xticks(range(len(names)), names)
        axes.legend(frameon=False, fontsize=SIZE - 2)
    panels[0].set_title("pairs of keys in the order of their weights")
    panels[1].set_title("distance of outputs from a hull, of their norm")
    panels[1].set_ylim(bottom=0)
    counted = [run for run in runs if run["kind"] == "text"]
    last = counted[-1]["job"]["arm"].rpartition(",")[0] if counted else ""
    for run in counted:
        if run["job"]["arm"].rpartition(",")[0] == last:
            for objective in OBJECTIVES:
                name = f"{objective}, {run['cut']}"
                if objective == "causal" or run["cut"] == "packed":
                    _draw(panels[2], run[objective]["ratios"], name)
    panels[2].set(title=f"context for each prediction, {last}", xlabel="tokens, in the order of their ratios")
    panels[2].axhline(1, color="0.4", linewidth=0.8)
    panels[2].set_yscale("log", base=2)
    panels[2].set_ylim(0.25, 16)  # what only ever begins a document is beyond
    panels[2].set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["1/4", "1/2", "1", "2", "4", "8", "16"])
    panels[2].legend(frameon=False, fontsize=SIZE - 2)
    for axes in panels:
        axes.tick_params(labelsize=SIZE - 1)
        axes.title.set_fontsize(SIZE)
        axes.xaxis.label.set_fontsize(SIZE)
    return drawn


def _draw(axes: Any, ratios: Sequence[Sequence[float]], name: str) -> None:
    found = np.array(sorted(ratios, key=lambda ratio: ratio[0]))
    places = np.arange(len(found))
    axes.fill_between(places, found[:, 1], found[:, 2], color=colour(name), alpha=0.13, linewidth=0)
    axes.plot(places, found[:, 0], color=colour(name), linewidth=2, label=name)


def _model(run: Mapping[str, Any]) -> dict[str, Any]:
    names = run["texts"][0]
    found = {name: np.array([text[name] for text in run["texts"]]) for name in names}
    return {
        "model": run["job"]["arm"],
        "layers": len(run["layers"]),
        "texts": len(run["texts"]),
        **{
            name: float(values.max()) if "error" in name or "negative" in name else interval(values[None]).numbers
            for name, values in found.items()
        },
        "lowest order of a layer": min(layer["order, form of a head"] for layer in run["layers"]),
    }


def _text(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for objective in OBJECTIVES:
        one = run[objective]
        means = {piece: ratio[0] for piece, ratio in zip(run["pieces"], one["ratios"], strict=True)}
        order = sorted(means, key=means.__getitem__)
        rows.append(
            {
                "text": run["job"]["arm"],
                "cut": run["cut"],
                "objective": objective,
                "rows": one["rows"],
                **shares(one["ratios"]),
                "lowest": means[order[0]],
                "highest": means[order[-1]],
                "lowest tokens": order[:5],
                "highest tokens": order[-5:],
                "totals": one["totals"],
                "from the formula": one.get("largest difference from the formula"),
            }
        )
    return rows
