"""What edits did, over facts: shares with intervals, for held-out facts and for those the method was tuned on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.editing.study import ARMS
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, interval
from experiments.runner.study import read_study

Measured = Mapping[str, Any]

_QUANTITIES: Final[Mapping[str, Callable[[Measured, Measured], float]]] = {
    "fact": lambda after, _: float(after["is_other"][0]),
    "paraphrases": lambda after, _: float(np.mean(after["is_other"][1:])),
    "kept": lambda after, _: float(np.mean(after["other_facts_kept"])),
    "leaked": lambda after, _: float(np.mean(after["other_facts_leaked"])),
    "text": lambda after, before: after["text"] - before["text"],
    "change": lambda after, _: after.get("relative_change", 0.0),
}


@dataclass(frozen=True)
class Outcome:
    """One arm over one set of facts.

    Attributes:
        facts: "held out" or "tuned".
        arm: how the model was edited; "before": not.
        count: how many facts.
        quantities: with a 95 % interval over facts. Shares of prompts: of the fact and of its paraphrases that the new
            answer follows, of other facts that keep their answer or get the new one; the change of the loss on other
            text, in nats; the largest relative change of a layer's values.
    """

    facts: str
    arm: str
    count: int
    quantities: Mapping[str, Interval]


def outcomes(runs: Sequence[Measured]) -> list[Outcome]:
    """Every arm with its intervals; one that has not been run is left out."""
    before = {_key(run): run["before"] for run in runs if "before" in run}
    made: list[Outcome] = []
    for held_out, name in ((True, "held out"), (False, "tuned")):
        mine = [run for run in runs if run["held_out"] is held_out and _key(run) in before]
        plain = [(run["before"], run["before"]) for run in mine if "before" in run]
        pairs = {arm: [(r["arms"][arm], before[_key(r)]) for r in mine if arm in r["arms"]] for arm in ARMS}
        for arm, some in {"before": plain, **pairs}.items():
            if some:
                values = {
                    quantity: np.array([[take(*pair) for pair in some]]) for quantity, take in _QUANTITIES.items()
                }
                made.append(Outcome(name, arm, len(some), {key: interval(v, 2000) for key, v in values.items()}))
    return made


def _key(run: Measured) -> tuple[str, str]:
    return run["fact"]["relation"], run["fact"]["subject"]


def summarise(folder: Path, results: Path) -> str:
    """Write results.json and results.csv, and return the table.

    Raises:
        FileNotFoundError: no study in the folder, or no fact has been finished.
    """
    about, runs = read_study(folder)
    made = outcomes(runs)
    content = {
        "interval": "mean, 2.5 % and 97.5 % of a bootstrap over facts",
        "config": about["config"],
        "outcomes": [asdict(one) for one in made],
        "runs": [{key: value for key, value in run.items() if key != "job"} for run in runs],
    }
    write(results / "results.json", content)
    rows = [
        [one.facts, one.arm, one.count, name, *(f"{number:.5f}" for number in v.numbers)]
        for one in made
        for name, v in one.quantities.items()
    ]
    write_table(results / "results.csv", ["facts", "arm", "count", "quantity", "mean", "low", "high"], rows)
    return table(made)


def table(made: Sequence[Outcome]) -> str:
    """The outcomes in text."""
    lines = [["facts", "arm", "number", *_QUANTITIES]]
    for one in made:
        shares = [f"{100 * one.quantities[name].mean:.0f} %" for name in ("fact", "paraphrases", "kept", "leaked")]
        lines.append(
            [one.facts, one.arm, str(one.count), *shares, str(one.quantities["text"]),
             f"{one.quantities['change'].mean:.2g}"]
        )  # fmt: skip
    return aligned(lines, left=[0, 1])
