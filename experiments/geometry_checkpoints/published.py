"""The authors' own medians of published checkpoints, and how often encoders and decoders are in order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from attnflow.geometry.published import PublishedScores, published_scores
from experiments.runner.statistics import DRAWS, Array, Interval, proportion, widest

Families = Mapping[str, Sequence[float]]  # medians by family: relatives of one model are not independent

MODALITIES: Final = {"text": "language-models", "audio": "audio-models", "vision": "vision-models"}
# Families that predict what comes next, where the table names no tower.
_DECODERS: Final = re.compile("gpt|llama|mistral|mobilellm|phi-|pythia", re.IGNORECASE)


def is_decoder(one: PublishedScores) -> bool:
    return one.tower == "decoder" or (not one.tower and _DECODERS.search(one.family) is not None)


def sound() -> list[PublishedScores]:
    """Records of self-attention without a known fault, each model once.

    Many models have two records, and some names stand for the same weights: MusicGen's encoders are that of T5.
    """
    by_name = {(one.tower, _name(one)): one for one in published_scores() if not one.fault and one.kind == "self"}
    found: dict[tuple[bool, float, float], PublishedScores] = {}
    for one in sorted(by_name.values(), key=lambda one: list(MODALITIES.values()).index(one.modality)):
        found.setdefault((is_decoder(one), one.symmetry.median, one.directionality.median), one)
    return list(found.values())


def _name(one: PublishedScores) -> str:
    return (one.hub_name or one.model).rpartition("/")[2].lower()


def by_family(records: Sequence[PublishedScores], score: str, decoders: bool) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in records:
        if is_decoder(one) == decoders:
            found.setdefault(one.family, []).append(getattr(one, score).median)
    return found


def in_order(above: Families, below: Families) -> Interval:
    """Share of the pairs of one value of each group in which the first is larger, less the half that chance gives.

    The interval is the wider one, end by end, of two. Mann and Whitney's takes models as independent; a bootstrap over
    families does not.

    >>> print(in_order({"a": [3.0, 4.0]}, {"b": [1.0], "c": [2.0, 3.5]}).mean)
    0.3333333333333333
    """
    wins = np.array([[_wins(one, other) for other in below.values()] for one in above.values()])
    pairs = np.array([[float(len(one) * len(other)) for other in below.values()] for one in above.values()])
    first, second = (sum(map(len, of.values())) for of in (above, below))
    half = 1.96 * math.sqrt((first + second + 1) / (12 * first * second))
    mean = float(wins.sum() / pairs.sum())
    return widest(Interval(mean, max(mean - half, 0.0), min(mean + half, 1.0)), _over_families(wins, pairs)).less(0.5)


def _wins(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum((a > b) + 0.5 * (a == b) for a in one for b in other))


def _over_families(wins: Array, pairs: Array) -> Interval:
    """A percentile bootstrap of wins.sum() / pairs.sum() over the rows and the columns of both."""
    generator = np.random.default_rng(0)
    rows, columns = (generator.multinomial(count, [1 / count] * count, size=DRAWS) for count in wins.shape)
    drawn = ((rows @ wins) * columns).sum(1) / ((rows @ pairs) * columns).sum(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(float(wins.sum() / pairs.sum()), float(low), float(high))


def within_models(score: str) -> tuple[Interval, int]:
    """Share of the models of two towers whose encoder has more, less half, by models and by families; and how many."""
    towers: dict[str, dict[str, PublishedScores]] = {}
    for one in published_scores():
        if not one.fault and one.kind == "self" and one.tower in ("encoder", "decoder"):
            towers.setdefault(one.model, {})[one.tower] = one
    families: dict[str, list[bool]] = {}
    for both in towers.values():
        if len(both) == 2:
            encoder, decoder = (getattr(both[tower], score).median for tower in ("encoder", "decoder"))
            families.setdefault(both["decoder"].family, []).append(encoder > decoder)
    counts = np.array([[sum(some), len(some)] for some in families.values()], dtype=np.float64)
    more, models = (int(number) for number in counts.sum(0))
    return widest(proportion(more, models), _over_families(counts[:, :1], counts[:, 1:])).less(0.5), models


def less_directional() -> tuple[Interval, Mapping[str, Families]]:
    """How often a decoder beside an encoder has the smaller |D|, of pairs with one that stands alone, less half."""
    sizes: dict[str, dict[str, list[float]]] = {"beside": {}, "alone": {}}
    for one in sound():
        if is_decoder(one) and (one.tower or one.modality == MODALITIES["text"]):
            kind = "beside" if one.tower else "alone"
            sizes[kind].setdefault(one.family, []).append(abs(one.directionality.median))
    return in_order(sizes["alone"], sizes["beside"]), sizes
