"""The study: arms and seeds, trained and asked."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from attnflow._core.progress import Progress
from experiments.facts.evaluation import FactEvaluation, measure
from experiments.facts.summary import summarise
from experiments.facts.training import FactTraining, train
from experiments.runner.experiment import Experiment, Judgement, Setup
from experiments.runner.jobs import Job, Plan
from experiments.runner.statistics import Interval, proportion, said
from experiments.runner.verdict import decide, jointly, possible

RIGHT: Final = 0.8  # of the questions about edited facts, at least
OLD: Final = 0.01  # of the answers that say a value from before the edit, at most


@dataclass(frozen=True)
class FactStudy:
    """What is trained and asked. The defaults are the scale "tiny"."""

    training: FactTraining = field(default_factory=FactTraining)  # of the main arm
    evaluation: FactEvaluation = field(default_factory=FactEvaluation)  # of all
    seeds: tuple[int, ...] = (0, 1, 2)  # of initialisation and of all that is drawn; other arms run the first alone

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
        return {**asdict(self), "arms": {name: arm.to_dict() for name, arm in self.arms.items()}}


def tiny() -> FactStudy:
    """One CPU core, a few minutes for each seed."""
    return FactStudy()


def small() -> FactStudy:
    """For one GPU's host; a wider model and larger stores. Not run yet."""
    training = FactTraining(dim=256, layers=4, base_entries=512, steps=10_000, facts=512, questions=256, contexts=128)
    evaluation = FactEvaluation(sizes=(64, 256, 1024, 4096, 16384), group=512)
    return FactStudy(training, evaluation, (0, 1, 2, 3, 4))


def paper() -> FactStudy:
    """The paper gives no setting: wider, pools of 4,096 facts, stores of up to 262,144."""
    training = FactTraining(
        dim=512, layers=8, base_entries=4096, steps=50_000, facts=4096, questions=512, contexts=256, rate=1e-3,
        warmup=1000,
    )  # fmt: skip
    evaluation = FactEvaluation(sizes=(64, 1024, 16_384, 262_144), group=1024)
    return FactStudy(training, evaluation, (0, 1, 2, 3, 4))


def setup(study: FactStudy) -> Setup:
    """The main arm with every seed, then the others with the first."""

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        seed = job.seed or 0
        trained = train(study.arms[job.arm], seed, folder, progress=progress)
        began = time.perf_counter()
        told, sizes = measure(trained, seed, study.evaluation)
        found = {"told": [asdict(one) for one in told], "sizes": [asdict(one) for one in sizes]}
        seconds = {"training": trained.seconds, "evaluation": time.perf_counter() - began}
        return {"arm": job.arm, "seed": seed, "log": trained.log, "seconds": seconds, **found}

    main = [Job("main", seed=seed) for seed in study.seeds]
    return Setup(Plan((*main, *(Job(arm, seed=study.seeds[0]) for arm in study.arms if arm != "main"))), run)


def miniature(study: FactStudy) -> FactStudy:
    """A model of a few hundred numbers, asked a few questions."""
    training = replace(
        study.training, dim=16, layers=1, base_entries=4, steps=2, facts=12, questions=8, contexts=4, warmup=1
    )
    return FactStudy(training, replace(study.evaluation, sizes=(8,), group=4, timed=1), study.seeds[:1])


def judge(results: Path) -> Sequence[Judgement]:
    """Insertion, correction and deletion at run time, read from entries; shares over all sizes of store."""
    with (results / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["arm"], row["way"], row["phase"], row["wording"]) == ("main", "entries", "after", "trained")
        ]
    changed = ("inserted", "corrected", "deleted")
    worst = {
        group: min(
            (Interval(*(float(row[key]) for key in ("right", "low", "high"))) for row in rows if row["group"] == group),
            key=lambda one: one.numbers[1],
        )
        for group in changed
    }
    asked = [
        (int(row["seeds"]) * int(row["questions"]), float(row["old"])) for row in rows if row["group"] in changed[1:]
    ]
    old = proportion(round(sum(count * share for count, share in asked)), sum(count for count, _ in asked))
    parts = [decide(one.less(RIGHT), "above", 0.0) for one in worst.values()]
    each = ", ".join(f"{group} {said(one.numbers, '.0%')}" for group, one in worst.items())
    sentence = (
        f"In a small model trained to read them, edits of entries are what it says afterwards; right at the worst "
        f"of four sizes of store, {rows[0]['seeds']} seeds: {each}; old values in {said(old.numbers, '.1%')} of "
        f"answers. The bar is {RIGHT:.0%}."
    )
    decision = possible(jointly(*parts, decide(old.less(OLD), "below", 0.0)))
    return [Judgement.of("K13", decision, sentence, "rule after")]


EXPERIMENT: Final = Experiment(
    name="facts",
    question="Can facts in a store be inserted, corrected and deleted at run time?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "lancedb", "attnflow"),
)
