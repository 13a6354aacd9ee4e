"""A store of facts and the questions about them, before and after it is edited."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from attnflow.knowledge.store import Store
from attnflow.knowledge.store.source import EntrySource
from experiments.facts.corpus import FRAMES, HELD_OUT_FRAMES, UNKNOWN, Corpus, Fact, Key
from experiments.facts.training import Trained

GROUPS: Final = ("untouched", "corrected", "deleted", "inserted")
WORDINGS: Final = {"trained": FRAMES, "paraphrased": HELD_OUT_FRAMES}
_ENCODER: Final = "facts"


class World:
    """A store in a directory, with facts about subjects that training never saw.

    Attributes:
        questions: wording -> questions about all groups of facts, group by group.
        reader: the language model.
        store: of entries.
        knowledge: the store as the model reads it.

    Args:
        trained: the language model and the encoder.
        folder: for the store.
        size: facts in it before the edits.
        each: facts of each group: corrected, deleted, inserted; and as many untouched that are asked for.
        near: see `Corpus.keys`.
        draw: source of chance.
    """

    def __init__(self, trained: Trained, folder: Path, size: int, each: int, near: float, draw: random.Random) -> None:
        self.reader, self._encoder = trained.reader, trained.encoder
        corpus = Corpus(draw, held_out=True)
        facts = corpus.facts(size, near)
        inserted = corpus.facts(each, near, [fact.key for fact in facts])
        parts = [facts[start * each : (start + 1) * each] for start in range(len(GROUPS) - 1)]
        self._groups = dict(zip(GROUPS, (*parts, inserted), strict=True))
        self._new = [Fact(fact.key, fact.text, corpus.value(fact.value)) for fact in self._groups["corrected"]]
        self._keys = [fact.key for group in GROUPS for fact in self._groups[group]]
        self.questions = {
            wording: [corpus.question(key, frames) for key in self._keys] for wording, frames in WORDINGS.items()
        }
        columns = self._thresholds(torch.zeros(1, self._encoder.entry_dim)).shape[1]
        self.store = Store.open(folder, dim=self._encoder.entry_dim, num_thresholds=columns)
        self.knowledge = EntrySource(self.store, self._thresholds)
        self._ids: dict[Key, int] = {}
        self._insert(facts)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()

    def edit(self) -> None:
        """Correct, delete and insert, each in one call to the store; nothing is trained."""
        rows = self._entries(self._new)
        self.store.upsert(
            ids=[self._ids[fact.key] for fact in self._new],
            embeddings=rows,
            thresholds=self.knowledge.thresholds(rows),
            texts=[fact.sentence for fact in self._new],
            encoder=_ENCODER,
        )
        self.store.delete([self._ids.pop(fact.key) for fact in self._groups["deleted"]])
        self._insert(self._groups["inserted"])

    def truth(self, phase: str) -> list[str]:
        """The right answer to each question, "before" or "after" the edits."""
        facts = self._groups if phase == "before" else {**self._groups, "corrected": self._new}
        absent = "inserted" if phase == "before" else "deleted"
        return [UNKNOWN if group == absent else fact.value for group in GROUPS for fact in facts[group]]

    def nearest(self, questions: Sequence[str], count: int) -> list[list[str]]:
        """For each question the sentences of the facts whose keys the encoder places nearest, the nearest last."""
        return self._sentences(self._search(questions, count).flip(1))

    def scores(self, questions: Sequence[str]) -> Float[Tensor, " questions"]:
        """Inner product of each question with the nearest key."""
        with torch.no_grad():
            return self.store.search(self._encoder.query(questions), 1).scores[:, 0]

    def oracle(self, questions: Sequence[str]) -> list[list[str]]:
        """For each question the sentence of the fact that it asks for, if there is one, and else the nearest."""
        keys = dict(
            zip((each for one in self.questions.values() for each in one), self._keys * len(WORDINGS), strict=True)
        )
        found = self._search(questions, 1)
        for row, question in enumerate(questions):
            found[row, 0] = self._ids.get(keys[question], int(found[row, 0]))
        return self._sentences(found)

    def recall(self, wording: str, count: int) -> float:
        """How often the fact that is asked for is among the nearest, of the facts that are in the store now."""
        there = [row for row, key in enumerate(self._keys) if key in self._ids]
        found = self._search([self.questions[wording][row] for row in there], count)
        ids = torch.tensor([self._ids[self._keys[row]] for row in there])
        return float((found == ids[:, None]).any(dim=1).float().mean())

    def shuffled(self) -> Float[Tensor, "entries entry_dim"]:
        """All entries, each with the value of the one before it."""
        key, value = self.store.vectors().chunk(2, dim=1)
        return torch.cat([key, value.roll(1, dims=0)], dim=1)

    def _insert(self, facts: Sequence[Fact]) -> None:
        texts = [fact.sentence for fact in facts]
        rows, columns = self._entries(facts), self.knowledge.thresholds
        ids = self.store.insert(embeddings=rows, thresholds=columns(rows), texts=texts, encoder=_ENCODER)
        self._ids.update(zip((fact.key for fact in facts), ids.tolist(), strict=True))

    @torch.no_grad()
    def _entries(self, facts: Sequence[Fact]) -> Tensor:
        return self._encoder([fact.text for fact in facts], [fact.value for fact in facts])

    def _thresholds(self, entries: Tensor) -> Tensor:
        return torch.cat([reader.threshold_columns(entries) for reader in self.reader.model.readers()], dim=1)

    def _search(self, questions: Sequence[str], count: int) -> Tensor:
        with torch.no_grad():
            return self.store.search(self._encoder.query(questions), count).ids

    def _sentences(self, ids: Tensor) -> list[list[str]]:
        texts = {entry.id: str(entry.text) for entry in self.store.get(ids.unique())}
        return [[texts[one] for one in row] for row in ids.tolist()]
