"""The positive control as the runner takes it, and the rule that judges the claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.pairwise_control.study import Control, miniature, setup
from experiments.pairwise_control.summary import summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval
from experiments.runner.verdict import ACCURACY, decide, partly

SEEDS: Final = 5
_NETWORKS: Final = ("network", "block")  # rungs with a feed-forward layer before attention


def tiny() -> Control:
    """Half an hour of one CPU core."""
    return Control()


def judge(results: Path) -> Sequence[Judgement]:
    """D23 by guidance less the product of low rank: without a network in front, which is the main part, and with one.

    Fewer than `SEEDS` are not judged.
    """
    content = read(results / "results.json")
    less = {row["rung"]: Interval(*row["best rates"]) for row in content["differences"] if row["less"] == "lowrank"}
    if len(content["seeds"]) < SEEDS or not {"nothing", *_NETWORKS} <= set(less):
        return []
    alone, *beside = (less[rung] for rung in ("nothing", *_NETWORKS))
    decision = partly(*(decide(one, "above", ACCURACY) for one in (alone, *beside)))
    right = {(row["rung"], row["arm"]): row["accuracy"][0] for row in content["rows"]}

    def said(rung: str) -> str:
        return f"{right[rung, 'guidance']:.0%} right against {right[rung, 'lowrank']:.0%}"

    sentence = (
        "Network on query and key against a bilinear form of equal size. With nothing non-linear before attention it "
        f"holds: {said('nothing')} (difference {alone:.3f}). Behind a feed-forward layer the bilinear form does as "
        f"well, {said('network')} ({beside[0]:.3f}), and nearly so in the second layer of a transformer, "
        f"{said('block')} ({beside[1]:.3f})."
    )
    return [Judgement.of("D23", decision, sentence, "rule after")]


EXPERIMENT: Final = Experiment(
    name="pairwise_control",
    question="When is a network on query and key needed, and when does a network before attention replace it?",
    recipes={"tiny": tiny},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
)
