"""What a run of `fit_reader` practises on: facts, and questions about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow.knowledge.hf.words import words_of
from attnflow.knowledge.questions import Question, asked, made_up
from attnflow.knowledge.records import Record

_HELD_OUT: Final = 10  # one fact in so many is never trained
_EACH: Final = 2  # wordings in which a fact is trained
_ORDINARY: Final = 0.6  # of the subjects are words of the language


@dataclass(frozen=True)
class Settings:
    """By which a run is recognised when it goes on."""

    facts: int
    reading_steps: int
    steps: int
    seed: int
    data: str
    encoder: str
    course: int = 5  # 1 to 4 asked in six or twelve frames, 2 about made-up names alone, 3 to be quiet in questions


class Practice(NamedTuple):
    """What a run practises on: words, facts, questions about those that are trained, and about those held out."""

    words: list[str]
    records: list[Record]
    questions: list[Question]
    held: list[Question]


def practice(tokenizer: PreTrainedTokenizerBase, own: Sequence[Record], settings: Settings) -> Practice:
    """By the seed of the settings."""
    draw = random.Random(settings.seed)
    words = words_of(tokenizer, draw)
    records = [*own, *made_up(settings.facts, words, draw, _ORDINARY)]
    held = set(draw.sample(range(len(records)), max(1, len(records) // _HELD_OUT)))
    trained, other = asked(records, draw, _EACH), asked(records, draw, held_out=True)
    apart = [one for one in (*trained, *other) if one.entry in held]
    draw.shuffle(apart)
    return Practice(words, records, [one for one in trained if one.entry not in held], apart)
