"""A shared base of entries against feed-forward twins, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from experiments.knowledge_twins.models import Arm
from experiments.knowledge_twins.study import Schedule, setup
from experiments.knowledge_twins.summary import KINDS, said, summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read

MARGIN: Final = 0.02  # nats per token: the smallest difference of interest


@dataclass(frozen=True)
class Twins:
    """What is trained. The defaults are the scale "tiny".

    Attributes:
        schedule: what is read, and how long.
        width: of the models.
        layers: of the models.
        entries: of the bases.
        best: entries per token that one arm reads, in training and after.
        seeds: of initialisation and data.
    """

    schedule: Schedule = field(default_factory=Schedule)
    width: int = 64
    layers: int = 4
    entries: int = 512
    best: int = 32
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def arms(self) -> dict[str, Arm]:
        """By name."""
        size = (self.width, self.layers, self.entries)
        found = {kind: Arm(kind, *size) for kind in KINDS}
        found["shared best"] = Arm("shared", *size, best=self.best)
        return found | {f"gated {kind}": Arm(kind, *size, gated=True) for kind in KINDS}


def tiny() -> Twins:
    """One CPU core; the README says how long."""
    return Twins()


def small() -> Twins:
    """One GPU: bytes of Shakespeare's works in rows of 256, 8 layers of width 256."""
    schedule = Schedule(
        held_out=256, length=256, read=(32, 128, 512), rates=(5e-4, 1e-3, 2e-3), steps=500, batch_size=64,
        save_every=250,
    )  # fmt: skip
    return Twins(schedule, width=256, layers=8, entries=4096, best=128)


def paper() -> Twins:
    """FineWeb-Edu, 2.6 billion tokens, 12 layers of width 768: the paper trains nothing, this is the field's size."""
    schedule = Schedule(
        text="HuggingFaceFW/fineweb-edu:sample-10BT:train",
        tokenizer="HuggingFaceTB/SmolLM2-135M",
        rows=2_560_000,
        held_out=1024,
        length=1024,
        read=(64, 256, 1024),
        rates=(3e-4, 1e-3),
        steps=10_000,
        warmup=500,
        batch_size=16,
        parts=16,
        decay=0.1,
        measure_every=250,
        save_every=250,
    )
    return Twins(schedule, width=768, layers=12, entries=8192, best=256)


def brief(schedule: Schedule) -> Schedule:
    """The same for two steps of two short rows."""
    return replace(
        schedule,
        tokenizer=259 if isinstance(schedule.tokenizer, int) else schedule.tokenizer,
        rows=min(schedule.rows, 64),
        held_out=8,
        length=16,
        read=(2,),
        rates=schedule.rates[:1],
        steps=2,
        warmup=1,
        batch_size=2,
        parts=min(schedule.parts, 2),
        measure_every=1,
        save_every=1,
    )


def miniature(config: Twins) -> Twins:
    """Two layers of width 32 with 24 entries, two steps, two seeds."""
    return Twins(brief(config.schedule), width=32, layers=2, entries=24, best=4, seeds=config.seeds[:2])


def judge(results: Path) -> Sequence[Judgement]:
    """K4 by the rule that the README has since before the run; K6 by what trained ReLU layers activate."""
    content = read(results / "results.json")
    found: Mapping[str, Any] = {one["name"]: one for one in content["differences"]}
    wanted = [f"{form}shared less {form}{kind}" for form in ("", "gated ") for kind in KINDS[1:]]
    if not found.keys() >= set(wanted):
        return []
    values = {name: found[name]["loss"] for name in wanted}
    same = all(low > -MARGIN and high < MARGIN for _, low, high in values.values())
    beyond = {name: low > MARGIN or high < -MARGIN for name, (_, low, high) in values.items()}
    differs = any(all(beyond[name] for name in pair) for pair in (wanted[:2], wanted[2:]))
    verdict: Verdict = "confirmed" if same else "refuted" if differs else "not confirmed"
    each = ", ".join(f"{name} {said(value)}" for name, value in values.items())
    sentence = f"Held-out nats per token of models trained jointly from scratch, margin {MARGIN}: {each}."
    return [Judgement("K4", verdict, sentence), *_activity(content["arms"])]


def _activity(arms: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    """Threshold zero leaves half of the entries active where scores are Gaussian, as they are before training."""
    shares = {one["arm"]: one["active"] for one in arms if one["arm"] in ("shared", "gated shared")}
    if "shared" not in shares:
        return []
    each = "; ".join(f"{arm} {', '.join(f'{share:.0%}' for share in some)}" for arm, some in shares.items())
    sentence = (
        f"Half of the entries are active at the start, whatever the activation; after training, by layer: {each}. "
        "It is training that selects."
    )
    fewer = all(share < 0.5 for share in shares["shared"])
    return [Judgement("K6", "corrected" if fewer else "refuted", sentence)]


EXPERIMENT: Final = Experiment(
    name="knowledge_twins",
    question="Does a language model with one shared base learn as well as its feed-forward twins?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=lambda config: setup(config.schedule, config.arms, config.seeds),
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "attnflow"),
)
