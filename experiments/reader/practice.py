"""What a run of `fit_reader` practises on: facts, and questions about them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from experiments.reader.halves import Halves
from experiments.reader.questions import Question, asked, least_mistakes, made_up, parts_of
from experiments.reader.quiet import pool_of
from experiments.reader.records import SEPARATOR, Record
from experiments.reader.words import words_of

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
    draw = random.Random(settings.seed)
    words = words_of(tokenizer, draw)
    records = [*own, *made_up(settings.facts, words, draw, _ORDINARY)]
    held = set(draw.sample(range(len(records)), max(1, len(records) // _HELD_OUT)))
    trained, other = asked(records, draw, _EACH), asked(records, draw, held_out=True)
    apart = [one for one in (*trained, *other) if one.entry in held]
    draw.shuffle(apart)
    return Practice(words, records, [one for one in trained if one.entry not in held], apart)


def near_enough(
    encoder: Halves,
    questions: Sequence[Question],
    records: Sequence[Record],
    entries: Float[Tensor, "records dim"],
    most: int,
) -> float:
    """The similarity above which the nearest entry has the answer, chosen by questions with their entries and without.

    Among what is searched are other facts of the same subjects: "the leader of Karmin" is near to who founded Karmin,
    and has no answer to it.
    """
    subjects = [parts_of(record.text.partition(SEPARATOR)[0])[1] for record in records]
    about = {subjects[one.entry] for one in questions}
    wanted = torch.tensor([one.entry for one in questions], device=entries.device)
    near = torch.tensor([place for place, subject in enumerate(subjects) if subject in about], device=entries.device)
    pool, _ = pool_of(near, len(entries), min(most, len(entries)), torch.Generator().manual_seed(11))
    asked = torch.stack([encoder.query(one.text) for one in questions]).to(entries.device)
    scores = asked @ entries[pool].T
    own = pool[None] == wanted[:, None]
    others = functional.pad(
        scores.masked_fill(own, -math.inf), (0, 1), value=-1.0
    )  # as of no entry, where none is left
    return least_mistakes(scores[own].tolist(), others.amax(dim=1).tolist())
