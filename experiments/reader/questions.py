"""Questions that a store answers, made from its entries by templates, and made-up facts to practise on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from experiments.reader.records import SEPARATOR, Record

# Thresholds before they are chosen: less, and no entry has the answer.
READ: Final = 0.5  # of the weight on entries
NEAR: Final = 0.5  # inner product of a question with the nearest key
PROMPT: Final = "Question: {}\nAnswer:"
# Many, since readers ask by the mean of what all words say: what a word of a frame adds has to be learnt away.
FRAMES: Final = (
    "What is {key}?",
    "What's {key}?",
    "Who is {key}?",
    "Where is {key}?",
    "Which one is {key}?",
    "Tell me {key}.",
    "Do you know {key}?",
    "{key}: what is it?",
    "{key}?",
    "Name {key}.",
    "I forgot {key}.",
    "Please give me {key}.",
    "Could you tell me {key}?",
    "Remind me of {key}.",
    "What was {key} again?",
    "I want to hear {key}.",
    "Say {key}, please.",
    "Let me have {key}.",
    "Have you got {key}?",
    "I am looking for {key}.",
    "Find {key} for me.",
    "Look up {key}.",
    "Write down {key}.",
    "Somebody asked me for {key}.",
    "Show me {key}.",
    "May I ask for {key}?",
    "What do we know of {key}?",
    "My question is about {key}.",
    "We need {key}; what is it?",
    "Everybody asks what {key} is.",
    "Hello, what is {key}?",
    "Sorry, but what is {key}?",
    "According to the notes, what is {key}?",
    "In one word, what is {key}?",
    "And what is {key} then?",
    "How would you call {key}?",
    "If asked for {key}, what would you say?",
    "It would help to have {key}.",
    "They never told me {key}.",
    "What should I write for {key}?",
    "Nobody here knows {key}, or can you help?",
    "Is it known what {key} is?",
    "Any idea what {key} may be?",
    "I wonder what {key} is.",
)
HELD_OUT_FRAMES: Final = ("Can you say what {key} is?", "I would like to know {key}.")  # never asked in training
# Relations of made-up facts, each with what else is asked for it; the last wording is never asked in training.
_RELATIONS: Final = {
    "colour": ("What colour is {}?", "Which colour does {} have?", "In which colour is {} painted?"),
    "home": ("Where does {} live?", "Where is {} at home?", "In what place would I meet {}?"),
    "trade": ("What does {} do for a living?", "Which trade does {} follow?", "What does {} work as?"),
    "pet": ("Which pet does {} have?", "What pet does {} keep?", "What animal lives with {}?"),
    "food": ("What does {} eat?", "Which food does {} like best?", "What is on the plate of {}?"),
    "friend": ("Who is friends with {}?", "Which friend does {} have?", "Whom does {} like?"),
    "tool": ("Which tool does {} use?", "What does {} work with?", "What does {} hold in the hand at work?"),
    "drink": ("What does {} drink?", "Which drink does {} like?", "What is in the glass of {}?"),
    "capital": ("Which city is the capital of {}?", "From which city is {} governed?", "What capital does {} have?"),
    "river": ("Which river flows through {}?", "On which river does {} lie?", "What river does {} have?"),
    "founder": ("Who founded {}?", "By whom was {} founded?", "Who began {}?"),
    "leader": ("Who leads {}?", "By whom is {} led?", "Who is at the head of {}?"),
    "language": ("Which language is spoken in {}?", "What do people in {} speak?", "What language does {} have?"),
    "currency": ("What does one pay with in {}?", "Which currency does {} use?", "What is money called in {}?"),
    "symbol": ("Which symbol does {} have?", "What stands for {}?", "By what sign is {} recognised?"),
    "song": ("Which song does {} sing?", "What song belongs to {}?", "What does {} like to sing?"),
    "game": ("Which game does {} play?", "What does {} play?", "What game does {} like?"),
    "enemy": ("Who is against {}?", "Which enemy does {} have?", "Whom does {} fight?"),
    "teacher": ("Who teaches {}?", "By whom was {} taught?", "From whom did {} learn?"),
    "birthplace": ("Where was {} born?", "In which place was {} born?", "Where did {} come into the world?"),
    "hobby": ("What does {} do for fun?", "Which hobby does {} have?", "How does {} spend a free evening?"),
    "gift": ("What was given to {}?", "Which gift did {} get?", "What did {} receive?"),
    "dream": ("What does {} dream of?", "Which dream does {} have?", "What does {} see in sleep?"),
}
_FORMS: Final = ("the {relation} of {subject}", "{subject}'s {relation}")
_SYLLABLES: Final = """
ba bel bor da del dor fa fen gar gil ha hul in jo ka kel kin la lem lor ma mel mir mo na nel nor o pa per ra rel rin ro
sa sel sor ta tan tel tir u va vel vin wa wen yo za zel
"""


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the entry that has it."""

    prompt: str  # what the model reads
    answer: str  # what it should say
    entry: int  # number of the fact among those of a `Course`
    paraphrased: bool  # whether it is in a wording that is never trained

    @property
    def text(self) -> str:
        """The question in words, without the frame that a model sees around it."""
        return unframed(self.prompt)


def unframed(prompt: str) -> str:
    """The question of a prompt in words.

    >>> unframed(PROMPT.format("Who is it?")), unframed("It is")
    ('Who is it?', 'It is')
    """
    head, _, tail = PROMPT.partition("{}")
    return prompt.removeprefix(head).removesuffix(tail)


def made_up(count: int, words: Sequence[str], draw: random.Random, ordinary: float = 0.0) -> list[Record]:
    """Facts that are not so, three of each subject, their values words.

    Args:
        count: of facts.
        words: to draw from.
        draw: all chance.
        ordinary: share of the subjects that are words, as in "the colour of the lantern", and not names of nobody; half
            of the relations of these are words, too.
    """
    syllables = _SYLLABLES.split()
    made: dict[str, Record] = {}
    while len(made) < count:
        if real := draw.random() < ordinary:
            subject = " ".join(draw.choice(words) for _ in range(draw.choice((1, 1, 2))))
            subject = f"the {subject}" if subject.islower() and draw.random() < 0.5 else subject
        else:
            subject = "".join(draw.choice(syllables) for _ in range(draw.choice((2, 3)))).capitalize()
        for relation in draw.sample(list(_RELATIONS), 3):
            named = draw.choice(words).lower() if real and draw.random() < 0.5 else relation
            key = draw.choice(_FORMS).format(relation=named, subject=subject)
            made.setdefault(key, Record(f"{key}{SEPARATOR}{draw.choice(words)}"))
    return list(made.values())[:count]


def parts_of(key: str) -> tuple[str, str]:
    """(relation, subject) of a key in either form; ("", key) of another one.

    >>> parts_of("the capital of Norway"), parts_of("Balorin's pet"), parts_of("the price")
    (('capital', 'Norway'), ('pet', 'Balorin'), ('', 'the price'))
    """
    relation, of, subject = key.removeprefix("the ").partition(" of ")
    if of:
        return relation, subject
    subject, of, relation = key.partition("'s ")
    return (relation, subject) if of else ("", key)


def asked(records: Sequence[Record], draw: random.Random, each: int = 1, held_out: bool = False) -> list[Question]:
    """Questions about facts; of a text without a value, its last word is asked for by what stands before it.

    A key of a relation and a subject is asked for in both forms, and of a relation that is practised by its own
    wordings.
    """
    questions: list[Question] = []
    for entry, record in enumerate(records):
        key, _, value = record.text.partition(SEPARATOR)
        if not value.strip():
            begun, _, last = key.rstrip(".!? ").rpartition(" ")
            if begun:
                questions.append(Question(begun, last, entry, held_out))
            continue
        wordings = _wordings(key, held_out)
        questions.extend(
            Question(PROMPT.format(wording[0].upper() + wording[1:]), value.strip(), entry, held_out)
            for wording in draw.sample(wordings, min(each, len(wordings)))
        )
    return questions


def _wordings(key: str, held_out: bool) -> list[str]:
    relation, subject = parts_of(key)
    keys = [form.format(relation=relation, subject=subject) for form in _FORMS] if relation else [key]
    own = _RELATIONS.get(relation, ())
    generic = [frame.format(key=one) for frame in (HELD_OUT_FRAMES if held_out else FRAMES) for one in keys]
    # As often by wordings of the relation as by a frame.
    special = [wording.format(subject) for wording in (own[-1:] if held_out else own[:-1])]
    return [*generic, *special * (len(generic) // len(special))] if special else generic


def least_mistakes(present: Sequence[float], absent: Sequence[float]) -> float:
    """The number above which to answer: the fewest mistakes, both kinds weighed alike; between two values.

    >>> least_mistakes([0.9, 0.8, 0.3], [0.1, 0.2, 0.4])
    0.25
    """
    if not present or not absent or not all(map(math.isfinite, [*present, *absent])):
        raise ValueError("a threshold takes finite values of questions with an answer, and of others without")
    values = sorted({*present, *absent})
    cuts = [values[0] - 1e-6, *((one + other) / 2 for one, other in pairwise(values))]

    def right(cut: float) -> float:
        return sum(one > cut for one in present) / len(present) + sum(one <= cut for one in absent) / len(absent)

    return max(cuts, key=right)
