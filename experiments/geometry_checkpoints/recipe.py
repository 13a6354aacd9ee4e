"""Scores of real checkpoints, as the runner takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from attnflow.geometry.published import PublishedScores
from experiments.geometry_checkpoints.published import (
    MODALITIES,
    by_family,
    in_order,
    less_directional,
    sound,
    within_models,
)  # fmt: skip
from experiments.geometry_checkpoints.study import miniature, paper, setup, small, tiny
from experiments.geometry_checkpoints.summary import summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import UNTESTED, Decision, decide, jointly, uncontradicted

PAIRS: Final = 0.1  # of all pairs, beyond the half that chance gives
_LETTERS: Final[Mapping[str, str]] = {"symmetry": "S", "directionality": "D"}
_PUBLISHED: Final = "published checkpoints"


def judge(results: Path) -> Sequence[Judgement]:
    """By medians over layers that were published, and by those of each part of a model that we have scored."""
    rows: Sequence[Mapping[str, Any]] = read(results / "results.json")["parts"]
    records = sound()
    found: list[Judgement] = []
    for claim, score in zip(("G6", "G7"), _LETTERS, strict=True):
        share, own = _pairs(records, "text", score), _ours(rows, score)
        decision = uncontradicted(_decide(share), _decide(own))
        sentence = f"Published checkpoints of text: {_said(share, score)}. {_models(rows, score, own)}"
        found.append(Judgement.of(claim, decision, sentence, "rule after", evidence=_PUBLISHED))
    return [*found, _others(records), _encoder_decoders(rows)]


def _pairs(records: Sequence[PublishedScores], modality: str, score: str, family: str = "") -> Interval:
    """Pairs of an encoder and a decoder, or one of a family of decoders, in which the encoder has more, less half."""
    some = [one for one in records if one.modality == MODALITIES[modality]]
    decoders = by_family(some, score, True)
    return in_order(by_family(some, score, False), {family: decoders[family]} if family else decoders)


def _decide(share: Interval | None) -> Decision:
    return UNTESTED if share is None else decide(share, "above", PAIRS)


def _said(share: Interval, score: str) -> str:
    return f"{_LETTERS[score]} is higher in the encoder in {said(share.less(-0.5).numbers, '.0%')} of the pairs"


def _ours(rows: Sequence[Mapping[str, Any]], score: str) -> Interval | None:
    """The same of what we have scored, all modalities together; relatives are told by the first word of a name."""
    sides: dict[str, dict[str, list[float]]] = {"encoder": {}, "decoder": {}}
    for row in rows:
        sides[row["side"]].setdefault(row["model"].partition(" ")[0], []).append(row[score])
    return in_order(sides["encoder"], sides["decoder"]) if all(sides.values()) else None


def _models(rows: Sequence[Mapping[str, Any]], score: str, share: Interval | None) -> str:
    encoders = sorted(row[score] for row in rows if row["side"] == "encoder")
    if share is None:
        return "Ours at tiny have not both sides."
    named = ", ".join(f"{row['model']} {row[score]:+.2f}" for row in rows if row["side"] == "decoder")
    return (
        f"Ours at tiny, of all modalities: {said(share.less(-0.5).numbers, '.0%')}, {_decide(share).verdict} (encoders "
        f"{encoders[0]:+.2f} to {encoders[-1]:+.2f}, median {median(encoders):+.2f}; decoders {named})."
    )


def _others(records: Sequence[PublishedScores]) -> Judgement:
    """G8: both scores, of audio and of vision."""
    shares = {(name, score): _pairs(records, name, score) for name in ("audio", "vision") for score in _LETTERS}
    each = "; ".join(f"{name}, {_said(share, score)}" for (name, score), share in shares.items())
    next_ones = (
        f"{_LETTERS[score]} {_pairs(records, 'vision', score, 'iGPT').less(-0.5).mean:.0%}" for score in _LETTERS
    )
    sentence = (
        f"Published checkpoints: {each}. Of the decoders of vision only iGPT predicts what comes next; against it: "
        f"{', '.join(next_ones)}. Ours at tiny are one model of audio (G29)."
    )
    decision = jointly(*map(_decide, shares.values()))
    return Judgement.of("G8", decision, sentence, "rule after", evidence=_PUBLISHED)


def _encoder_decoders(rows: Sequence[Mapping[str, Any]]) -> Judgement:
    """G29: the two towers of a model, in both scores; and |D| of decoders beside an encoder and alone."""
    shares = {score: within_models(score) for score in _LETTERS}
    smaller, sizes = less_directional()
    beside, alone = (median(size for some in families.values() for size in some) for families in sizes.values())
    each = " and ".join(
        f"the higher {_LETTERS[score]} in {said(share.less(-0.5).numbers, '.0%')} of {count} models"
        for score, (share, count) in shares.items()
    )
    own = {row["model"]: {r["tower"]: r for r in rows if r["model"] == row["model"]} for row in rows if row["tower"]}
    ours = "; ".join(
        f"Our {name}: S {t['encoder']['symmetry']:+.2f} and {t['decoder']['symmetry']:+.2f}, "
        f"D {t['encoder']['directionality']:+.2f} and {t['decoder']['directionality']:+.2f}"
        for name, t in own.items()
        if {"encoder", "decoder"} <= t.keys()
    )
    sentence = (
        f"Published checkpoints: encoders have {each}. Decoders beside an encoder have |D| of {beside:.2f}, those that "
        f"stand alone {alone:.2f}; it is smaller in {said(smaller.less(-0.5).numbers, '.0%')} of the pairs. "
        f"{ours or 'None of ours has both towers'}."
    )
    decision = jointly(*(_decide(share) for share, _ in shares.values()), _decide(smaller))
    return Judgement.of("G29", decision, sentence, "rule after", evidence=_PUBLISHED)


EXPERIMENT: Final = Experiment(
    name="geometry_checkpoints",
    question="What are symmetry and directionality of real checkpoints, as published and corrected?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
)
