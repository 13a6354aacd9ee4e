"""A pretrained model with a reader, as the runner takes it."""

from __future__ import annotations

from typing import Final

from experiments.reader.settings import miniature, paper, small, tiny
from experiments.reader.study import setup
from experiments.reader.summary import summarise
from experiments.runner.experiment import Experiment, no_claim

EXPERIMENT: Final = Experiment(
    name="reader",
    question="Does a frozen pretrained model answer from a store that is edited while it runs, and what beats it?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=no_claim,  # K13, of a model trained with its store, is judged by `facts`
    packages=("torch", "transformers", "peft", "attnflow"),
)
