"""The settings of the study, and one run of it: trained by answers, asked about subjects that it has never seen."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from attnflow._core.progress import Progress
from experiments.facts.corpus import UNKNOWN, Corpus
from experiments.facts.model import FactEncoder, FactReader
from experiments.facts.training import SOFTMAX, FactTraining, train
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, Record, swept

SUPERVISED: Final = "supervised"
NO_NEAR: Final = "no near misses"
DECISIVE: Final = "best grown"
AGAIN: Final = "best grown again"  # the decisive arm alone, with seeds that no earlier run had


@dataclass(frozen=True)
class Answers:
    """What is trained and asked. The defaults are the scale "tiny"."""

    # of all arms, without their differences
    training: FactTraining = field(
        default_factory=lambda: FactTraining(
            base_entries=4, steps=2000, facts=64, questions=32, contexts=0, retrieval=0.0, nearest=0.0
        )
    )
    first_facts: int = 4  # in the first pools of a curriculum
    best: int = 8  # entries that are read, where not all are
    sizes: tuple[int, ...] = (4, 16, 64, 256, 1024)  # facts in the pools that are asked about after training
    # facts that are asked for, of each size; a quarter as many questions are about facts that are not there
    asked: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)  # of initialisation and of all that is drawn
    rates: tuple[float, ...] = (1e-3, 3e-3)  # learning rates; the first seed chooses for each arm
    # of the decisive arm alone, at `new_rate`, which an earlier study had chosen
    new_seeds: tuple[int, ...] = tuple(range(8, 20))
    new_rate: float = 3e-3  # learning rate of these runs
    measure_every: int = 200  # steps

    @property
    def arms(self) -> dict[str, FactTraining]:
        """By name; all but the first learn from answers alone."""
        plain = self.training
        relu, soft, sparse = (replace(plain, activation=name) for name in ("relu", SOFTMAX, "sparsemax"))
        grown = replace(soft, first_facts=self.first_facts)
        return {
            SUPERVISED: replace(relu, retrieval=1.0, nearest=0.3),
            "relu": relu,
            "relu grown": replace(relu, first_facts=self.first_facts),
            "sparsemax grown": replace(sparse, first_facts=self.first_facts),
            "softmax": soft,
            "softmax grown": grown,
            DECISIVE: replace(grown, best=self.best),
            NO_NEAR: replace(grown, near=0.0),
        }


def tiny() -> Answers:
    """One CPU core; the README says how long."""
    return Answers()


def small() -> Answers:
    """For one GPU's host: wider, more facts, ten times the steps."""
    training = FactTraining(
        dim=256,
        layers=4,
        base_entries=4,
        steps=10_000,
        facts=512,
        questions=128,
        contexts=0,
        retrieval=0.0,
        nearest=0.0,
    )
    return Answers(training, best=32, sizes=(16, 64, 256, 1024, 4096), asked=512, new_seeds=(), measure_every=500)


def paper() -> Answers:
    """The paper names no setting: as "small", with five seeds and pools of 4,096 facts."""
    wider = replace(small().training, dim=512, layers=8, steps=50_000, facts=4096, questions=512)
    return replace(small(), training=wider, seeds=(0, 1, 2, 3, 4), rates=(3e-4, 1e-3), measure_every=1000)


def miniature(config: Answers) -> Answers:
    """A model of a few hundred numbers, two steps, two seeds."""
    training = replace(config.training, dim=16, layers=1, steps=2, facts=12, questions=8, warmup=1)
    return replace(
        config, training=training, best=3, sizes=(4, 12), asked=4, seeds=config.seeds[:2], rates=config.rates[:1],
        new_seeds=config.new_seeds[:2], measure_every=1,
    )  # fmt: skip


@dataclass(frozen=True)
class Said:
    """Answers of a model about a pool of facts."""

    right: tuple[int, ...]  # to questions about facts of the pool, 0 or 1 each: right to the word
    unknown: tuple[int, ...]  # to questions about facts that are not in it, most of them near misses: "unknown" or not
    moved: tuple[int, ...]  # to the first questions again, with the values moved on by one entry: right nonetheless


@torch.no_grad()
def ask(
    reader: FactReader, encoder: FactEncoder, size: int, count: int, near: float, name: str, held_out: bool = True
) -> Said:
    """Ask a model about a new pool.

    Args:
        reader: the language model.
        encoder: X.
        size: facts in the pool.
        count: questions about facts of it, at most its size; a quarter as many about others.
        near: fraction of keys that differ in one part from another one.
        name: all chance follows from it.
        held_out: whether subjects are those that training never shows.
    """
    corpus = Corpus(random.Random(name), held_out=held_out)
    facts = corpus.facts(size, near)
    asked = facts[: min(count, size)]
    others = corpus.keys(max(1, count // 4), near, [fact.key for fact in facts])
    entries = encoder([fact.text for fact in facts], [fact.value for fact in facts])
    key, value = entries.chunk(2, dim=1)
    questions = [corpus.question(fact.key) for fact in asked]
    answers = [fact.value for fact in asked]

    def right(questions: Sequence[str], answers: Sequence[str], entries: Tensor) -> tuple[int, ...]:
        rows = reader.asked(questions, answers)
        return tuple(int(one) for one in rows.right(reader.logits(rows, entries)).tolist())

    return Said(
        right(questions, answers, entries),
        right([corpus.question(other) for other in others], [UNKNOWN] * len(others), entries),
        right(questions, answers, torch.cat([key, value.roll(1, dims=0)], dim=1)),
    )


def setup(config: Answers) -> Setup:
    """The decisive arm with new seeds; then each arm, every rate with the first seed, the best with the others."""

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        seed, near = cast(int, job.seed), config.training.near
        settings = replace(config.arms[DECISIVE if job.arm == AGAIN else job.arm], rate=cast(float, job.rate))
        pool = config.training.facts

        def measure(reader: FactReader, encoder: FactEncoder) -> Mapping[str, object]:
            found = ask(reader, encoder, pool, config.asked, near, f"curve {seed}")
            return {"right": sum(found.right) / len(found.right), "unknown": sum(found.unknown) / len(found.unknown)}

        trained = train(settings, seed, folder, config.measure_every, progress, measure)
        models = trained.reader, trained.encoder
        chosen = [ask(*models, pool, config.asked, near, f"choosing {seed} {number}", False) for number in range(2)]
        told = {str(size): asdict(ask(*models, size, config.asked, near, f"asked {seed}")) for size in config.sizes}
        every = [one for said in chosen for one in (*said.right, *said.unknown)]
        return {
            "log": trained.log,
            "measured": trained.measured,
            "seconds": trained.seconds,
            "choosing": 1 - sum(every) / len(every),
            "told": told,
        }

    every_arm = swept(list(config.arms), config.rates, config.seeds, choosing_loss, choosing=1, widen=False)
    again = tuple(Job(AGAIN, config.new_rate, seed) for seed in config.new_seeds)
    return Setup(Plan(again + every_arm.first, every_arm.then, len(again) + every_arm.count), run)


def choosing_loss(run: Record) -> float:
    """By which the learning rate of an arm is chosen: wrong answers about subjects of training."""
    return run["choosing"]
