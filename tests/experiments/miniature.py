"""An experiment at a size of seconds, from its recipe to its results, in a folder of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.runner.command import write_results
from experiments.runner.experiment import Experiment
from experiments.runner.study import Study, describe, trial


def run_miniature(experiment: Experiment[Any], folder: Path, config: Any) -> str:
    """The table; the study is in the folder, its results in `folder / "results"`."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = experiment.setup(config)
    describe(folder, experiment, config, setup, "tiny", trial())
    Study(folder, setup, setup.plan, lambda *_: None).run()
    return write_results(experiment, folder, folder / "results")
