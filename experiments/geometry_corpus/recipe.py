"""What attention combines, and how often tokens have a role, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.geometry_corpus.study import miniature, paper, setup, small, tiny
from experiments.geometry_corpus.summary import summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import proportion

_SAME: Final = 0.9999  # of pairs of keys: one order, but for rounding
_FEW: Final = 0.1  # of tokens whose 95 % interval leaves out 1: nominally a twentieth if all ratios are 1


def judge(results: Path) -> Sequence[Judgement]:
    content = read(results / "results.json")
    return [
        Judgement("G1", *combinations(content["models"])),
        Judgement("G19", *counts(content["texts"])),
    ]


def combinations(models: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """On proposition 2.1: whether it holds as printed, or with biases and positions put back."""
    convex = all(
        one["negative weights"] == 0
        and one["largest error of a sum"] <= 1e-5
        and one["largest error of a head"] <= 1e-4
        and one["order, the model's own scores"][0] >= _SAME
        for one in models
    )
    printed = all(
        one["order, form of a head"][0] >= _SAME and one["within the hull of tokens"][0] >= 0.99 for one in models
    )

    def each(name: str) -> str:
        return ", ".join(f"{one['model']} {one[name][0]:.2f}" for one in models)

    said = (
        f"{'Weights are convex and heads lie in the hull of their values' if convex else 'Weights are not convex'}, in "
        "the order of the model's own scores; in that of the form alone, without biases and positions, are of pairs of "
        f"keys: {each('order, form of a head')}. The layer's output is outside the hull of tokens, by as much of its "
        f"norm: {each('distance to the hull of tokens')}."
    )
    return ("confirmed" if printed else "corrected") if convex else "refuted", said


def counts(rows: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """On proposition S1.10: whether formulas hold, and whether correlations alone make the difference they should."""

    def of(objective: str, *cuts: str) -> list[Mapping[str, Any]]:
        return [row for row in rows if row["objective"] == objective and (not cuts or row["cut"] in cuts)]

    def share(some: Sequence[Mapping[str, Any]], name: str) -> str:
        return f"{100 * sum(row[name] for row in some) / max(1, sum(row['tokens'] for row in some)):.0f} %"

    def apart(row: Mapping[str, Any]) -> float:
        return row["apart"] / row["tokens"]

    exact = all(row["from the formula"] < 0.5 for row in of("causal"))
    balanced = all(apart(row) <= _FEW for row in of("masked"))
    placed = all(apart(row) > 0.5 for row in of("causal", "beginnings"))
    correlated = all(apart(row) > _FEW for row in of("causal", "packed"))
    most = all(proportion(row["above"], row["tokens"]).low > 0.5 for row in of("causal", "packed"))
    holds = exact and balanced and placed
    said = (
        f"Of frequent tokens the ratio of context to prediction is told from 1 for {share(of('masked'), 'apart')} with "
        f"masked tokens; with the next token for {share(of('causal', 'beginnings'), 'apart')} in rows that begin where "
        f"documents do, {share(of('causal', 'packed'), 'apart')} in packed rows of the same text, "
        f"{share(of('causal', 'shuffled'), 'apart')} with words in random order (5 % by chance). Above 1 in packed "
        f"rows: {share(of('causal', 'packed'), 'above')}. Over all tokens it is 1, always."
    )
    return ("confirmed" if correlated and most else "corrected") if holds else "refuted", said


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
