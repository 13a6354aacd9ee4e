"""Trained by the answers alone, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.knowledge_answers.study import AGAIN, SUPERVISED, miniature, paper, setup, small, tiny
from experiments.knowledge_answers.summary import summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import decide, possible

RIGHT: Final = 0.9  # of the questions: the share that the claim has to be above
THROUGH: Final = ("softmax grown", "best grown")  # approximations of a choice of entries that gradients pass


def judge(results: Path) -> Sequence[Judgement]:
    """Whether one way is right in more than `RIGHT`; of the runs with new seeds alone, where there are some."""
    content = read(results / "results.json")
    arms = {one["arm"]: one["sizes"][str(content["pool"])]["right"] for one in content["arms"]}
    deciding = (AGAIN,) if AGAIN in arms else THROUGH
    if not arms.keys() >= set(deciding):
        return []
    tried = [possible(decide(Interval(*arms[name]).less(RIGHT), "above", 0.0)) for name in deciding]
    best = next((one for one in tried if one.holds), tried[0])
    each = ", ".join(f"{name} {said(value, '.1%')}" for name, value in arms.items() if name != SUPERVISED)
    beside = f"; with supervised reading {said(arms[SUPERVISED], '.1%')}" if SUPERVISED in arms else ""
    seeds = f" ({AGAIN}: {len(content['arms'][0]['right_by_seed'])} new seeds)" if AGAIN in arms else ""
    sentence = f"Right about unseen subjects, {content['pool']} facts, trained on answers alone{seeds}: {each}{beside}."
    return [Judgement.of("K14", best, sentence)]


EXPERIMENT: Final = Experiment(
    name="knowledge_answers",
    question="Can an embedding model and its reader be trained by the answers alone, and by what?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "attnflow"),
)
