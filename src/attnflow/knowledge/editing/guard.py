"""Finds what an edit must leave as it is, without being told: other statements about its subject and its relation.

An edit adds something at the last token of its subject, wherever that token's hidden state is like those at its
prompts. Two kinds of prompts are like them, and both were damaged by edits that guarded neither (of 16 facts about the
subjects of ten edits, 5 survived):

- *about*: other statements on the same subject. `TEMPLATES` are filled with it, and the model says which of them state
  the edited fact: those to which it gives the answer that it gives to the fact's prompt are *rewordings*, at which the
  edit holds, too, if they also share a word with the prompt. Those that may state it, or another edited fact about the
  subject, are left alone. Of the rest, those count whose next token tells most about the subject (the divergence from
  that of the nearest other subject).
- *beside*: the fact's own prompt about other subjects, whose input embeddings are nearest to the subject's.

Every second prompt of both kinds is held by the edit; the others are kept for measuring it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.knowledge.editing.edit_targets import longest, run, token_ids
from attnflow.knowledge.editing.facts import Fact
from attnflow.models.subject import Subject

TEMPLATES: Final = (
    "{} is a", "{} is located in", "{} was born in", "{} is known for", "The capital city of {} is",
    "The currency of {} is", "The language of {} is", "In {}, people speak", "The continent of {} is",
    "The largest city in {} is", "The president of {} is", "People from {} are called", "The main religion in {} is",
    "The river that flows through {} is", "The profession of {} is", "{} is a citizen of", "{} died in",
    "The mother of {} is", "{} was founded by", "The headquarters of {} are in", "The products of {} are",
    "{} was written by", "The color of {} is", "{} is made of", "{} is used to", "A young {} is called a",
    "The symbol of {} is", "The word {} means", "The opposite of {} is", "What is the opposite of {}? It is",
    "A synonym of {} is", "Something that is {} is", "The French word for {} is", "The plural of {} is",
    "The inventor of {} is", "{} was invented by",
)  # fmt: skip
SUBJECTS: Final = (
    "France", "Germany", "Italy", "Spain", "Portugal", "England", "Ireland", "Norway", "Sweden", "Denmark", "Finland",
    "Poland", "Austria", "Hungary", "Greece", "Turkey", "Russia", "Ukraine", "China", "Japan", "Korea", "India",
    "Iran", "Israel", "Egypt", "Kenya", "Nigeria", "Cuba", "Mexico", "Brazil", "Chile", "Peru", "Argentina", "Canada",
    "Australia", "London", "Paris", "Berlin", "Rome", "Madrid", "Moscow", "Tokyo", "Beijing", "Chicago", "Boston",
    "California", "Texas", "Albert Einstein", "Isaac Newton", "Charles Darwin", "Marie Curie", "Mozart", "Bach",
    "Picasso", "Shakespeare", "Napoleon", "Lincoln", "Obama", "Michael Jordan", "Steve Jobs", "Elvis Presley",
    "Google", "Apple", "Microsoft", "Amazon", "Toyota", "Sony", "Ford", "Nike", "Intel", "Facebook", "dog", "cat",
    "horse", "cow", "sheep", "bird", "fish", "lion", "iron", "gold", "water", "oxygen", "sugar", "hot", "cold", "big",
    "small", "good", "bad", "fast", "slow", "high", "low", "rich", "poor", "young", "old", "wet", "dry", "light",
    "dark", "happy", "sad", "up", "down", "left", "right", "black", "white", "red", "green", "hard", "soft", "strong",
    "weak",
)  # fmt: skip
_SAME: Final = 0.05  # probability of the fact's present answer from which a template may state the fact itself
_TINY: Final = 1e-9
_ABOUT: Final = 16  # statements about the subject: half of them held, half measured
_BESIDE: Final = 16  # other subjects, likewise


@dataclass(frozen=True)
class EditGuard:
    """What is held and what is measured for one fact: prompts that end where the model goes on."""

    rewordings: tuple[str, ...]  # templates that state the fact, as the model's present answers show
    about: tuple[str, ...]
    beside: tuple[str, ...]
    about_measured: tuple[str, ...]
    beside_measured: tuple[str, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """Those that are held and those that are measured."""
        return self.about + self.beside + self.about_measured + self.beside_measured


NO_GUARD: Final = EditGuard((), (), (), (), ())


@torch.no_grad()
def likely(subject: Subject, prompts: Sequence[str]) -> Tensor:
    """Compute the probabilities of the token after each prompt, [prompts, vocabulary], in one pass, in float32."""
    if not prompts:
        return torch.zeros(0, 1)
    rows = [token_ids(subject.tokenizer, prompt) for prompt in prompts]
    logits: Tensor = run(subject, rows).logits
    last = torch.tensor([len(row) - 1 for row in rows], device=logits.device)
    return logits[torch.arange(len(rows)), last].float().softmax(dim=-1)


def guard_of(subject: Subject, fact: Fact, edited: Sequence[Fact]) -> EditGuard:
    """Find what an edit of `fact` must leave as it is, among `edited` facts; none without a subject."""
    limit = longest(subject)

    def fits(text: str) -> bool:
        return limit is None or len(token_ids(subject.tokenizer, text)) <= limit

    mine = [fact, *(other for other in edited if other.subject == fact.subject and other != fact)]
    names = [
        name
        for name in (_nearest(subject, fact.subject) if fact.subject else ())
        if all(fits(other.prompt.replace(fact.subject, name)) for other in mine)
    ]
    templates = [
        text for text in TEMPLATES if names and fits(text.format(fact.subject)) and fits(text.format(names[0]))
    ]
    if not templates:
        return NO_GUARD
    here, there = (
        likely(subject, [text.replace(fact.subject, name) for text in (other.prompt for other in mine)]
               + [template.format(name) for template in templates])
        for name in (fact.subject, names[0])
    )  # fmt: skip
    said, elsewhere, count = here.argmax(dim=-1), there.argmax(dim=-1), len(mine)
    # An answer that the nearest other subject shares says nothing of the subject, as " the" after "is".
    telling = said[:count] != elsewhere[:count]
    states = ((here[count:, said[:count]] > _SAME) & telling).any(dim=1)
    restates = telling[0] & (said[count:] == said[0]) & (elsewhere[count:] != said[0])
    apart = (here * (here.clamp_min(_TINY).log() - there.clamp_min(_TINY).log())).sum(dim=-1)[count:]
    known = {prompt for other in edited for prompt in other.prompts}
    rewordings, about = list[str](), list[str]()
    for index in apart.argsort(descending=True, stable=True).tolist():
        words, prompt = _words(templates[index]), templates[index].format(fact.subject)
        if prompt in known:
            continue
        if words & _words(fact.prompt) and restates[index]:
            rewordings.append(prompt)
        elif not states[index] and not any(words & _words(other.prompt) for other in mine):
            about.append(prompt)
    prompts = [fact.prompt.replace(fact.subject, name) for name in names]
    about, beside = about[:_ABOUT], [prompt for prompt in prompts if prompt not in known][:_BESIDE]
    return EditGuard(tuple(rewordings), tuple(about[::2]), tuple(beside[::2]), tuple(about[1::2]), tuple(beside[1::2]))


def _words(text: str) -> set[str]:
    """Split a text into its words of five letters or more, which say what it is about."""
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 4}


def _nearest(subject: Subject, name: str) -> list[str]:
    """Sort `SUBJECTS` by the cosine of their tokens' mean input embeddings with those of the name, nearest first."""
    table = cast(Any, subject.model).get_input_embeddings().weight.detach()
    means = torch.stack(
        [table[token_ids(subject.tokenizer, text, answer=True)].float().mean(dim=0) for text in (name, *SUBJECTS)]
    )
    cosines = torch.nn.functional.cosine_similarity(means[1:], means[:1])
    ranked = [SUBJECTS[index] for index in cosines.argsort(descending=True, stable=True).tolist()]
    return [other for other in ranked if other.lower() not in name.lower()]
