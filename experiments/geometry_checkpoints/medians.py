"""Encoders against decoders in the authors' own medians, by modality."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

from attnflow.geometry.published import PublishedScores, published_scores
from experiments.runner.experiment import Judgement
from experiments.runner.statistics import Interval, welch
from experiments.runner.verdict import decide, jointly

Score = Literal["symmetry", "directionality"]

_SMALLEST: Final = 0.05
_PLACES: Final[Mapping[str, Sequence[tuple[str, Score]]]] = {
    "G6": [("language-models", "symmetry")],
    "G7": [("language-models", "directionality")],
    "G8": [(f"{name}-models", score) for name in ("audio", "vision") for score in get_args(Score)],
}
# Families that predict the next token, as the published table names them.
_CAUSAL: Final = re.compile("gpt|llama|mistral|mobilellm|phi-|pythia", re.IGNORECASE)
# Not what their place in the table says: MusicGen reads text by T5, and decoders of boxes and of masks see all queries.
_OTHERS: Final = ("MusicGenEncoder", "DETR-Decoder", "mask2former-decoder")


def sides(modality: str, score: Score) -> tuple[list[float], list[float]]:
    """(encoders, decoders): medians over layers of records without a known fault; equal records count once.

    >>> [len(side) for side in sides("language-models", "symmetry")]
    [36, 41]
    """
    found: tuple[list[float], list[float]] = ([], [])
    for record in {(one.symmetry, one.directionality): one for one in _records(modality)}.values():
        found[_is_decoder(record)].append(getattr(record, score).median)
    return found


def _records(modality: str) -> list[PublishedScores]:
    return [
        one
        for one in published_scores()
        if one.modality == modality and not one.fault and one.kind == "self" and one.family not in _OTHERS
    ]


def _is_decoder(record: PublishedScores) -> bool:
    return record.tower == "decoder" if record.tower else bool(_CAUSAL.search(record.family))


def compared(modality: str, score: Score) -> tuple[Interval, str]:
    """The mean of encoders less that of decoders with Welch's interval, and how it is said."""
    encoders, decoders = sides(modality, score)
    less = welch(encoders, decoders)
    above = sum(one > other for one in encoders for other in decoders)
    share = above / (len(encoders) * len(decoders))
    letter = "S" if score == "symmetry" else "D"
    return less, f"{letter} {less:.2f}, {share:.0%} of pairs in order ({len(encoders)} and {len(decoders)} records)"


def with_published(ours: Judgement) -> Judgement:
    """A judgement by checkpoints that packages ship, by the published medians in their place, and both said.

    The published table is larger. It decides, unless ours comes out on the other side. The rule was written after both.
    """
    if ours.claim not in _PLACES:
        return ours
    found = [compared(modality, score) for modality, score in _PLACES[ours.claim]]
    decision = jointly(*(decide(less, "above", _SMALLEST) for less, _ in found))
    verdict = "not confirmed" if {decision.verdict, ours.verdict} == {"confirmed", "refuted"} else decision.verdict
    names = [modality.removesuffix("-models").replace("language", "text") for modality, _ in _PLACES[ours.claim]]
    said = "; ".join(f"{name} {one}" for name, (_, one) in zip(names, found, strict=True))
    sentence = f"Published medians, encoders less decoders: {said}. Checkpoints that packages ship: {ours.sentence}"
    return Judgement(ours.claim, verdict, sentence, decision.tags)
