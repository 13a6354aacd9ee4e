"""The measurement as the runner takes it, and the rule that judges the claim."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from pathlib import Path
from typing import Any, Final

from experiments.geometry_in_use.study import ALL, INNER, Use, miniature, setup
from experiments.geometry_in_use.summary import SCORES, main_row, summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import Interval

_CLAIMS: Final = {"symmetry": "G33", "directionality": "G34"}
_CONTROL: Final = 0.9  # rank correlation on white tokens, at least
_HALF: Final = 0.5  # of a score that predicts


def judge(results: Path) -> Sequence[Judgement]:
    """By the rule that stands in the README since before the run."""
    towers = read(results / "results.json")["towers"]
    return [Judgement(claim, *_verdict(towers, score)) for score, claim in _CLAIMS.items()]


def _verdict(towers: dict[str, Any], score: str) -> tuple[Verdict, str]:
    found = {
        name: [Interval(*main_row(one, score, which)["weights and use"]) for which in (ALL, INNER)]
        for name, one in towers.items()
    }
    letter, controls = SCORES[score], [one["white"][f"{score}, many"][0] for one in towers.values()]
    clear = [name for name, both in found.items() if all(one.low > 0 for one in both)]
    weak = any(one.high < _HALF for both in found.values() for one in both)
    verdict: Verdict = "not confirmed"
    if min(controls) < _CONTROL:
        verdict = "not testable here"
    elif len(clear) == len(found) and all(one.mean >= _HALF for both in found.values() for one in both):
        verdict = "confirmed"
    elif not clear and weak:
        verdict = "refuted"
    shown = ", ".join(f"{name} {both[0]:.2f} ({both[1].mean:+.2f} without ends)" for name, both in found.items())
    return verdict, (
        f"Rank correlation over heads of {letter} of the weights with {letter} in use: {shown}. Among white tokens it "
        f"is above {floor(100 * min(controls)) / 100:.2f}."
    )


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
