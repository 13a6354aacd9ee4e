"""The authors' training runs as the runner takes them, and the rule that judges by them, with ours beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from experiments.geometry_init import rates
from experiments.geometry_training import measures
from experiments.geometry_training.study import miniature, paper, setup, tiny
from experiments.geometry_training.summary import summarise
from experiments.runner.experiment import ROOT, Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval
from experiments.runner.verdict import LOSS, SCORE, STEPS, UNTESTED, Side, Tag, decide, jointly, uncontradicted

_INIT: Final = ROOT / "geometry_init" / "results"


@dataclass(frozen=True)
class Claimed:
    quantity: str  # of `measures`
    where: Side  # the side of zero that the claim has it on
    smallest: float  # effect that matters
    ours: str = ""  # the contrast of geometry_init that is the same; "": its comparison of starts
    starts: tuple[str, ...] = rates.STARTS[:1]  # of ours


CLAIMS: Final[Mapping[str, Claimed]] = {
    "G9": Claimed(measures.SYMMETRY, "above", SCORE, rates.SYMMETRY, rates.STARTS),
    "G10": Claimed(measures.DIRECTIONALITY, "above", SCORE, rates.DIRECTIONALITY, rates.STARTS),
    "G11": Claimed(measures.LATE_SYMMETRY, "above", SCORE, rates.LATE_SYMMETRY),
    "G12": Claimed(measures.LATE_DIRECTIONALITY, "below", SCORE, rates.LATE_DIRECTIONALITY),
    "G13": Claimed(measures.LOSS, "below", LOSS),
    "G14": Claimed(measures.SPEED, "above", STEPS),
    "G30": Claimed(measures.MIDDLE, "below", SCORE, rates.MIDDLE),
    "G31": Claimed(measures.SETTLING, "below", STEPS, rates.SETTLING),
}


def judge(results: Path) -> Sequence[Judgement]:
    """By the interval over the authors' runs, with ours beside; the rule stands in the README since before the run."""
    rows = read(results / "results.json")["quantities"]
    return [_judged(number, claim, rows) for number, claim in CLAIMS.items()]


def _judged(number: str, claim: Claimed, rows: Sequence[Mapping[str, Any]]) -> Judgement:
    main, *others = [row for row in rows if row["quantity"] == claim.quantity]
    value, sign = Interval(*main["t"]), 1 if claim.where == "above" else -1

    def count(row: Mapping[str, Any]) -> str:
        return f"{sum(sign * x > 0 for x in row['values'].values())} of {len(row['values'])}"

    own = ours(claim)
    said = (
        "Authors' runs (BERT of 110 M parameters and of 4 layers, one run each, decoders with masked inputs): "
        f"{claim.quantity} {value:.3f}, on the claim's side in {count(main)} "
        f"(by other definitions {' and '.join(map(count, others))})."
    )
    if own:
        small = jointly(*(decide(one, claim.where, claim.smallest) for one in own.values()))
        each = ", ".join(f"{name} {one:.3f}" for name, one in own.items())
        said += f" Ours at tiny (1 M parameters, 5 seeds): {each}; {small.verdict}."
    else:
        small = UNTESTED
    decision = uncontradicted(decide(value, claim.where, claim.smallest), small)
    # The authors' symmetric starts are of a larger scale, too; ours are compared at one scale.
    empty = not claim.ours and decision.holds and not small.holds
    tags: tuple[Tag, ...] = ("empty",) if empty else ()
    return Judgement.of(number, decision, said, "rule after", *tags, evidence="authors' runs")


def ours(claim: Claimed) -> dict[str, Interval]:
    """The same contrast in our small models, each objective at its best rate, by what it starts from."""
    place = _INIT / "rates" / "results.json" if claim.ours else _INIT / "results.json"
    if not place.is_file():
        return {}
    content = read(place)
    if claim.ours:
        return {
            f"{row['start']} start": Interval(*row["value"])
            for row in content["rates"]
            if row["contrast"] == claim.ours and row["at"] == "best" and row["start"] in claim.starts
        }
    (one,) = [row for row in content["comparisons"] if (row["objective"], row["arm"]) == ("masked", "symmetric")]
    mean, low, high = one["null"]  # of the control against itself, over pairs of seeds
    less = Interval(one["speed_up"] - mean, one["speed_up"] - high, one["speed_up"] - low)
    return {"against a start of equal scale": less if claim.quantity == measures.SPEED else Interval(*one["loss"])}


EXPERIMENT: Final = Experiment(
    name="geometry_training",
    question="What do the authors' own training runs say of S and D of encoders and decoders, layer by layer?",
    recipes={"tiny": tiny, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
)
