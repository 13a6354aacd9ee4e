"""Experiments at a size of seconds: rows, a tokenizer and a model of few parts, and a run from a recipe to results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments.runner.command import write_results
from experiments.runner.experiment import Experiment
from experiments.runner.packing import Packed
from experiments.runner.study import Study, describe, trial
from experiments.runner.text import word_pieces
from tests.models import CAUSAL

VOCABULARY = 270
SIZES = {"max_position_embeddings": 256, "pad_token_id": 268, "eos_token_id": 267, "bos_token_id": 267}


def rows(count: int, seed: int) -> Packed:
    """Rows of 16 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return Packed([torch.randint(50, (16,), generator=generator).tolist() for _ in range(count)], 16)


def reader() -> Any:
    """Byte pairs: any text can be read."""
    return word_pieces(["alpha beta gamma delta"], VOCABULARY)


def language_model() -> Any:
    """A Llama that reads 256 of its tokens."""
    torch.manual_seed(0)
    return CAUSAL["Llama"].make(vocab_size=VOCABULARY, **SIZES)


def run_miniature(experiment: Experiment[Any], folder: Path, config: Any) -> str:
    """The table; the study is in the folder, its results in `folder / "results"`."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = experiment.setup(config)
    describe(folder, experiment, config, setup, "tiny", trial())
    Study(folder, setup, setup.plan, lambda *_: None).run()
    return write_results(experiment, folder, folder / "results")
