"""A shared base of entries against feed-forward twins, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from experiments.knowledge_twins.models import Arm
from experiments.knowledge_twins.study import Schedule, setup
from experiments.knowledge_twins.summary import FORMS, KINDS, MATCHED, PAIRS, summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said

MARGIN: Final = 0.02  # nats per token: the smallest difference of interest


@dataclass(frozen=True)
class Twins:
    """What is trained. The defaults are the scale "tiny"."""

    schedule: Schedule = field(default_factory=Schedule)  # what is read, and how long
    width: int = 64  # of the models
    layers: int = 4  # of the models
    entries: int = 512  # of the bases
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)  # of initialisation and data
    forms: bool = False  # whether forms of the shared model are compared (knowledge, sec. 3.1 and 4) in place of twins.

    @property
    def arms(self) -> dict[str, Arm]:
        size = (self.width, self.layers, self.entries)
        if not self.forms:
            twins = {kind: Arm(kind, *size) for kind in KINDS}
            return twins | {f"gated {kind}": Arm(kind, *size, gated=True) for kind in KINDS}
        full = Arm("shared", *size)
        bare = replace(full, thresholds=False, bias=False)
        every = (replace(bare, softmax=True), bare, replace(full, bias=False), full)
        common = replace(full, common=True)
        return dict(zip(FORMS, (*every, common, replace(common, larger=True)), strict=True))


def tiny() -> Twins:
    """One CPU core; the README says how long."""
    return Twins()


def ablation() -> Twins:
    """The same models and text, a quarter of the steps: the parts of the shared model one by one."""
    steps = {"steps": 600, "measure_every": 100, "save_every": 200}
    return Twins(replace(Schedule(), read=(), **steps), forms=True)


def small() -> Twins:
    """One GPU: bytes of Shakespeare's works in rows of 256, 8 layers of width 256."""
    schedule = Schedule(
        held_out=256, length=256, read=(32, 128, 512), rates=(5e-4, 1e-3, 2e-3), steps=500, batch_size=64,
        measure_every=100, save_every=250,
    )  # fmt: skip
    return Twins(schedule, width=256, layers=8, entries=4096)


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
    return Twins(schedule, width=768, layers=12, entries=8192)


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
        choosing=1,
        steps=2,
        warmup=1,
        batch_size=2,
        parts=min(schedule.parts, 2),
        measure_every=1,
        save_every=1,
    )


def miniature(config: Twins) -> Twins:
    """Two layers of width 32 with 24 entries, two steps, two seeds."""
    return Twins(brief(config.schedule), width=32, layers=2, entries=24, seeds=config.seeds[:2], forms=config.forms)


def judge(results: Path) -> Sequence[Judgement]:
    """By the rules that the README has since before the runs; K6 by what trained ReLU layers activate."""
    content = read(results / "results.json")
    if content.get("start") != MATCHED:  # from starts that favour the twins: nothing is said of differences
        return _activity(content["arms"])
    found = {one["name"]: Interval(*one["loss"]) for one in content["differences"]}
    judged = [*_twins(found), *_activity(content["arms"]), *_forms(found)]
    return sorted(judged, key=lambda one: int(one.claim[1:]))


def _twins(found: Mapping[str, Interval]) -> list[Judgement]:
    """K4, and whether sharing makes parameters go further."""
    said_of = [f"{form}shared less {form}{kind}" for form in ("", "gated ") for kind in KINDS[1:]]
    pairs = [[name for name in names if name in found] for names in (said_of[:2], said_of[2:])]
    if len(pairs[0]) < 2:
        return []
    values = {name: found[name] for names in pairs for name in names}
    same = len(values) == len(said_of) and all(one.low > -MARGIN and one.high < MARGIN for one in values.values())
    beyond = {name: one.low > MARGIN or one.high < -MARGIN for name, one in values.items()}
    differs = any(len(names) == 2 and all(beyond[name] for name in names) for names in pairs)
    verdict: Verdict = "confirmed" if same else "refuted" if differs else "not confirmed"
    each = ", ".join(f"{name} {said(one.numbers)}" for name, one in values.items())
    sentence = f"Held-out nats per token of models trained jointly from scratch from matched starts, margin {MARGIN}: "
    own = found[said_of[0]]
    saves: Verdict = "confirmed" if own.high < MARGIN else "refuted" if own.low > MARGIN else "not confirmed"
    thrift = f"At equal parameters the shared model's loss less that of layers with their own: {said(own.numbers)}."
    return [Judgement("K4", verdict, f"{sentence}{each}."), Judgement("K15", saves, thrift)]


def _forms(found: Mapping[str, Interval]) -> list[Judgement]:
    """Each part of the mechanism: whether the model with it is better by more than the margin than that without."""
    judged: list[Judgement] = []
    for claim, names in PAIRS.items():
        values = {name: found[name] for name in (f"{one} less {other}" for one, other in names) if name in found}
        if len(values) == len(names):
            helps = all(one.high < -MARGIN for one in values.values())
            useless = any(one.low > -MARGIN for one in values.values())
            verdict: Verdict = "confirmed" if helps else "refuted" if useless else "not confirmed"
            each = ", ".join(f"{name} {said(one.numbers)}" for name, one in values.items())
            judged.append(Judgement(claim, verdict, f"Held-out nats per token, margin {MARGIN}: {each}."))
    return judged


def _activity(arms: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    """Threshold zero leaves half of the entries active where scores are Gaussian, as before training."""
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
    recipes={"tiny": tiny, "ablation": ablation, "small": small, "paper": paper},
    setup=lambda config: setup(config.schedule, config.arms, config.seeds),
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "attnflow"),
)
