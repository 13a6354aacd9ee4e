"""The facts that an edit teaches a language model, and the report on the edit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, TypeVar, cast

from torch import Tensor

from attnflow._core.markup import aligned, plural, shorten
from attnflow._core.results import Result

Distance = TypeVar("Distance", float, Tensor)

_NATS: Final = 0.01  # by which the loss on other text may rise, a token


@dataclass(frozen=True)
class Fact:
    """A prompt and the answer that the model should give to it.

    Attributes:
        prompt: a text that the answer continues, such as "The capital of France is".
        answer: its continuation, such as "Rome"; one token or several.
        subject: the part of the prompt that it is about, such as "France". The edit acts at the subject's last token,
            and so on every text about it. "" edits at the prompt's last token, which affects this wording alone.
        paraphrases: other prompts with the same answer; each must contain the subject.

    Raises:
        ValueError: a prompt or an answer is empty, or a prompt does not contain the subject.
    """

    prompt: str
    answer: str
    subject: str = ""
    paraphrases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.answer.strip():
            raise ValueError(f"a fact needs an answer, but the answer to {self.prompt!r} is empty")
        for prompt in self.prompts:
            if not prompt.strip():
                raise ValueError("a prompt of a fact must have text, got an empty one")
            if self.subject not in prompt:
                raise ValueError(f"each prompt must contain the subject {self.subject!r}, got {prompt!r}")

    @property
    def prompts(self) -> tuple[str, ...]:
        return (self.prompt, *self.paraphrases)


def read_facts(facts: Fact | Mapping[str, object] | Sequence[Fact | Mapping[str, object]] | Path) -> list[Fact]:
    if isinstance(facts, Path):
        lines = [line for line in facts.read_text(encoding="utf-8").splitlines() if line.strip()]
        facts = [cast("Mapping[str, object]", json.loads(line)) for line in lines]
    listed = [facts] if isinstance(facts, Fact | Mapping) else list(facts)
    if not listed:
        raise ValueError("expected at least one fact, got none")
    return [fact if isinstance(fact, Fact) else _from_mapping(fact) for fact in listed]


def _from_mapping(values: Mapping[str, object]) -> Fact:
    names = [field.name for field in fields(Fact)]
    texts = {name: value for name, value in values.items() if name != "paraphrases"}
    others = values.get("paraphrases", ())
    listed = cast("list[object]", list(others)) if isinstance(others, list | tuple) else [None]
    named = {"prompt", "answer"} <= set(values) <= set(names)
    if not named or not all(isinstance(text, str) for text in (*texts.values(), *listed)):
        raise ValueError(
            f"a fact must have the texts {', '.join(names[:3])} and a list paraphrases, got {dict(values)}"
        )
    return Fact(**cast("dict[str, str]", texts), paraphrases=tuple(cast("list[str]", listed)))


@dataclass(frozen=True)
class FactChange:
    """The effect of an edit on one fact: the answer's probability (per token, geometric mean) before and after.

    `about` counts other statements on the subject and `beside` the prompt about other subjects. What the model says to
    them is its most likely continuation, of as many tokens as the answer. Those count of which it was sure before the
    edit, and which the edit was not told to keep; `_kept` counts where it still says the same.
    """

    prompt: str
    answer: str
    before: float
    after: float
    said_before: str  # the most likely continuation of the prompt, of as many tokens as the answer
    said_after: str
    changed: bool  # whether the model now gives the answer: each of its tokens is the most likely one
    paraphrases_changed: int  # the number of paraphrases that get the answer
    # The number of paraphrases, given or found (`EditGuard.rewordings`), which the model answered as it did the prompt.
    understood: int = 0
    understood_changed: int = 0  # the number of these that get the new answer
    about: int = 0
    about_kept: int = 0
    beside: int = 0
    beside_kept: int = 0


@dataclass(frozen=True)
class ShiftBound:
    """A bound of the norm of what an edit adds to one layer's output, at any token of any text.

    It is `bound(distance)`, where the distance is that of the layer's input, behind the norm, from the nearest input at
    the subject of an edited fact. `largest_ratio` is that of the real shift over the bound, at `checked` tokens of
    other prompts.

    The bound holds, and promises little away from the facts: for three edits of SmolLM2-135M, at other prompts'
    tokens, 0.8 to 7 from the fact where inputs are 3 long, the real shift was at most 13 % of it, and in the median
    0.01 %. What an edit does there is what the report measured.
    """

    layer: int  # of the model
    shift: float
    slope: float
    bend: float
    checked: int = 0
    largest_ratio: float = 0.0

    def bound(self, distance: Distance) -> Distance:
        return self.shift + self.slope * distance + self.bend * distance**2


@dataclass(frozen=True)
class EditReport(Result):
    """The effect of an edit of a model's entries."""

    facts: tuple[FactChange, ...]
    layers: tuple[int, ...]  # the model's layer of each feed-forward module that was edited
    entries: int  # the number of entries with changed values, in all layers
    relative_change: tuple[float, ...]  # for each of these, the norm of the change of its values over their norm
    untouched: int  # the number of texts that must not change
    largest_shift: float  # the largest change of any next token's probability on these texts; 0 without texts
    text: float | None = None  # the change of the loss on text that the edit has not read, in nats a token
    # For each layer whose activation is known, how far what it writes can move at most, checked at what is measured.
    certificate: tuple[ShiftBound, ...] = ()

    @property
    def ok(self) -> bool | None:
        """Whether the model gives every answer, and everything beside it was measured and stays within its bound.

        False if something lies outside its bound (`problems`). None if nothing does, but something was not measured
        (`unmeasured`): nothing is promised then. The bounds: of the wordings that the model understood 85 % follow, of
        other statements on the subjects 85 % stay, of the relation's facts on other subjects 95 %; text costs at most
        0.01 nats a token more.
        """
        return False if self.problems else None if self.unmeasured else True

    @property
    def problems(self) -> tuple[str, ...]:
        """What lies outside its bound, in words."""
        found = [
            f"{fact.prompt!r} is answered {fact.said_after.strip()!r}, not {fact.answer!r}"
            for fact in self.facts
            if not fact.changed
        ]
        for words, kept, counts, bound in self._shares():
            if kept < bound * sum(counts):
                found.append(f"{words}: {kept} of {sum(counts)}, fewer than {bound:.0%}")
        if self.text is not None and not self.text <= _NATS:
            found.append(f"the loss on other text rises by {self.text:.3g} nats a token, more than {_NATS}")
        return tuple(found)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """What has a bound and was not measured for some of the facts, in words."""
        found = [
            f"{words}: not measured for {counts.count(0):,} of {plural(len(counts), 'fact')}"
            for words, _, counts, _ in self._shares()
            if 0 in counts
        ]
        return (*found, *(["loss on other text: not measured"] if self.text is None else []))

    def _shares(self) -> list[tuple[str, int, list[int], float]]:
        """For each bound on shares: what it bounds, how many stayed, how many were measured of each fact, the bound."""

        def counts(name: str) -> list[int]:
            return [cast(int, getattr(fact, name)) for fact in self.facts]

        return [
            (
                "paraphrases that the model understood follow",
                sum(counts("understood_changed")),
                counts("understood"),
                0.85,
            ),
            ("other statements on the subject stay", sum(counts("about_kept")), counts("about"), 0.85),
            ("the same statement on other subjects stays", sum(counts("beside_kept")), counts("beside"), 0.95),
        ]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each fact."""
        return [asdict(fact) for fact in self.facts]

    def __str__(self) -> str:
        most = max(self.relative_change, default=0.0)
        lines = [
            f"{sum(fact.changed for fact in self.facts):,} of {plural(len(self.facts), 'fact')} changed; the values of "
            f"{self.entries:,} entries in layers {', '.join(map(str, dict.fromkeys(self.layers)))} moved by at most "
            f"{most:.2g} of their norm"
        ]
        rows = [["prompt", "new answer", "p before", "p after", "said before", "says now"]]
        for fact in self.facts[:20]:
            chances, words = (f"{fact.before:.3f}", f"{fact.after:.3f}"), (fact.said_before, fact.said_after)
            rows.append([shorten(fact.prompt, 50), fact.answer, *chances, *map(str.strip, words)])
        lines.append(aligned(rows, left=[0, 1, 4, 5]))
        if more := len(self.facts[20:]):
            lines.append(f"and {plural(more, 'more fact')}")
        lines += [f"{words}: {kept} of {sum(counts)}" for words, kept, counts, _ in self._shares() if any(counts)]
        if self.text is not None:
            lines.append(f"loss on other text: {self.text:+.4f} nats a token")
        if self.untouched:
            texts = plural(self.untouched, "text")
            lines.append(f"{texts} that must not change: probabilities moved by at most {self.largest_shift:.1g}")
        if checked := max((bound.checked for bound in self.certificate), default=0):
            ratio = max(bound.largest_ratio for bound in self.certificate)
            lines.append(
                f"at {plural(checked, 'token')} of other prompts, layers moved by at most {ratio:.1%} of the bound"
            )
        lines += [f"outside its bound: {problem}" for problem in self.problems]
        lines += [f"not promised: {what}" for what in self.unmeasured]
        return "\n".join(lines)
