"""The measurement as the runner takes it, and the rule that judges the claim."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from pathlib import Path
from typing import Any, Final

from experiments.geometry_in_use.study import ALL, INNER, Use, miniature, setup
from experiments.geometry_in_use.summary import SCORES, main_row, summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, widest
from experiments.runner.verdict import Decision, decide, jointly

_CLAIMS: Final = {"symmetry": "G33", "directionality": "G34"}
_CONTROL: Final = 0.9  # rank correlation on white tokens, at least
PREDICTS: Final = 0.5  # rank correlation of a score that predicts, at least


def judge(results: Path) -> Sequence[Judgement]:
    """By the correlations in all towers, of all tokens and of the inner ones; white tokens show what can be seen."""
    towers = read(results / "results.json")["towers"]
    return [_judged(claim, towers, score) for score, claim in _CLAIMS.items()]


def _judged(claim: str, towers: dict[str, Any], score: str) -> Judgement:
    found = {
        name: [Interval(*main_row(one, score, which)["weights and use"]) for which in (ALL, INNER)]
        for name, one in towers.items()
    }
    letter, controls = SCORES[score], [one["white"][f"{score}, many"][0] for one in towers.values()]
    decision = jointly(*(decide(widest(*both), "above", PREDICTS) for both in found.values()))
    if min(controls) < _CONTROL:
        decision = Decision("not testable here")
    shown = ", ".join(f"{name} {both[0]:.2f} ({both[1].mean:+.2f} without ends)" for name, both in found.items())
    said = (
        f"Rank correlation over heads of {letter} of the weights with {letter} in use: {shown}. Among white tokens it "
        f"is above {floor(100 * min(controls)) / 100:.2f}."
    )
    return Judgement.of(claim, decision, said)


EXPERIMENT: Final = Experiment(
    name="geometry_in_use",
    question="Do symmetry and directionality of a head's weights predict those among the tokens of a text?",
    recipes={"tiny": Use},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "attnflow"),
)
