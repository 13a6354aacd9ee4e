"""A process of a launch that runs an experiment at a miniature: sharded_study.py NAME FOLDER SHARDED."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from attnflow.bias.packing import Packed
from experiments.bias_comparison import data
from experiments.bias_comparison import study as comparison
from experiments.bias_comparison.recipe import EXPERIMENT as COMPARISON
from experiments.daa_evaluation import study as evaluation
from experiments.daa_evaluation.recipe import EXPERIMENT as EVALUATION
from experiments.evaluation import sources
from experiments.runner import command
from experiments.runner.experiment import Experiment
from experiments.runner.text import Split
from tests.experiments.benchmarked import language_model, reader
from tests.processes import leave

ROWS = Packed([[number % 7, *range(1, 16)] for number in range(8)], 16)


def evaluated() -> Any:
    """Of the published scale: two arms, two items of a benchmark."""
    config = EVALUATION.miniature(evaluation.paper())
    return replace(
        config, text="shakespeare", arms=("base", "guidance continued"), steps=3, rates=(1e-2, 1e-2), parts=2,
        items={"perplexity": 2}, sources={},
    )  # fmt: skip


def compared() -> Any:
    """Of the published scale: guidance on text, with what is measured of a trained bias."""
    config = COMPARISON.miniature(comparison_settings())
    text = replace(config.parts[0], arms=("plain", "guidance"), passes=2, rates=(1e-2,))
    return replace(config, parts=(text,), seeds=(0,), text="shakespeare", new_text="shakespeare")


def comparison_settings() -> Any:
    """The recipe."""
    return COMPARISON.recipes["paper"]()


def stand_ins() -> None:
    """In place of what is downloaded."""
    for module in (evaluation, comparison, data):
        module.load_model = lambda *_, **__: (language_model(), reader())  # type: ignore[attr-defined]
    evaluation.split_text = lambda *_: Split(ROWS, ROWS, ROWS)  # type: ignore[assignment]
    data.split_works = lambda *_: Split(ROWS, ROWS, ROWS)  # type: ignore[assignment]
    sources.held_out = lambda *_: ["alpha beta gamma", "delta delta"]  # type: ignore[assignment]


def main(name: str, folder: str, sharded: str) -> int:
    """As on the command line."""
    stand_ins()
    experiment: Experiment[Any] = {
        "daa_evaluation": replace(EVALUATION, recipes={"paper": evaluated}),
        "bias_comparison": replace(COMPARISON, recipes={"paper": compared}),
    }[name]
    command.find = lambda _: experiment
    places = ["--work", f"{folder}/work", "--results", f"{folder}/results"]
    return command.main([name, "--scale", "paper", "--sharded", sharded, *places])


if __name__ == "__main__":
    if code := main(*sys.argv[1:]):
        sys.exit(code)
    leave()
