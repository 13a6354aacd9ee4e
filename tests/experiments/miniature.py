"""An experiment at a size of seconds, from its recipe to its results, in a folder of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.runner import text as texts
from experiments.runner.command import write_results
from experiments.runner.experiment import Experiment
from experiments.runner.packing import Packed
from experiments.runner.study import Study, describe, trial
from experiments.runner.text import Split, word_pieces


def rows(count: int, seed: int) -> Packed:
    """Rows of 16 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return Packed([torch.randint(50, (16,), generator=generator).tolist() for _ in range(count)], 16)


def read_random_rows(patch: pytest.MonkeyPatch) -> None:
    """In place of Shakespeare: few random rows, and a tokenizer of letters."""
    tokenizer = word_pieces(["alpha beta"], 270)
    patch.setattr(texts, "learned_from_training", lambda size: tokenizer)
    patch.setattr(texts, "split_text", lambda *_: Split(rows(8, 0), rows(2, 1), rows(3, 2)))


def run_miniature(experiment: Experiment[Any], folder: Path, config: Any) -> str:
    """The table; the study is in the folder, its results in `folder / "results"`."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = experiment.setup(config)
    describe(folder, experiment, config, setup, "tiny", trial())
    Study(folder, setup, setup.plan, lambda *_: None).run()
    return write_results(experiment, folder, folder / "results")
