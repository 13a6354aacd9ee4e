"""Results of the study computed again from its table, since its runs were not kept.

`python -m experiments.infilling.from_table` writes results.json and the figure anew: intervals that were those of a
bootstrap become those of Student's t over seeds. The table has the mean over rows of each seed.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.infilling.figure import figure
from experiments.infilling.summary import Filler, contents
from experiments.runner.experiment import ROOT
from experiments.runner.files import read, write


def fillers_of(results: Path) -> dict[str, Filler]:
    """Every way of results.csv; what has no place there (passes, samples, agreement) is that of results.json."""
    rows: defaultdict[str, defaultdict[int, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    with (results / "results.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows[row["way"]][int(row["seed"])].append(row)
    found: dict[str, Filler] = {}
    for one in read(results / "results.json")["ways"]:
        way, runs = one["way"], dict[int, dict[str, Any]]()
        for number, (seed, lines) in enumerate(rows[way].items()):
            end = {key: float(lines[-1][key]) for key in ("right", "whole", "real_words", "letters_per_second")}
            agreed = {key: one[key] for key in ("compared", "differ", "closest")} if "compared" in one else {}
            of_way = {
                "right": [end["right"]],
                "whole": [end["whole"]],
                "real_words": end["real_words"],
                "letters": end["letters_per_second"],
                "seconds": 1.0,
                "passes": one["passes"],
                "sample": one["sample"],
                "agreement": {} if number else agreed,
            }
            measured = [{"step": int(line["step"]), "held_out": {way: [float(line["held_out"])]}} for line in lines]
            runs[seed] = {"measured": measured, "ways": {way: of_way}, "seconds": one["training_seconds"]}
        found[way] = Filler(way, one["arm"], one["rate"], runs)
    return found


def recomputed(results: Path) -> dict[str, Any]:
    return contents(read(results / "study.json"), fillers_of(results))


def main() -> None:
    results = ROOT / "infilling" / "results"
    content = recomputed(results)
    write(results / "results.json", content)
    figure(content).savefig(results / "figure.png", dpi=110)


if __name__ == "__main__":
    main()
