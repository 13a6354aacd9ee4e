"""A shared base of entries against feed-forward twins, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from experiments.knowledge_twins.models import Arm
from experiments.knowledge_twins.study import Schedule, setup
from experiments.knowledge_twins.summary import FORMS, KINDS, MATCHED, PAIRS, summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import LOSS, UNTESTED, decide, jointly, no_more, partly

SELECTED: Final = 0.1  # of all entries: so many fewer than half are a selection
# Claim -> what of it is not tested.
_MORE: Final = {"K16": " This is the loss of a language model; how well entries are found is not tested apart."}


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
    """Differences and reading of the best entries by the one rule; K6 also by what is active before any training."""
    content = read(results / "results.json")
    if content.get("start") != MATCHED:  # from starts that favour the twins: nothing is said of differences
        return _activity(content["arms"])
    found = {one["name"]: Interval(*one["loss"]) for one in content["differences"]}
    judged = [*_twins(found), *_activity(content["arms"]), *_best(content["arms"]), *_forms(found)]
    return sorted(judged, key=lambda one: int(one.claim[1:]))


def _twins(found: Mapping[str, Interval]) -> list[Judgement]:
    """K4, of models with and without a gate; and K15, whether sharing makes parameters go further."""
    said_of = [f"{form}shared less {form}{kind}" for form in ("", "gated ") for kind in KINDS[1:]]
    values = {name: found[name] for name in said_of if name in found}
    if not values.keys() >= set(said_of[:2]):
        return []
    parts = [decide(one, "none", LOSS) for one in values.values()]
    same = jointly(*parts, *[UNTESTED] * (len(said_of) - len(parts)))
    own = found[said_of[0]]
    sentence = "Held-out nats per token of models trained jointly from scratch from matched starts: "
    thrift = f"At equal parameters the shared model's loss less that of layers with their own: {said(own.numbers)}."
    return [
        Judgement.of("K4", same, f"{sentence}{_each(values)}."),
        Judgement.of("K15", decide(own, "below", LOSS), thrift),
    ]


def _forms(found: Mapping[str, Interval]) -> list[Judgement]:
    """Each part of the mechanism: whether the model with it is better than that without, in every contrast."""
    judged: list[Judgement] = []
    for claim, names in PAIRS.items():
        values = {name: found[name] for name in (f"{one} less {other}" for one, other in names) if name in found}
        if len(values) == len(names):
            untested = [UNTESTED] * (claim in _MORE)
            decision = jointly(*(decide(one, "below", LOSS) for one in values.values()), *untested)
            judged.append(
                Judgement.of(claim, decision, f"Held-out nats per token: {_each(values)}.{_MORE.get(claim, '')}")
            )
    return judged


def _each(values: Mapping[str, Interval]) -> str:
    return ", ".join(f"{name} {said(one.numbers, '.4f')}" for name, one in values.items())


def _best(arms: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    """K10: what reading the best entries alone costs a trained model, by how many they are; the most count first."""
    cost = next((one["best_less_all"] for one in arms if one["arm"] == "shared" and "best_less_all" in one), {})
    if not cost:
        return []
    values = {count: Interval(*cost[count]) for count in sorted(cost, key=int, reverse=True)}
    decision = partly(*(no_more(one, LOSS) for one in values.values()))
    each = ", ".join(f"the {count} best {one:.3f}" for count, one in values.items())
    sentence = (
        f"Held-out nats per token of a trained shared model that reads its best entries alone, less all: {each}. So it "
        "depends on how many. What a search misses has a bound, zero where the k-th score is not positive "
        "([proof](maths.md#what-retrieval-promises))."
    )
    return [Judgement.of("K10", decision, sentence, "rule after")]


def _activity(arms: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    """K6: a threshold of zero leaves half of the entries active where scores are Gaussian, as before training."""
    shares = {one["arm"]: one["activity"] for one in arms if one["arm"] in ("shared", "gated shared")}
    if "shared" not in shares:
        return []
    each = "; ".join(f"{arm} {', '.join(f'{share[0]:.0%}' for share in some)}" for arm, some in shares.items())
    sentence = (
        f"Half of the entries are active at the start, whatever the activation; after training, by layer: {each}. "
        "It is training that selects."
    )
    trained = jointly(*(decide(Interval(*share).less(0.5), "below", SELECTED) for share in shares["shared"]))
    untrained = decide(Interval(0.0, 0.0, 0.0), "below", SELECTED)  # less half, of scores that are symmetric around 0
    return [Judgement.of("K6", partly(trained, untrained), sentence, "rule after")]


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
