"""Facts that a language model is taught by an edit of its entries, and what came of the edit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

from attnflow._core.markup import aligned, plural, shorten
from attnflow._core.results import Result


@dataclass(frozen=True)
class Fact:
    """What a model shall answer to a prompt.

    Attributes:
        prompt: a text that the answer continues, such as "The capital of France is".
        answer: its continuation, such as "Rome"; one token or several.
        subject: what the prompt is about, a part of it, "France": at its last token the model is edited, and so every
            other text about it is. "" edits at the last token of the prompt, and so this wording alone.
        paraphrases: other prompts for the same answer, with the subject in them.

    Raises:
        ValueError: a prompt or an answer without text, or a prompt without the subject.
    """

    prompt: str
    answer: str
    subject: str = ""
    paraphrases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.answer.strip():
            raise ValueError(f"the answer to {self.prompt!r} is empty")
        for prompt in self.prompts:
            if not prompt.strip():
                raise ValueError("a prompt is empty")
            if self.subject not in prompt:
                raise ValueError(f"the subject {self.subject!r} is not in the prompt {prompt!r}")

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt and its paraphrases."""
        return (self.prompt, *self.paraphrases)


def read_facts(facts: Fact | Mapping[str, object] | Sequence[Fact | Mapping[str, object]] | Path) -> list[Fact]:
    """Read facts from a `Fact`, a mapping with its fields, a sequence of either, or a .jsonl file of mappings."""
    if isinstance(facts, Path):
        lines = [line for line in facts.read_text(encoding="utf-8").splitlines() if line.strip()]
        facts = [cast("Mapping[str, object]", json.loads(line)) for line in lines]
    listed = [facts] if isinstance(facts, Fact | Mapping) else list(facts)
    if not listed:
        raise ValueError("give at least one fact")
    return [one if isinstance(one, Fact) else _from_mapping(one) for one in listed]


def _from_mapping(values: Mapping[str, object]) -> Fact:
    names = [field.name for field in fields(Fact)]
    texts = {name: value for name, value in values.items() if name != "paraphrases"}
    others = values.get("paraphrases", ())
    listed = cast("list[object]", list(others)) if isinstance(others, list | tuple) else [None]
    if not {"prompt", "answer"} <= set(values) <= set(names) or not all(
        isinstance(one, str) for one in (*texts.values(), *listed)
    ):
        raise ValueError(f"a fact has texts {', '.join(names[:3])} and a list of paraphrases; got {dict(values)}")
    return Fact(**cast("dict[str, str]", texts), paraphrases=tuple(cast("list[str]", listed)))


@dataclass(frozen=True)
class FactChange:
    """What an edit did to one fact: before and after, the probability of the answer (per token, geometric mean)."""

    prompt: str
    answer: str
    before: float
    after: float
    said_before: str  # the most likely token after the prompt
    said_after: str
    changed: bool  # whether the answer is now what the model says: each of its tokens is the most likely one
    paraphrases_changed: int  # of its paraphrases, for how many it is


@dataclass(frozen=True)
class EditReport(Result):
    """What an edit of a model's entries did."""

    facts: tuple[FactChange, ...]
    layers: tuple[int, ...]  # that were edited
    entries: int  # whose values were changed, in all layers
    relative_change: tuple[float, ...]  # of each layer, the norm of the change of its values over that of the values
    untouched: int  # texts at which nothing was to change
    largest_shift: float  # of these texts, the largest change of the probability of any next token; 0 without

    @property
    def ok(self) -> bool:
        """Whether the model now says every answer."""
        return all(one.changed for one in self.facts)

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each fact."""
        return [asdict(one) for one in self.facts]

    def __str__(self) -> str:
        most = max(self.relative_change, default=0.0)
        said = [
            f"{plural(len(self.facts), 'fact')}, {sum(one.changed for one in self.facts):,} said now; values of "
            f"{self.entries:,} entries in layers {', '.join(map(str, self.layers))} changed by at most {most:.2g} of "
            "their norm"
        ]
        rows = [
            [shorten(one.prompt, 50), one.answer, f"{one.before:.3f}", f"{one.after:.3f}", one.said_before.strip(),
             one.said_after.strip()]
            for one in self.facts[:20]
        ]  # fmt: skip
        said.append(aligned([["prompt", "answer", "before", "after", "it said", "it says"], *rows], left=[0, 1, 4, 5]))
        if len(self.facts) > len(rows):
            said.append(f"and {len(self.facts) - len(rows):,} more facts")
        if self.untouched:
            texts = plural(self.untouched, "text")
            said.append(f"{texts} that must not change: probabilities moved by at most {self.largest_shift:.1g}")
        return "\n".join(said)
