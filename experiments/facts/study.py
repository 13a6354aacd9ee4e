"""The study: arms and seeds, trained and asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from experiments.facts.evaluation import FactEvaluation, measure
from experiments.facts.training import FactTraining, train
from experiments.records import describe, write


@dataclass(frozen=True)
class FactStudy:
    """What is trained and asked. The defaults are the scale "tiny".

    Attributes:
        training: of the main arm.
        evaluation: of all.
        seeds: of initialisation and of all that is drawn; other arms run the first alone.
    """

    training: FactTraining = field(default_factory=FactTraining)
    evaluation: FactEvaluation = field(default_factory=FactEvaluation)
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def arms(self) -> Mapping[str, FactTraining]:
        """The main arm, then those that differ from it in one setting."""
        return {
            "main": self.training,
            "answers alone": replace(self.training, retrieval=0.0),
            "sparsemax": replace(self.training, activation="sparsemax"),
            "coordinate": replace(self.training, threshold="coordinate"),
        }

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        return {**asdict(self), "arms": {name: arm.to_dict() for name, arm in self.arms.items()}}


def tiny() -> FactStudy:
    """One CPU core, a few minutes for each seed."""
    return FactStudy()


def small() -> FactStudy:
    """For one GPU's host; a wider model and larger stores. Not run yet."""
    training = FactTraining(dim=256, layers=4, base_entries=512, steps=10_000, facts=512, questions=256, contexts=128)
    evaluation = FactEvaluation(sizes=(64, 256, 1024, 4096, 16384), group=512)
    return FactStudy(training, evaluation, (0, 1, 2, 3, 4))


SCALES: Final = {"tiny": tiny, "small": small}


def run(study: FactStudy, folder: Path, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Train and ask what is not there yet; several processes can share the work by taking arms or seeds each.

    Raises:
        ValueError: an unknown arm, or a folder that holds a study with other settings.
    """
    unknown = sorted(set(names) - set(study.arms))
    if unknown:
        raise ValueError(f"arms must be of {', '.join(study.arms)}; got {', '.join(unknown)}")
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    packages = ("torch", "transformers", "lancedb", "attnflow")
    describe(folder / "study.json", {"config": study.to_dict()}, packages)
    for name in names:
        for seed in seeds if name == "main" else study.seeds[:1]:
            stem = f"{name.replace(' ', '-')}-{seed}"
            path = folder / "runs" / f"{stem}.json"
            if path.is_file():
                continue
            trained = train(study.arms[name], seed, folder / f"{stem}.pt")
            began = time.perf_counter()
            told, sizes = measure(trained, seed, study.evaluation)
            found = {"told": [asdict(one) for one in told], "sizes": [asdict(one) for one in sizes]}
            seconds = {"training": trained.seconds, "evaluation": time.perf_counter() - began}
            write(path, {"arm": name, "seed": seed, "log": trained.log, "seconds": seconds, **found})
            print(f"{stem}: asked in {seconds['evaluation']:.0f} s", file=sys.stderr, flush=True)
