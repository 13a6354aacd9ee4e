"""Gaps filled by models that were trained to, as the runner takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from experiments.hasse.recipe import miniature as hasse_miniature
from experiments.infilling.judging import judge
from experiments.infilling.settings import Infilling, paper, small, tiny
from experiments.infilling.study import setup
from experiments.infilling.summary import summarise
from experiments.runner.experiment import Experiment


def miniature(config: Infilling) -> Infilling:
    """Width 32, two layers, two steps, two seeds, gaps of two."""
    return replace(hasse_miniature(config), layers=(2,), blocks=(2,), depths=(), repeats=(), agreed=1)


EXPERIMENT: Final = Experiment(
    name="infilling",
    question="Do models that were trained on gaps fill them better than from the left, and in how many passes?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "attnflow"),
)
