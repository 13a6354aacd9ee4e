"""The settings of the measurement, the texts that it learns, and what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from attnflow.models import sample_text
from experiments.geometry_theory.theory import STAGES, measure_updates
from experiments.records import canvas, describe, read, write, write_table

WORKS: Final = ("sonnets", "hamlet", "midsummer_nights_dream")
_QUANTITIES: Final = {
    "symmetry": "S",
    "directionality": "D",
    "more_columns": "share of strong columns less rows",
}
_COLOURS: Final = {"causal": "#c2571a", "bidirectional": "#1f5fa8", "difference": "#6a6a6a"}


@dataclass(frozen=True)
class Measurement:
    """What is trained. The defaults are the scale "tiny", two minutes of one CPU core.

    Attributes:
        text: "letters" of Shakespeare, or "chain": a Markov chain of 48 tokens, drawn anew for each seed.
        seeds: models for each objective.
        steps: of the optimiser.
        width: of the models.
    """

    text: str = "letters"
    seeds: int = 8
    steps: int = 600
    width: int = 64


def tiny() -> Measurement:
    """Two minutes of one CPU core."""
    return Measurement()


def small() -> Measurement:
    """Wider and longer; not run yet."""
    return Measurement(steps=10_000, width=256)


SCALES: Final = {"tiny": tiny, "small": small}


def letters() -> Tensor:
    """The characters of three works of Shakespeare as numbers from 0.

    Raises:
        MissingPackage: the package `shakespeare` is not installed.
    """
    text = "".join(sample_text(work) for work in WORKS)
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])


def run(settings: Measurement, folder: Path) -> None:
    """Measure, if that is not done yet.

    Raises:
        ValueError: the folder holds a measurement with other settings.
    """
    describe(folder / "study.json", {"config": asdict(settings)}, ("torch", "attnflow"))
    path = folder / "runs" / "updates.json"
    if not path.is_file():
        tokens = letters() if settings.text == "letters" else None
        study = measure_updates(settings.seeds, settings.steps, tokens, settings.width)
        write(path, {**asdict(study), "table": str(study)})


def summarise(folder: Path) -> str:
    """Write results.csv and figure.png, and return the table.

    Raises:
        FileNotFoundError: nothing was measured in the folder.
        MissingExtra: matplotlib is not installed.
    """
    study = read(folder / "runs" / "updates.json")
    rows = [
        [row["stage"], row["objective"], quantity, *(f"{row[quantity][end]:.5f}" for end in ("mean", "low", "high"))]
        for row in study["rows"]
        for quantity in _QUANTITIES
    ]
    write_table(folder / "results.csv", ["stage", "objective", "quantity", "mean", "low", "high"], rows)
    figure(study).savefig(folder / "figure.png", dpi=130)
    losses = ", ".join(f"{name} {value['mean']:.2f}" for name, value in study["losses"].items())
    return f"{study['table']}\nlosses: {losses}, by frequencies alone {study['unigram_loss']:.2f}"


def figure(study: Mapping[str, Any]) -> Any:
    """Symmetry, directionality and strong columns of each kind of update, with 95 % intervals over seeds.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    drawn, panels = canvas(11.0, 3.4, 1, len(_QUANTITIES))
    for axes, (quantity, title) in zip(panels, _QUANTITIES.items(), strict=True):
        axes.axhline(0, color="0.4", linewidth=0.8)
        for shift, (objective, colour) in enumerate(_COLOURS.items()):
            values = [row[quantity] for row in study["rows"] if row["objective"] == objective]
            middle = [value["mean"] for value in values]
            reach = [[abs(value["mean"] - value[end]) for value in values] for end in ("low", "high")]
            places = [place + 0.2 * (shift - 1) for place in range(len(STAGES))]
            axes.errorbar(places, middle, reach, color=colour, fmt="o", markersize=4.5, capsize=3, label=objective)
        axes.set_xticks(range(len(STAGES)), [stage.replace(" ", "\n") for stage in STAGES], fontsize=8)
        axes.set_title(title, fontsize=10)
    panels[0].legend(frameon=False, fontsize=8)
    return drawn
