"""What attention combines, and how often tokens have a role, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.geometry_corpus.study import miniature, paper, setup, small, tiny
from experiments.geometry_corpus.summary import summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, proportion, said
from experiments.runner.verdict import Decision, decide, exactly, jointly, partly

_SAME: Final = 0.9999  # of pairs of keys: one order, but for rounding
_INSIDE: Final = 0.99  # of outputs
CHANCE: Final = 0.05  # of tokens whose 95 % interval leaves out 1 where all ratios are 1
MANY: Final = 0.1  # of the frequent tokens: so many beyond chance, or beyond half


def judge(results: Path) -> Sequence[Judgement]:
    content = read(results / "results.json")
    return [combinations(content["models"]), counts(content["texts"])]


def combinations(models: Sequence[Mapping[str, Any]]) -> Judgement:
    """On proposition 2.1: whether it holds with biases and positions put back, and also as printed."""
    exceptions = sum(
        one["negative weights"] > 0 or one["largest error of a sum"] > 1e-5 or one["largest error of a head"] > 1e-4
        for one in models
    )

    def share(name: str, bar: float) -> Decision:
        return jointly(*(decide(Interval(*one[name]).less(bar), "above", 0.0) for one in models))

    def each(name: str) -> str:
        return ", ".join(f"{one['model']} {one[name][0]:.2f}" for one in models)

    convex = jointly(exactly(exceptions, len(models)), share("order, the model's own scores", _SAME))
    decision = partly(convex, share("order, form of a head", _SAME), share("within the hull of tokens", _INSIDE))
    sentence = (
        f"Weights are {'' if convex.holds else 'not '}convex, and heads lie in the hull of their values, in the order "
        "of the model's own scores; in that of the form alone, without biases and positions, are of pairs of keys: "
        f"{each('order, form of a head')}. The layer's output is outside the hull of tokens, by as much of its norm: "
        f"{each('distance to the hull of tokens')}."
    )
    return Judgement.of("G1", decision, sentence)


def counts(rows: Sequence[Mapping[str, Any]]) -> Judgement:
    """On proposition S1.10: whether ratios are 1 or not as derived, and whether correlations alone move them."""

    def told(name: str, objective: str, *cuts: str) -> Interval:
        some = [row for row in rows if row["objective"] == objective and (not cuts or row["cut"] in cuts)]
        return proportion(sum(row[name] for row in some), sum(row["tokens"] for row in some))

    causal = [row["from the formula"] >= 0.5 for row in rows if row["objective"] == "causal"]
    exact = exactly(sum(causal), len(causal))
    masked, placed, packed, shuffled = (
        told("apart", *of)
        for of in (("masked",), ("causal", "beginnings"), ("causal", "packed"), ("causal", "shuffled"))
    )
    above = told("above", "causal", "packed")
    balanced = decide(masked.less(CHANCE), "none", MANY)
    derived = jointly(exact, balanced, decide(placed.less(CHANCE), "above", MANY))
    decision = partly(derived, *(decide(one, "above", MANY) for one in (packed.less(CHANCE), above.less(0.5))))
    sentence = (
        f"Of frequent tokens the ratio of context to prediction is told from 1 for {masked.mean:.0%} with masked "
        f"tokens; with the next token for {placed.mean:.0%} in rows that begin where documents do, "
        f"{said(packed.numbers, '.0%')} in packed rows of the same text, {shuffled.mean:.0%} with words in random "
        f"order ({CHANCE:.0%} by chance). Above 1 in packed rows: {said(above.numbers, '.0%')}. Over all tokens it is "
        "1, always."
    )
    return Judgement.of("G19", decision, sentence, "rule after")


EXPERIMENT: Final = Experiment(
    name="geometry_corpus",
    question="Does attention combine tokens in the order of its form, and is a token as often context as predicted?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "attnflow"),
)
