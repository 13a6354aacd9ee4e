"""The comparison of biases as the runner takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from experiments.bias_comparison.settings import (
    Comparison,
    Part,
    bert,
    few,
    llama,
    paper,
    recall,
    small,
    smollm2,
    text,
    tiny,
)
from experiments.bias_comparison.study import setup
from experiments.bias_comparison.summary import summarise
from experiments.bias_comparison.verdicts import judge
from experiments.runner.experiment import Experiment


def miniature(config: Comparison) -> Comparison:
    """Two steps of two sequences, models of width 16, one rate, two seeds."""

    def smaller(part: Part) -> Part:
        named, masked = isinstance(part.model, str), part.kind == "masked"
        sizes = part.model if named else bert(16, 2, 2) if masked else llama(16, 2, 2, 8, 16)
        short = replace(part, model=sizes, steps=2, batch_size=2, passes=1, start=part.start and 2)
        return replace(short, rates=part.rates[:1], hidden_dim=64)

    return replace(
        config,
        parts=tuple(smaller(part) for part in config.parts),
        seeds=config.seeds[:2],
        choosing=1,
        tokenizer=300 if isinstance(config.tokenizer, int) else config.tokenizer,
        rows=min(config.rows, 64),
        held_out=8,
        length=16,
        tested=8,
        dtype="float32",
        measure_every=1,
        save_every=1,
    )


EXPERIMENT: Final = Experiment(
    name="bias_comparison",
    question="Does a learned bias train better than its controls at equal parameters?",
    recipes={
        "tiny": tiny,
        "text": text,
        "recall": recall,
        "few": few,
        "smollm2": smollm2,
        "small": small,
        "paper": paper,
    },
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "peft", "attnflow"),
)
