"""Results of the first study computed again from its table, since its runs were not kept.

`python -m experiments.hasse.from_table` writes results.json and the figure anew. Its intervals were those of a
bootstrap over three seeds, which are the smallest and the largest value; now they are those of Student's t.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.hasse.figure import Curve, figure
from experiments.hasse.summary import contents, curve, numbers
from experiments.runner.experiment import ROOT
from experiments.runner.files import read, write


def curves_of(results: Path, about: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Curve]:
    """Every arm of results.csv, its seeds and steps as they stand there."""
    held: defaultdict[str, defaultdict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    rates: dict[str, float] = {}
    with (results / "results.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            held[row["arm"]][int(row["seed"])][int(row["step"])] = float(row["held_out_loss"])
            rates[row["arm"]] = float(row["rate"])
    found: dict[str, Curve] = {}
    for arm, by_seed in held.items():
        steps = list(next(iter(by_seed.values())))
        losses = np.array([[losses[step] for step in steps] for losses in by_seed.values()])
        runs = {seed: {"seconds": seconds[arm]} for seed in by_seed}
        found[arm] = curve(arm, rates[arm], runs, steps, losses, about)
    return found


def recomputed(results: Path) -> tuple[dict[str, Any], dict[str, Curve]]:
    """(what results.json should hold, the curves), from results.csv and the values by seed of what was written."""
    about, held = read(results / "study.json"), read(results / "results.json")
    curves = curves_of(results, about, {one["arm"]: one["seconds"] for one in held["arms"]})
    texts = [{**one, **{key: numbers(values) for key, values in one["by_seed"].items()}} for one in held["written"]]
    return contents(about, curves, {}, texts), curves


def main() -> None:
    results = ROOT / "hasse" / "results"
    content, curves = recomputed(results)
    write(results / "results.json", content)
    figure(content, curves).savefig(results / "figure.png", dpi=110)


if __name__ == "__main__":
    main()
