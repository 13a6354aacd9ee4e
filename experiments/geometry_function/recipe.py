"""The study as the runner takes it."""

from __future__ import annotations

from typing import Final

from experiments.geometry_function.study import Function, miniature, setup, slower
from experiments.geometry_function.summary import summarise
from experiments.runner.experiment import Experiment, no_claim

EXPERIMENT: Final = Experiment(
    name="geometry_function",
    question="What of symmetry and directionality belongs to the function, and what to the axes of the checkpoint?",
    recipes={"tiny": Function, "slower": slower},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=no_claim,
    packages=("torch", "transformers", "attnflow"),
)
