"""Questions that a store answers, made from its entries by templates, and made-up facts to practise on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from attnflow.knowledge.records import SEPARATOR, Record

READ: Final = 0.5  # of the weight of a reader: where less lies on entries, the store does not have the answer
PROMPT: Final = "Question: {}\nAnswer:"
FRAMES: Final = (
    "What is {key}?",
    "Tell me {key}.",
    "Do you know {key}?",
    "{key}: what is it?",
    "Which one is {key}?",
    "Name {key}.",
)
HELD_OUT_FRAMES: Final = ("Can you say what {key} is?", "I would like to know {key}.")  # never asked in training
_RELATIONS: Final = (
    *("colour", "home", "trade", "pet", "food", "friend", "tool", "drink", "capital", "river", "founder", "leader"),
    *("language", "currency", "symbol", "song", "game", "enemy", "teacher", "birthplace", "hobby", "gift", "dream"),
)
_FORMS: Final = ("the {relation} of {subject}", "{subject}'s {relation}")
_SYLLABLES: Final = """
ba bel bor da del dor fa fen gar gil ha hul in jo ka kel kin la lem lor ma mel mir mo na nel nor o pa per ra rel rin ro
sa sel sor ta tan tel tir u va vel vin wa wen yo za zel
"""


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the entry that has it.

    Attributes:
        prompt: what the model reads.
        answer: what it should say.
        entry: number of the fact among those of a `Course`.
        paraphrased: whether it is in a wording that is never trained.
    """

    prompt: str
    answer: str
    entry: int
    paraphrased: bool


def made_up(count: int, words: Sequence[str], draw: random.Random) -> list[Record]:
    """Facts about people and places that do not exist, three of each subject, their values words."""
    syllables = _SYLLABLES.split()
    made: dict[str, Record] = {}
    while len(made) < count:
        subject = "".join(draw.choice(syllables) for _ in range(draw.choice((2, 3)))).capitalize()
        for relation in draw.sample(_RELATIONS, 3):
            key = draw.choice(_FORMS).format(relation=relation, subject=subject)
            made.setdefault(key, Record(f"{key}{SEPARATOR}{draw.choice(words)}"))
    return list(made.values())[:count]


def asked(records: Sequence[Record], draw: random.Random, each: int = 1, held_out: bool = False) -> list[Question]:
    """Questions about facts; of a text without a value, its last word is asked for by what stands before it."""
    frames = HELD_OUT_FRAMES if held_out else FRAMES
    questions: list[Question] = []
    for entry, record in enumerate(records):
        key, _, value = record.text.partition(SEPARATOR)
        if not value.strip():
            begun, _, last = key.rstrip(".!? ").rpartition(" ")
            if begun:
                questions.append(Question(begun, last, entry, held_out))
            continue
        for frame in draw.sample(frames, min(each, len(frames))):
            wording = frame.format(key=key)
            questions.append(Question(PROMPT.format(wording[0].upper() + wording[1:]), value.strip(), entry, held_out))
    return questions
