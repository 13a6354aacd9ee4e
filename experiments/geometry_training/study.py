"""The settings of the study, and one run of it: all quantities of a model size on a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from attnflow._core.progress import Progress
from experiments.geometry_training.measures import CORPORA, LAYERS, measures, table_1
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan


@dataclass(frozen=True)
class Published:
    """Which of the authors' runs are read."""

    models: tuple[str, ...]
    corpora: tuple[str, ...] = CORPORA


def tiny() -> Published:
    """Those of the models of 4 layers."""
    return Published(("bert-small",))


def paper() -> Published:
    """All 12 of them."""
    return Published(tuple(LAYERS))


def miniature(config: Published) -> Published:
    return replace(config, corpora=config.corpora[:2])


def setup(config: Published) -> Setup:
    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        del folder, progress
        model, _, corpus = job.arm.partition(" ")
        return {
            "model": model,
            "corpus": corpus,
            "measures": measures(model, corpus),
            "table 1": table_1(model, corpus),
        }

    return Setup(Plan(tuple(Job(f"{model} {corpus}") for model in config.models for corpus in config.corpora)), run)
