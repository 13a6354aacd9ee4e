"""Editing of facts, as the runner takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from experiments.editing.study import Editing, paper, setup, small, tiny
from experiments.editing.summary import summarise
from experiments.runner.experiment import Experiment, no_claim


def miniature(config: Editing) -> Editing:
    """Few facts, few steps, two layers."""
    sizes = {"tuned": 1, "held_out": 2, "others": 1, "constraints": 0, "moment_tokens": 64, "text_tokens": 16}
    return replace(config, layers=(0, 1), entries=8, direct=4, steps=2, **sizes)


EXPERIMENT: Final = Experiment(
    name="editing",
    question="Can a fact of a pretrained model be changed in its entries, in all wordings, while other facts stay?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=no_claim,  # K12, whether entries are facts one by one, is judged by `knowledge_ablation`
    packages=("torch", "transformers", "attnflow"),
)
