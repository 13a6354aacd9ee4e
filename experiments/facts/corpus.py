"""Made-up facts and questions about them, too many for any model to know by heart."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Final

RELATIONS: Final = (
    ("colour", "hue", "shade"),
    ("home", "town", "residence"),
    ("trade", "job", "profession"),
    ("pet", "animal", "companion"),
    ("food", "dish", "meal"),
    ("friend", "ally", "mate"),
    ("tool", "instrument", "device"),
    ("drink", "beverage", "tipple"),
)
KEY: Final = "the {relation} of {subject}"
FRAMES: Final = (
    "what is the {relation} of {subject} ?",
    "tell me the {relation} of {subject} .",
    "{subject} 's {relation} is",
    "which {relation} does {subject} have ?",
    "for {subject} , name the {relation} .",
    "the {relation} of {subject} is",
    "does {subject} have a {relation} ? name it .",
    "name {subject} 's {relation} .",
)
# Never asked like this in training, though every word is known.
HELD_OUT_FRAMES: Final = (
    "tell me {subject} 's {relation} .",
    "the {relation} {subject} does have is",
    "of {subject} , what is the {relation} ?",
)
UNKNOWN: Final = "unknown"
_HELD_OUT: Final = 8  # one subject in so many is kept for evaluation

_FIRST: Final = tuple("".join(pair) for pair in product("BDFGKLMN", "aeio"))
_MIDDLE: Final = tuple("".join(pair) for pair in product("bdglmrst", "aiou"))
_LAST: Final = tuple("".join(triple) for triple in product("dklmnrtv", "aeiu", "n"))
_VALUE_WORDS: Final = """
amber ancient bent black blue bold brass brief bright broad broken brown calm clear clever cold copper curved
damp dark deep double dry dusty early empty faint fast fine flat frozen gentle golden grand green grey heavy
hidden hollow huge iron keen large late light little lone long loud narrow new northern odd old pale plain proud
quick quiet red round rusty sharp short silent silver
|
anchor apple arch arrow badger barley barn basket beacon bell birch bottle bridge brook bucket button cabin
candle canyon carpet castle cedar chain chalk cherry cider clock cloud coal comet coral cottage crane crow crown
dagger daisy desert dove drum eagle ember falcon feather fern fiddle field flute forest forge fox garden gate
ginger glove goat goose granite grape hammer harbour harp hawk hazel hill honey horse island ivory ivy jackal
juniper kettle kite ladder lake lamp lantern lemon lily linen lion loom lotus lynx magnet maple marble meadow
melon mill mint mirror moth mountain needle nettle nutmeg oak olive onion orchard otter owl paddle pearl pepper
pigeon pine plum pony poppy quarry quartz quilt rabbit raven reed ribbon river robin rope saddle sail salmon
sparrow
"""
_ADJECTIVES, _NOUNS = (part.split() for part in _VALUE_WORDS.split("|"))


@dataclass(frozen=True)
class Key:
    """What a fact is about: a subject, three syllables, and one of the relations."""

    first: int
    middle: int
    last: int
    relation: int

    @property
    def subject(self) -> str:
        """The name of the subject, such as "Balorin"."""
        return _FIRST[self.first] + _MIDDLE[self.middle] + _LAST[self.last]

    @property
    def syllables(self) -> tuple[int, int, int]:
        return self.first, self.middle, self.last


@dataclass(frozen=True)
class Fact:
    key: Key  # what it is about
    text: str  # the key in words, as it is written into a store
    value: str  # of it

    @property
    def sentence(self) -> str:
        return f"{self.text} is {self.value}"


def wording(frame: str, key: Key, relation: str) -> str:
    return frame.format(subject=key.subject, relation=relation)


@dataclass
class Corpus:
    """Draws facts and questions.

    The subjects are split once, by chance with a fixed seed: those of `held_out=True` never occur in training. Every
    syllable does.

    >>> corpus = Corpus(random.Random(0), held_out=True)
    >>> fact = corpus.facts(1, near=0.0)[0]
    >>> fact.text, fact.value
    ('the drink of Lelinin', 'lamp')
    """

    draw: random.Random  # the source of chance
    held_out: bool = False  # which subjects it draws
    _reserved: frozenset[tuple[int, int, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reserved = reserved()

    def key(self) -> Key:
        while True:
            parts = (len(_FIRST), len(_MIDDLE), len(_LAST), len(RELATIONS))
            made = Key(*(self.draw.randrange(size) for size in parts))
            if self._mine(made):
                return made

    def near(self, key: Key) -> Key:
        """A key that shares all but one of its parts with another: one syllable or the relation differs."""
        while True:
            parts = [key.first, key.middle, key.last, key.relation]
            place = self.draw.randrange(4)
            parts[place] = self.draw.randrange((len(_FIRST), len(_MIDDLE), len(_LAST), len(RELATIONS))[place])
            made = Key(*parts)
            if made != key and self._mine(made):
                return made

    def value(self, other_than: str | None = None) -> str:
        while True:
            noun = self.draw.choice(_NOUNS)
            made = f"{self.draw.choice(_ADJECTIVES)} {noun}" if self.draw.random() < 0.5 else noun
            if made != other_than:
                return made

    def keys(self, count: int, near: float, besides: Collection[Key] = ()) -> list[Key]:
        """Different keys, none of them in `besides`; about the fraction `near` is near to another one of both."""
        taken, others, made = set(besides), list(besides), list[Key]()
        while len(made) < count:
            key = self.near(self.draw.choice(others)) if others and self.draw.random() < near else self.key()
            if key not in taken:
                taken.add(key)
                others.append(key)
                made.append(key)
        return made

    def facts(self, count: int, near: float, besides: Collection[Key] = ()) -> list[Fact]:
        """Facts with different keys, see `keys`."""
        return [Fact(key, self.key_text(key), self.value()) for key in self.keys(count, near, besides)]

    def key_text(self, key: Key) -> str:
        """The key in any of its wordings, as a user would write it into a store."""
        return wording(KEY, key, self.draw.choice(RELATIONS[key.relation]))

    def question(self, key: Key, frames: Sequence[str] = FRAMES) -> str:
        return wording(self.draw.choice(frames), key, self.draw.choice(RELATIONS[key.relation]))

    def _mine(self, key: Key) -> bool:
        return (key.syllables in self._reserved) == self.held_out


@cache
def reserved() -> frozenset[tuple[int, int, int]]:
    every = list(product(range(len(_FIRST)), range(len(_MIDDLE)), range(len(_LAST))))
    return frozenset(random.Random(0).sample(every, len(every) // _HELD_OUT))


class Vocabulary:
    """Words as tokens; a name is three.

    Attributes:
        words: of each token.
    """

    PADDING: Final = 0

    def __init__(self) -> None:
        frames = " ".join((*FRAMES, *HELD_OUT_FRAMES, KEY)).split()
        plain = sorted({word for word in frames if "{" not in word} | {name for names in RELATIONS for name in names})
        parts = [*_FIRST, *(f"-{part}" for part in _MIDDLE), *(f"-{part}" for part in _LAST)]
        self.words = ["<padding>", "<fact>", "<answer>", "<end>", UNKNOWN, *plain, *parts, *_ADJECTIVES, *_NOUNS]
        self._ids = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text.

        >>> vocabulary = Vocabulary()
        >>> [vocabulary.words[token] for token in vocabulary.encode("the drink of Lelinin")]
        ['the', 'drink', 'of', 'Le', '-li', '-nin']
        """
        found: list[int] = []
        for word in text.split():
            parts = [word] if word in self._ids else [word[:2], f"-{word[2:4]}", f"-{word[4:]}"]
            unknown = next((part for part in parts if part not in self._ids), None)
            if unknown is not None:
                raise ValueError(f"{word!r} is not a word of this corpus")
            found += [self._ids[part] for part in parts]
        return found
