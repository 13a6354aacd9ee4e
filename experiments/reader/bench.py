"""What the jobs of one seed share: the model, the facts, stores of them, and what is measured of every way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow.knowledge import attach
from attnflow.knowledge.editing.edit_targets import token_ids
from attnflow.knowledge.store import Store
from attnflow.models import load_model, sample_text
from attnflow.models.subject import Loaded
from experiments.knowledge_ablation.facts import Fact, known_facts
from experiments.reader.asking import OTHER, While, drift, timed
from experiments.reader.halves import Halves
from experiments.reader.practice import Practice, Settings, practice
from experiments.reader.questions import PROMPT
from experiments.reader.records import SEPARATOR, Record
from experiments.reader.settings import Reading
from experiments.reader.world import Asked, Embedded, World, edit_store

# Facts of the store that the reader is fitted with; it is tied to the encoder, not to them.
OWN: Final = [Record(f"the {one}{SEPARATOR}{other}") for one, other in (
    ("colour of coal", "black"), ("colour of snow", "white"), ("taste of sugar", "sweet"), ("taste of lemons", "sour"),
)]  # fmt: skip


class Bench:
    """What all jobs of one seed take: the model, the facts, and what the model says of others."""

    def __init__(self, config: Reading, seed: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config, self.seed = config, seed
        self.embedded = Embedded(self.encoder)
        self.loaded: Loaded = load_model(config.model, dtype="float32", device=device)
        self.model, self.tokenizer = cast(nn.Module, self.loaded.model), cast(Any, self.loaded.tokenizer)

    def begin(self) -> None:
        """Another job: no embedding of an earlier one is taken, since rounding depends on what is embedded together."""
        self.embedded = Embedded(self.encoder)

    @cached_property
    def encoder(self) -> Halves:
        return Halves(self.config.encoder)

    @cached_property
    def practised(self) -> Practice:
        """What the fit of the seed practises on; nothing of it is asked for afterwards."""
        config = self.config
        settings = Settings(config.facts, config.reading_steps, config.steps, self.seed, "records", "")
        return practice(self.tokenizer, OWN, settings)

    @cached_property
    def world(self) -> World:
        keys = (one.text.partition(SEPARATOR)[0] for one in self.practised.records)
        return World(self.seed, self.config.group, max(self.config.sizes), self.practised.words, keys)

    @cached_property
    def known(self) -> list[Fact]:
        return known_facts(self.model, self.tokenizer, OTHER)

    @cached_property
    def text(self) -> Tensor:
        """Other text, [1, tokens]."""
        return torch.tensor([token_ids(self.tokenizer, sample_text("hamlet"))[: self.config.text_tokens]])

    def choosing(self) -> tuple[list[str], list[str], list[Record]]:
        """For thresholds: questions (in words) about facts of a store, others about facts not in it, and its facts.

        All are the fit's: the questions those that it held out, so that nothing of the test chooses.
        """
        count, size = self.config.choosing
        asked = {one.entry: one.text for one in self.practised.held}
        chosen = list(asked)[: 2 * count]
        present, absent = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
        others = sorted(set(range(len(self.practised.records))) - set(chosen))
        rows = [*present, *others[: max(0, size - len(present))]]
        records = [self.practised.records[row] for row in rows]
        return [asked[row] for row in present], [asked[row] for row in absent], records

    @contextmanager
    def edited_store(self, size: int) -> Generator[tuple[Store, list[Asked]]]:
        """A store of so many facts after the edits, and the questions about it."""
        with self.embedded.store(self.world.records(size)) as store:
            yield store, self.world.questions(edit_store(store, self.world, self.embedded))

    def way(
        self,
        name: str,
        size: int,
        answers: Sequence[Mapping[str, object]],
        asked: Sequence[Asked],
        held: Callable[[float], float],
        *,
        model: nn.Module | None = None,
        before: Callable[[str], str] | None = None,
        worked: str = "",
        during: While = lambda _: nullcontext(),
        otherwise: While = lambda _: nullcontext(),
    ) -> dict[str, object]:
        """One way of answering, at one size: answers, what else changed, seconds, and bytes beside the model's own.

        Args:
            name: of the way.
            size: facts.
            answers: what `scored` made of them.
            asked: the questions.
            held: tokens of a prompt to bytes.
            model: as it is now; by default the model of the bench.
            before: what stands before a text.
            worked: examples, which stand before that where a question is asked.
            during: what holds while a question is answered.
            otherwise: what holds while other text is read.
        """
        model = self.model if model is None else model
        texts = [one.text for one in asked if one.entry is not None or one.item.after is not None][: self.config.timed]

        def prompt(text: str) -> str:
            return worked + (before(text) if before else "") + PROMPT.format(text)

        times = timed(model, self.tokenizer, prompt, texts, max(2, self.config.tokens), during)
        changed = drift(model, self.tokenizer, self.known, self.text, before, otherwise)
        bytes_held = int(held(times["prompt_tokens"]))
        return {
            "way": name, "size": size, "answers": list(answers), "drift": changed, "times": times, "bytes": bytes_held,
        }  # fmt: skip

    def size_of_reader(self) -> int:
        with self.embedded.store(OWN) as store, attach(self.loaded, store) as handle:
            readers = cast("list[nn.Module]", handle.readers)
            return sum(one.numel() for reader in readers for one in reader.parameters())
