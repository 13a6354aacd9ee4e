"""The derived masks trained on real text, and used, as the runner takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeVar

from experiments.hasse.judging import judge
from experiments.hasse.settings import Training, paper, small, tiny, tiny_pairs
from experiments.hasse.study import setup
from experiments.hasse.summary import summarise
from experiments.runner.experiment import Experiment

Settings = TypeVar("Settings", bound=Training)

_MINIATURE: Final = ("causal", "block 1", "butterfly", "sparse causal", "sparse block 1", "sparse butterfly", "repeats")


def miniature(config: Settings) -> Settings:
    """Width 32, two steps, two seeds, blocks of 1 and 2."""
    return replace(
        config,
        tokenizer=259 if isinstance(config.tokenizer, int) else config.tokenizer,
        rows=min(config.rows, 64),
        held_out=8,
        written=2,
        length=16,
        sizes={"width": 32, "inner": 16},
        layers=(2, 3),
        blocks=(1, 2),
        depths=(2, 3, 6),
        repeats=(2,),
        seeds=config.seeds[:2],
        rates=config.rates[:1],
        rerun=tuple({arm: rates for arm, rates in group.items() if arm in _MINIATURE} for group in config.rerun),
        steps=2,
        warmup=1,
        batch_size=2,
        parts=min(config.parts, 2),
        measure_every=1,
        save_every=1,
    )


EXPERIMENT: Final = Experiment(
    name="hasse",
    question="Do the derived masks train language models on real text, what do they cost, and does depth tell?",
    recipes={"tiny": tiny, "tiny-pairs": tiny_pairs, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "attnflow"),
)
