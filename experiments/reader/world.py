"""Facts of a seed: made-up and public ones, what an edit does to each, the questions about them, and stores of them."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from attnflow.knowledge.store import Store
from experiments.reader.halves import Halves
from experiments.reader.questions import FRAMES, HELD_OUT_FRAMES, PROMPT, made_up, parts_of
from experiments.reader.records import SEPARATOR, Record

PUBLIC: Final = Path(__file__).with_name("public.csv")
KINDS: Final = ("made up", "public")
GROUPS: Final = ("untouched", "corrected", "inserted", "deleted", "never there")
ABSENT: Final = ("deleted", "never there")  # after the edits
WORDINGS: Final = ("trained", "paraphrased")


@dataclass(frozen=True)
class Item:
    kind: str  # one of `KINDS`
    group: str  # one of `GROUPS`
    key: str  # what is asked for, "the capital of Norway"
    before: str | None  # its value in the store before the edits; None if it is not there
    after: str | None  # likewise afterwards

    @property
    def subject(self) -> str:
        return parts_of(self.key)[1]


@dataclass(frozen=True)
class Asked:
    item: Item  # that it asks for
    wording: str  # one of `WORDINGS`
    text: str  # in words, which the store is searched with
    entry: int | None  # id of its fact in the store, or None

    @property
    def prompt(self) -> str:
        return PROMPT.format(self.text)


def sentence(text: str) -> str:
    """A fact "key<tab>value" as it stands in a context."""
    key, _, value = text.partition(SEPARATOR)
    return f"{key[0].upper()}{key[1:]} is {value}."


@cache
def public_facts() -> tuple[tuple[str, str, str], ...]:
    """(relation, key, value) of countries and elements."""
    with PUBLIC.open(encoding="utf-8", newline="") as file:
        return tuple(
            (row["relation"], f"the {row['relation']} of {row['subject']}", row["value"])
            for row in csv.DictReader(file)
        )


class World:
    """The facts of a seed; stores of all sizes hold the same ones that are asked for, among ever more others.

    Args:
        seed: all chance follows from it.
        group: facts of each kind in each group.
        most: facts of the largest store.
        words: values of made-up facts.
        practised: keys that training has seen, of which none is asked for.
    """

    def __init__(self, seed: int, group: int, most: int, words: Sequence[str], practised: Iterable[str] = ()) -> None:
        draw = random.Random(f"reader {seed}")
        seen, fresh = {parts_of(key) for key in practised}, list[tuple[str, str, str]]()
        for one in made_up(2 * most + 60 * group, words, draw):  # some are of training, or twice there in two forms
            key, _, value = one.text.partition(SEPARATOR)
            if parts_of(key) not in seen:
                seen.add(parts_of(key))
                fresh.append((parts_of(key)[0], key, value))
        public = list(public_facts())
        draw.shuffle(public)
        count, self.items = group * len(GROUPS), list[Item]()
        for kind, facts in (("made up", fresh[:count]), ("public", public[:count])):
            if len(facts) < count:
                raise ValueError(f"{count} facts are asked for, and there are {len(facts)} {kind} ones")
            for place, (relation, key, value) in enumerate(facts):
                name = GROUPS[place // group]
                others = [v for r, _, v in public if r == relation and v != value] if kind == "public" else words
                other = draw.choice([one for one in others if one != value])
                before = None if name in ("inserted", "never there") else value
                after = None if name in ABSENT else other if name == "corrected" else value
                self.items.append(Item(kind, name, key, before, after))
        self.filler = [Record(f"{key}{SEPARATOR}{value}") for _, key, value in fresh[count:]]
        self._draw = draw.random()

    def questions(self, ids: dict[str, int]) -> list[Asked]:
        """About every item, once in a trained wording and once in a paraphrased one."""
        draw, asked = random.Random(self._draw), list[Asked]()
        for item in self.items:
            for wording, frames in zip(WORDINGS, (FRAMES, HELD_OUT_FRAMES), strict=True):
                text = draw.choice(frames).format(key=item.key)
                asked.append(Asked(item, wording, text[0].upper() + text[1:], ids.get(item.key)))
        return asked

    def records(self, size: int) -> list[Record]:
        mine = [Record(f"{one.key}{SEPARATOR}{one.before}") for one in self.items if one.before is not None]
        if size < len(mine) or size > len(mine) + len(self.filler):
            raise ValueError(f"a store must hold {len(mine)} to {len(mine) + len(self.filler)} facts, not {size}")
        return [*mine, *self.filler[: size - len(mine)]]


class Embedded:
    def __init__(self, encoder: Halves) -> None:
        self.encoder, self.version = encoder, encoder.version
        self._rows: dict[str, Tensor] = {}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        new = [text for text in dict.fromkeys(texts) if text not in self._rows]
        if new:
            self._rows.update(zip(new, self.encoder.encode(new)[0], strict=True))
        return torch.stack([self._rows[text] for text in texts])

    def queries(self, questions: Sequence[str]) -> Tensor:
        """What a store is searched with: embeddings of keys, values 0."""
        return torch.stack([self.encoder.query(question) for question in questions])

    def store(self, records: Sequence[Record]) -> Store:
        """A store in memory, of facts by their places."""
        store = Store.open("memory", dim=self.encoder.dim)
        texts = [one.text for one in records]
        store.insert(embeddings=self(texts), ids=list(range(len(texts))), texts=texts, encoder=self.version)
        return store


def edit_store(store: Store, world: World, embedded: Embedded) -> dict[str, int]:
    """Correct, delete and insert, each in one call; returns the ids of the items that are there now, by key."""
    held = [one for one in world.items if one.before is not None]
    ids = {one.key: place for place, one in enumerate(held)}
    correct = [one for one in held if one.group == "corrected"]
    texts = [f"{one.key}{SEPARATOR}{one.after}" for one in correct]
    store.upsert(
        ids=[ids[one.key] for one in correct], embeddings=embedded(texts), texts=texts, encoder=embedded.version
    )
    store.delete([ids.pop(one.key) for one in held if one.group == "deleted"])
    new = [one for one in world.items if one.group == "inserted"]
    texts = [f"{one.key}{SEPARATOR}{one.after}" for one in new]
    added = store.insert(embeddings=embedded(texts), texts=texts, encoder=embedded.version)
    return ids | dict(zip((one.key for one in new), added.tolist(), strict=True))
