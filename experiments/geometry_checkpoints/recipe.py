"""Scores of real checkpoints, as the runner takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from experiments.geometry_checkpoints.study import miniature, paper, setup, small, tiny
from experiments.geometry_checkpoints.summary import summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read


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
    return verdict, f"Median {name} over layers: {of}, decoders {named}"


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
