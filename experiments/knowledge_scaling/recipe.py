"""Size of the store times size of the model, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from experiments.knowledge_scaling.summary import name, summarise
from experiments.knowledge_twins.models import Arm
from experiments.knowledge_twins.recipe import brief
from experiments.knowledge_twins.recipe import paper as twins_paper
from experiments.knowledge_twins.recipe import small as twins_small
from experiments.knowledge_twins.study import Schedule, setup
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import LOSS, decide, jointly


@dataclass(frozen=True)
class Grid:
    """What is trained. The defaults are the scale "tiny"."""

    # what is read, and how long
    schedule: Schedule = field(
        default_factory=lambda: Schedule(rates=(3e-3, 6e-3), steps=600, measure_every=100, save_every=200)
    )
    widths: tuple[int, ...] = (32, 64, 96)  # of the models, in ascending order
    entries: tuple[int, ...] = (128, 512, 2048)  # of their bases, in ascending order
    layers: int = 4  # of all models
    seeds: tuple[int, ...] = (0, 1, 2)  # of initialisation and data

    @property
    def arms(self) -> dict[str, Arm]:
        return {
            name(width, count): Arm("shared", width, self.layers, count)
            for width in self.widths
            for count in self.entries
        }


def tiny() -> Grid:
    """One CPU core; the README says how long."""
    return Grid()


def small() -> Grid:
    """One GPU: bytes of Shakespeare's works in rows of 256."""
    return Grid(replace(twins_small().schedule, rates=(1e-3, 2e-3)), (64, 128, 256), (512, 2048, 8192), 8)


def paper() -> Grid:
    """FineWeb-Edu, 2.6 billion tokens; the paper asks the question and gives no setting."""
    return Grid(twins_paper().schedule, (384, 768, 1536), (2048, 8192, 32768), 12)


def miniature(config: Grid) -> Grid:
    """Two widths times two stores, two steps, two seeds."""
    return Grid(brief(config.schedule), (32, 64), (8, 24), 2, config.seeds[:2])


def judge(results: Path) -> Sequence[Judgement]:
    """Whether a larger store gains at every width, and as much at each."""
    content = read(results / "results.json")
    found = {one["name"]: Interval(*one["nats"]) for one in content["gains"]}
    few, many = content["entries"][0], content["entries"][-1]
    gains = [f"{many} entries for {few}, width {width}" for width in content["widths"]]
    if not found.keys() >= {"interaction", *gains}:
        return []
    stores, both = [found[name] for name in gains], found["interaction"]
    decision = jointly(*(decide(one, "above", LOSS) for one in stores), decide(both, "none", LOSS))
    each = ", ".join(f"width {width} {said(one.numbers)}" for width, one in zip(content["widths"], stores, strict=True))
    sentence = (
        f"Nats per token that {many} entries gain over {few}: {each}; at the narrowest more than at the widest: "
        f"{said(both.numbers)}."
    )
    return [Judgement.of("K11", decision, sentence)]


EXPERIMENT: Final = Experiment(
    name="knowledge_scaling",
    question="Do the size of the store and the size of the model pay independently of one another?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=lambda config: setup(config.schedule, config.arms, config.seeds),
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "attnflow"),
)
