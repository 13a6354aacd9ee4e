"""What the claims are judged by: differences by seed, each with a name; the README says what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from experiments.bias_comparison.results import Result, Results, paired
from experiments.bias_comparison.settings import FEW
from experiments.runner.statistics import speed_up

Contrasts = dict[str, list[float]]

_MIDDLE: Final = ("0.25", "0.5", "0.75")
_LONGER: Final = (2, 4)  # times the length of training: at 8 times nearly every arm answers by chance
_KNOBS: Final = ("width 16", "width 128", "every layer", "every fourth", "by head", "bilinear", "dot", "He init")


def contrasts(results: Results) -> Contrasts:
    """Name -> a difference by seed, of what has run."""
    made: Contrasts = {}
    for part in dict.fromkeys(part for part, _ in results):
        for arm in dict.fromkeys(arm for where, arm in results if where == part and arm != "guidance"):
            if (part, "guidance") in results:
                one, other = results[part, "guidance"], results[part, arm]
                made[f"{part}: loss, guidance less {arm}"] = paired(one.end(), other.end())
                if one.probe:
                    made[f"{part}: accuracy, guidance less {arm}"] = paired(one.end("accuracy"), other.end("accuracy"))
    for some in (_continued, _knobs, _few, _recall, _maps):
        made |= some(results)
    return {name: values for name, values in made.items() if values}


def _continued(results: Results) -> Contrasts:
    """Of continued training: each difference at every rate that both arms have run with all seeds; what is tuned."""
    made: Contrasts = {}
    arms = {arm: one for (part, arm), one in results.items() if part == "text"}
    if "guidance" in arms:
        own = arms.pop("guidance")
        for arm, one in arms.items():
            for rate in sorted(own.by_rate.keys() & one.by_rate.keys()):
                made[f"text: loss at {rate:g}, guidance less {arm}"] = paired(own.end(rate=rate), one.end(rate=rate))
        if "plain" in arms:
            made["text: share of the steps saved, guidance less plain"] = _saved(own, arms["plain"])
    if ("tuned", "guidance") in results:
        one = results["tuned", "guidance"]
        made["tuned: loss, guidance less start"] = paired(one.end(), _before(one))
    return made


def _saved(one: Result, other: Result) -> list[float]:
    """By seed: the share of its steps that one arm saves over another, less what the other saves over it.

    A share alone is never negative, so that noise gives more than 0; this difference is 0 on average for equal arms.
    """
    mine, theirs = one.curve(), other.curve()
    window = min(3, len(one.steps))
    return [
        speed_up(one.steps, mine[seed], theirs[seed], window) - speed_up(one.steps, theirs[seed], mine[seed], window)
        for seed in mine
        if seed in theirs
    ]


def _knobs(results: Results) -> Contrasts:
    made: Contrasts = {}
    own = results.get(("knobs", "width 64"))
    if own is None:
        return made
    for arm in _KNOBS:
        if ("knobs", arm) in results:
            made[f"knobs: loss, width 64 less {arm}"] = paired(own.end(), results["knobs", arm].end())
    if ("knobs", "He init") in results:
        made["knobs: loss before the first step, He less zero"] = paired(
            _before(results["knobs", "He init"]), _before(own)
        )
    return made


def _few(results: Results) -> Contrasts:
    """After and before tuning to few rows: models trained with guidance less those trained without."""
    made: Contrasts = {}
    for name in FEW:
        arm, _, rows = name.partition(" ")
        one, other = results.get(("few", f"guidance {rows}")), results.get(("few", name))
        if arm != "guidance" and one is not None and other is not None:
            made[f"few: loss after {rows} rows, guidance less {arm}"] = paired(one.end(), other.end())
            made[f"few: loss before {rows} rows, guidance less {arm}"] = paired(_before(one), _before(other))
    return made


def _recall(results: Results) -> Contrasts:
    """What distractor sentences cost, and how much the model finds in the middle of longer sequences."""
    made: Contrasts = {}
    arms = {arm: one for (part, arm), one in results.items() if part == "recall"}
    lost = {arm: one.extra(_lost) for arm, one in arms.items()}
    found = {arm: one.extra(_found_in_the_middle) for arm, one in arms.items()}
    for arm in arms:
        made[f"distractors: loss of accuracy, {arm}"] = list(lost[arm].values())
        made[f"depth: accuracy in the middle, {arm}"] = list(found[arm].values())
        if arm != "guidance" and "guidance" in arms:
            made[f"distractors: loss of accuracy, guidance less {arm}"] = paired(lost["guidance"], lost[arm])
            made[f"depth: accuracy in the middle, guidance less {arm}"] = paired(found["guidance"], found[arm])
    if {"guidance", "plain"} <= arms.keys():
        third = {seed: value / 3 for seed, value in lost["plain"].items()}
        made["distractors: loss of accuracy, guidance less a third of plain"] = paired(lost["guidance"], third)
    return made


def _lost(extras: Any) -> float:
    by_count = extras["distractors"]
    return by_count["0"] - float(np.mean([value for count, value in by_count.items() if count != "0"]))


def _found_in_the_middle(extras: Any) -> float:
    return float(np.mean([extras["depth"][f"{length}x {depth}"] for length in _LONGER for depth in _MIDDLE]))


def _maps(results: Results) -> Contrasts:
    made: Contrasts = {}
    if ("sums", "guidance") in results:
        own = results["sums", "guidance"].extra(lambda extras: float(np.mean(extras["sums"]["contrast"])))
        made["sums: bias of operands less the rest"] = list(own.values())
    if {("changes", "new text"), ("changes", "same text")} <= results.keys():

        def take(extras: Any) -> float:
            return float(np.mean(extras["kept"]["correlation"]))

        new, same = (results["changes", arm].extra(take) for arm in ("new text", "same text"))
        made["changes: correlation of B with its start, new text"] = list(new.values())
        made["changes: correlation of B with its start, new less same text"] = paired(new, same)
    return made


def _before(one: Result) -> Mapping[int, float]:
    return {seed: curve[0] for seed, curve in one.curve().items()}
