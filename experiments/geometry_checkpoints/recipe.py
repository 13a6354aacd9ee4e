"""Scores of real checkpoints, as the runner takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, Final

from attnflow.geometry.published import PublishedScores, published_scores
from experiments.geometry_checkpoints.study import miniature, paper, setup, small, tiny
from experiments.geometry_checkpoints.summary import summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read

# Decoders without an encoder, as the published table names them.
_DECODERS: Final = re.compile("gpt|llama|mistral|mixtral|mobilellm|phi-|pythia|opt-", re.IGNORECASE)


def judge(results: Path) -> Sequence[Judgement]:
    """By medians over layers of each part of a model; the rule stands in the README."""
    rows: Sequence[Mapping[str, Any]] = read(results / "results.json")["parts"]
    found = [
        Judgement("G6", *_ordered(rows, "symmetry")),
        Judgement("G7", *_ordered(rows, "directionality")),
    ]
    others = [row for row in rows if row["modality"] in ("vision", "audio")]
    each = [_ordered([row for row in others if row["modality"] == name], what) for name in ("vision", "audio")
            for what in ("symmetry", "directionality")]  # fmt: skip
    said = "; ".join(sentence for verdict, sentence in each if verdict != "not testable here")
    verdicts = {verdict for verdict, _ in each}
    verdict: Verdict = (
        "confirmed" if verdicts == {"confirmed"}
        else "not confirmed" if verdicts - {"confirmed", "not testable here"}
        else "not testable here"
    )  # fmt: skip
    which = ", ".join(name for name in ("vision", "audio") if not any(row["modality"] == name for row in others))
    found.append(Judgement("G8", verdict, f"{said or 'Nothing scored'}." + (f" No model of {which}." if which else "")))
    found.append(_encoder_decoders(rows))
    return found


def _ordered(rows: Sequence[Mapping[str, Any]], what: str) -> tuple[Verdict, str]:
    """Whether every encoder has more of something than every decoder (confirmed), or their medians less (refuted)."""
    sides = {side: sorted(row[what] for row in rows if row["side"] == side) for side in ("encoder", "decoder")}
    encoders, decoders = sides["encoder"], sides["decoder"]
    if not encoders or not decoders:
        return "not testable here", ""
    verdict: Verdict = "confirmed" if encoders[0] > decoders[-1] else "not confirmed"
    if median(encoders) < median(decoders):
        verdict = "refuted"
    name = "S" if what == "symmetry" else "D"
    named = ", ".join(f"{row['model']} {row[what]:+.2f}" for row in rows if row["side"] == "decoder")
    of = f"{len(encoders)} encoders {encoders[0]:+.2f} to {encoders[-1]:+.2f} (median {median(encoders):+.2f})"
    if len(encoders) == 1:
        of = f"an encoder {encoders[0]:+.2f}"
    above = sum(one > other for one in encoders for other in decoders)
    pairs = len(encoders) * len(decoders)
    more = f" ({above} of {pairs} pairs, one-sided p = {rank_test(encoders, decoders):.3f})" if pairs > 1 else ""
    return verdict, f"Median {name} over layers: {of}, decoders {named}{more}"


def rank_test(above: Sequence[float], below: Sequence[float]) -> float:
    """One-sided p of Mann and Whitney, exact: in how many splits of all values at least as many pairs are in order.

    Values are taken as independent, which relatives of one model are not.

    Cost: the number of splits, 55 for nine and two values.

    >>> print(f"{rank_test([3.0, 4.0, 1.0], [2.0]):.2f}")  # 2 of 3 pairs: so it is wherever the 2 is lowest or second
    0.50
    """
    every = [*above, *below]

    def ordered(lower: set[int]) -> float:
        pairs = [(one, every[j]) for i, one in enumerate(every) if i not in lower for j in lower]
        return sum((one > other) + 0.5 * (one == other) for one, other in pairs)

    seen = ordered(set(range(len(above), len(every))))
    splits = [ordered(set(chosen)) for chosen in combinations(range(len(every)), len(below))]
    return sum(one >= seen for one in splits) / len(splits)


def _encoder_decoders(rows: Sequence[Mapping[str, Any]]) -> Judgement:
    """Fig. S2: the towers of a model, by a sign test on the authors' own medians, and those that we have scored."""
    published: dict[str, dict[str, PublishedScores]] = {}
    alone: list[float] = []
    for one in published_scores():
        if one.fault or one.kind != "self":
            continue
        if one.tower in ("encoder", "decoder"):
            published.setdefault(one.model, {})[one.tower] = one
        elif one.modality == "language-models" and _DECODERS.search(one.model):
            alone.append(abs(one.directionality.median))
    models = [towers for towers in published.values() if len(towers) == 2]
    counts = {
        what: sum(getattr(m["encoder"], what).median > getattr(m["decoder"], what).median for m in models)
        for what in ("symmetry", "directionality")
    }
    chances = {what: binomial_test(count, len(models)) for what, count in counts.items()}
    clear = [(chances[what] < 0.05) * (1 if 2 * count > len(models) else -1) for what, count in counts.items()]
    size = median(abs(m["decoder"].directionality.median) for m in models)
    said = " and ".join(
        f"the higher {letter} in {counts[what]} of {len(models)} models (sign test, p = {chances[what]:.0e})"
        for what, letter in (("symmetry", "S"), ("directionality", "D"))
    )
    own = {row["model"]: {r["tower"]: r for r in rows if r["model"] == row["model"]} for row in rows if row["tower"]}
    ours = "; ".join(
        f"Our {name}: S {t['encoder']['symmetry']:+.2f} and {t['decoder']['symmetry']:+.2f}, "
        f"D {t['encoder']['directionality']:+.2f} and {t['decoder']['directionality']:+.2f}"
        for name, t in own.items()
        if {"encoder", "decoder"} <= t.keys()
    )
    return Judgement(
        "G29",
        "confirmed" if clear == [1, 1] and size < median(alone) else "refuted" if -1 in clear else "not confirmed",
        f"In the authors' own medians encoders have {said}; decoders have |D| of {size:.2f}, "
        f"those without an encoder {median(alone):.2f}. {ours or 'None of ours has both towers'}.",
    )


def binomial_test(successes: int, items: int) -> float:
    """Two-sided p of so many successes where each has chance 1/2.

    >>> binomial_test(0, 3), binomial_test(2, 4)
    (0.25, 1.0)
    """
    tail = sum(comb(items, count) for count in range(max(successes, items - successes), items + 1)) / 2**items
    return min(1.0, 2 * tail)


EXPERIMENT: Final = Experiment(
    name="geometry_checkpoints",
    question="What are symmetry and directionality of real checkpoints, as published and corrected?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    rule_before=False,
)
