"""Whether further facts before a question confuse the model: the nearest fact alone against the five nearest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.reader.summary import whole_answers
from experiments.reader.world import KINDS
from experiments.runner.experiment import Judgement
from experiments.runner.statistics import student
from experiments.runner.study import LINES, read_study
from experiments.runner.verdict import decide, possible

_SMALLEST: Final = 0.05  # of the share of answers


def judge_dilution(results: Path, alone: str, among: str) -> Sequence[Judgement]:
    """K25: whole answers about facts that are there, with the nearest fact less with the five nearest, by seed.

    Means over sizes of store, in trained wordings. The rule was written after the runs.
    """
    if not (results / LINES).is_file():
        return []
    lost: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    shares: dict[int, dict[str, Any]] = {}
    for run in read_study(results)[1]:
        for way in run.get("ways", ()):
            shares.setdefault(run["job"]["seed"], {}).setdefault(way["way"], []).append(way)
    for seed, ways in shares.items():
        if alone in ways and among in ways:
            for kind, by_seed in lost.items():
                by_seed[seed] = _whole(ways[alone], kind) - _whole(ways[among], kind)
    each = {kind: student(list(by_seed.values())) for kind, by_seed in lost.items() if by_seed}
    if not each:
        return []
    both = student([float(np.mean(values)) for values in zip(*(one.values() for one in lost.values()), strict=True)])
    said = ", ".join(f"{kind} facts {value:.3f}" for kind, value in each.items())
    return [
        Judgement.of(
            "K25",
            possible(decide(both, "above", _SMALLEST)),
            "Share of whole answers of SmolLM2-135M with the nearest fact before the question, less with the five "
            f"nearest, where the right one is among them: {both:.3f}; {said} ({len(lost[KINDS[0]])} seeds).",
            "rule after",
        )
    ]


def _whole(ways: Sequence[Any], kind: str) -> float:
    return float(np.mean([np.mean(answers) for way in ways for answers in whole_answers(way, kind)]))
