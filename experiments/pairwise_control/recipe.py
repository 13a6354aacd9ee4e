"""The positive control as the runner takes it, and the rule that judges the claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.pairwise_control.study import Control, miniature, setup
from experiments.pairwise_control.summary import summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import Interval

SMALLEST: Final = 0.02  # the smallest difference of interest: 2 points of accuracy
SEEDS: Final = 5
_NETWORKS: Final = ("network", "block")  # rungs with a feed-forward layer before attention


def tiny() -> Control:
    """Half an hour of one CPU core."""
    return Control()


def judge(results: Path) -> Sequence[Judgement]:
    """By guidance less the product of low rank, at the rung without a network and at those with one.

    Confirmed: above 0 at all of them. Corrected: above 0 without a network, and less than `SMALLEST` with one, both
    ends. Refuted: less than `SMALLEST` without a network. Otherwise not confirmed. Fewer than `SEEDS` are not judged.
    """
    content = read(results / "results.json")
    less = {row["rung"]: Interval(*row["best rates"]) for row in content["differences"] if row["less"] == "lowrank"}
    if len(content["seeds"]) < SEEDS or not {"nothing", *_NETWORKS} <= set(less):
        return []
    alone, beside = less["nothing"], [less[rung] for rung in _NETWORKS]
    verdict: Verdict = "not confirmed"
    if alone.high < SMALLEST:
        verdict = "refuted"
    elif alone.low > 0 and all(one.low > 0 for one in beside):
        verdict = "confirmed"
    elif alone.low > 0 and all(one.high < SMALLEST for one in beside):
        verdict = "corrected"
    right = {(row["rung"], row["arm"]): row["accuracy"][0] for row in content["rows"]}

    def said(rung: str) -> str:
        return f"{right[rung, 'guidance']:.0%} right against {right[rung, 'lowrank']:.0%}"

    sentence = (
        f"Network on query and key against a bilinear form of equal size, nothing non-linear before attention: "
        f"{said('nothing')} (difference {alone:.3f}); behind a feed-forward layer {said('network')} "
        f"({beside[0]:.3f}), in the second layer of a transformer {said('block')} ({beside[1]:.3f})."
    )
    return [Judgement("D23", verdict, sentence)]


EXPERIMENT: Final = Experiment(
    name="pairwise_control",
    question="When is a network on query and key needed, and when does a network before attention replace it?",
    recipes={"tiny": tiny},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
)
