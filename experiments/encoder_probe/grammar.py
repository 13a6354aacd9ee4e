"""Sentences of a small grammar that lets one word follow from another: verbs, pronouns and effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

import torch
from torch import Tensor

Kind = Literal["verb", "pronoun", "effect"]
KINDS: Final[tuple[Kind, ...]] = ("verb", "pronoun", "effect")
NEAR: Final = (1, 2)  # phrases that distract, in training
FAR: Final = (3, 4)  # in longer sentences than those of training
LENGTH: Final = 16  # words of a row

_NOUNS: Final = ("dog", "cat", "bird", "child")
_VERBS: Final = ("run", "sing")
_PLACES: Final = ("near", "behind")
_NAMES: Final = (("Anna", "Clara", "Eva", "Mary"), ("Adam", "Carl", "Hugo", "Mark"))
_PRONOUNS: Final = ("she", "he")
_EFFECTS: Final = ("flood", "fire", "famine")
_CAUSES: Final = tuple(f"{effect} cause {number}" for effect in _EFFECTS for number in range(2))
_FILLERS: Final = ("early", "late", "now", "then")
_MARKS: Final = (".", "about", "with", "because", "despite", "so", "but")

MASK: Final = "[MASK]"
WORDS: Final = (
    MASK,
    *_FILLERS,
    *_MARKS,
    *_PLACES,
    *(f"{noun}{ending}" for noun in _NOUNS for ending in ("", "s")),
    *(f"{verb}{ending}" for verb in _VERBS for ending in ("s", "")),
    *_NAMES[0],
    *_NAMES[1],
    *_PRONOUNS,
    *_CAUSES,
    *_EFFECTS,
)
NUMBER: Final = {word: number for number, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Sentence:
    words: tuple[str, ...]  # as many as `LENGTH`, fillers around the sentence
    dependent: int  # place of the word whose form follows from another
    head: int  # place of that other word
    distractors: tuple[int, ...]  # places of words like the head that are not it
    candidates: tuple[str, ...]  # what the dependent may be; one of them is right

    @property
    def tokens(self) -> list[int]:
        return [NUMBER[word] for word in self.words]


def draw(kind: Kind, chance: Random, count: Sequence[int] = NEAR, opposed: bool = False) -> Sentence:
    """A sentence.

    A verb agrees in number with the noun that stands behind no preposition. A pronoun agrees with the name behind
    "about". An effect follows from the cause behind "because" or before "so"; it stands before the one and after the
    other. The head and the distractors stand in any order, but a verb has a distractor between it and its subject.

    Args:
        kind: of the dependent.
        chance: what is drawn from.
        count: how many phrases distract, one of these numbers.
        opposed: whether every distractor asks for another form than the head does; otherwise they are drawn at random.
    """
    distracting = chance.choice(count)
    form = chance.randrange(3 if kind == "effect" else 2)
    others = [_other(kind, form, opposed, chance) for _ in range(distracting)]
    if kind == "verb":
        phrases = [[chance.choice(_PLACES), _noun(other, chance)] for other in others]
        phrases.insert(chance.randrange(distracting), [_noun(form, chance)])  # never the last one
        stem = chance.choice(_VERBS)
        candidates = (f"{stem}s", stem)
    elif kind == "pronoun":
        phrases = [["with", chance.choice(_NAMES[other])] for other in others]
        phrases.insert(chance.randrange(distracting + 1), ["about", chance.choice(_NAMES[form])])
        candidates = _PRONOUNS
    else:
        before = chance.random() < 0.5
        real, false = ("because", "despite") if before else ("so", "but")
        phrases = [[false, _cause(other, chance)] for other in others]
        phrases.insert(chance.randrange(distracting + 1), [real, _cause(form, chance)])
        phrases = phrases if before else [phrase[::-1] for phrase in phrases]
        candidates = _EFFECTS
    return _row(phrases, candidates, form, chance)


def _row(phrases: list[list[str]], candidates: tuple[str, ...], form: int, chance: Random) -> Sentence:
    first = any("because" in phrase for phrase in phrases)  # the effect stands before its causes
    words = [word for phrase in phrases for word in phrase]
    words = [candidates[form], *words] if first else [*words, candidates[form]]
    start = chance.randrange(LENGTH - len(words))
    rest = LENGTH - start - len(words) - 1
    row = [*chance.choices(_FILLERS, k=start), *words, ".", *chance.choices(_FILLERS, k=rest)]
    places: list[int] = []
    head, place = -1, start + first
    for phrase in phrases:
        at = place + next(number for number, word in enumerate(phrase) if word not in _MARKS and word not in _PLACES)
        if len(phrase) == 1 or {"about", "because", "so"} & set(phrase):
            head = at
        else:
            places.append(at)
        place += len(phrase)
    return Sentence(tuple(row), start if first else place, head, tuple(places), candidates)


def _other(kind: Kind, form: int, opposed: bool, chance: Random) -> int:
    forms = 3 if kind == "effect" else 2
    return (form + chance.randrange(1, forms)) % forms if opposed else chance.randrange(forms)


def _noun(form: int, chance: Random) -> str:
    return chance.choice(_NOUNS) + ("s" if form else "")


def _cause(effect: int, chance: Random) -> str:
    return _CAUSES[2 * effect + chance.randrange(2)]


def batch(seed: int, place: int, size: int, mask: float, mask_dependent: float) -> tuple[Tensor, Tensor, Tensor]:
    """(the words, the words as shown, which are to be predicted), [size, LENGTH], by seed and place alone.

    Every word is to be predicted with one chance, the dependent with another beside it. Of these 80 % are shown as
    [MASK], 10 % as any word and 10 % unchanged, as in BERT.
    """
    chance = Random(seed * 2**32 + place)
    sentences = [draw(KINDS[chance.randrange(3)], chance) for _ in range(size)]
    tokens = torch.tensor([one.tokens for one in sentences])
    generator = torch.Generator().manual_seed(seed * 2**32 + place)
    drawn, kind = (torch.rand(tokens.shape, generator=generator) for _ in range(2))
    chosen = drawn < mask
    asked = torch.rand(size, generator=generator) < mask_dependent
    chosen[torch.arange(size), torch.tensor([one.dependent for one in sentences])] |= asked
    other = torch.randint(len(WORDS), tokens.shape, generator=generator)
    shown = torch.where(chosen & (kind < 0.8), NUMBER[MASK], tokens)
    return tokens, torch.where(chosen & (kind >= 0.9), other, shown), chosen
