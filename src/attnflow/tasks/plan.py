"""`decoder`: what a family writes, reads and caches in each pass, found by the order of its mask."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from attnflow._core.checks import index_array, integer, preview
from attnflow._core.markup import plural
from attnflow._core.plain import as_list
from attnflow._core.results import Result
from attnflow.tasks.merging import MergedTask, merge
from attnflow.tasks.task import Task
from attnflow.tasks.trained import write_description
from attnflow.tasks.writing import Facts, Writing, facts_of


@dataclass(frozen=True)
class DecodingPass:
    """One pass of a decoder; positions are those of its task.

    Attributes:
        writes: the data tokens that are chosen after the pass.
        drafts: data tokens that the pass also proposes, for a later pass to verify.
        feeds: the positions that the model runs on, in the order of its rows.
        masked: those of them that hold [MASK] for a token that is not yet written.
        caches: those of them that stay in the cache, as everything at or below them is written.
    """

    writes: tuple[int, ...]
    drafts: tuple[int, ...]
    feeds: tuple[int, ...]
    masked: tuple[int, ...]
    caches: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Decoder(Result):
    """How a family of tasks writes its data tokens, pass by pass; made by `decoder` and run by `generate`.

    Attributes:
        task: the merged task that is decoded. The ids of its data tokens mean nothing; a [MASK] keeps its id.
        known: the data tokens that `passes` starts from. `generate` starts from those of its prompt.
    """

    task: Task
    known: tuple[int, ...]

    @cached_property
    def facts(self) -> Facts:
        return facts_of(self.task)

    @cached_property
    def passes(self) -> tuple[DecodingPass, ...]:
        """The passes from `known` on, one shot each, as if no draft was accepted."""
        return tuple(self._passes())

    def _passes(self) -> Iterator[DecodingPass]:
        facts, tokens = self.facts, np.full(self.facts.num_tokens, -1)
        tokens[list(self.known)] = 0
        writing = Writing(facts, tokens)
        while len(opened := writing.opened(0)):
            feed = writing.feed()
            masked = feed.rows[writing.unsettled(feed.rows) & (facts.blank[feed.rows] >= 0)]
            written = facts.data[opened]
            kept = feed.rows[writing.settle(feed, 0, dict.fromkeys(written.tolist(), 0))]
            drafts = sorted(set(facts.data[feed.chosen[0]].tolist()) - set(written.tolist()))
            lists = written, drafts, feed.rows, masked, kept
            yield DecodingPass(*(tuple(int(each) for each in values) for values in lists))

    @property
    def caches(self) -> bool:
        """Whether any position is final before the end; otherwise each pass reads all that it needs anew."""
        return any(each.caches for each in self.passes)

    def reads(self, number: int) -> Bool[Tensor, "fed read"]:
        """What the rows of a pass read: columns are what earlier passes cached, in order, then what the pass feeds."""
        number = integer("number", number, 0, len(self.passes) - 1)
        cached = [position for earlier in self.passes[:number] for position in earlier.caches]
        feeds = self.passes[number].feeds
        return torch.from_numpy(self.facts.allow(index_array("", feeds), index_array("", [*cached, *feeds])))

    def __repr__(self) -> str:
        return f"Decoder({self.task!r}, {plural(len(self.known), 'known token')})"

    def __str__(self) -> str:
        written = sum(len(each.writes) for each in self.passes)
        passes = plural(len(self.passes), "pass", "passes")
        lines = [f"{plural(written, 'token')} after {plural(len(self.known), 'known one')} in {passes}"]
        lines[0] += "" if self.caches else "; nothing is final before the end, so every pass reads everything anew"
        for number, each in enumerate(self.passes[:8]):
            masked = f" ({len(each.masked)} as [MASK])" if each.masked else ""
            drafts = f", drafts {preview(each.drafts)}" if each.drafts else ""
            lines.append(
                f"  pass {number}: feeds {preview(each.feeds)}{masked}, writes {preview(each.writes)}{drafts}, "
                f"caches {preview(each.caches)}"
            )
        return "\n".join(lines + [f"  ... and {len(self.passes) - 8} more passes"] * (len(self.passes) > 8))

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each pass, with the numbers of its positions and tokens."""
        return [{"pass": i, **{k: len(v) for k, v in vars(each).items()}} for i, each in enumerate(self.passes)]

    def to_dict(self) -> dict[str, object]:
        """The task and the known tokens, with the passes for readers."""
        passes = [{name: list(values) for name, values in vars(each).items()} for each in self.passes]
        plain = {"task": self.task.to_dict(), "known": list(self.known), "passes": passes}
        return {"attnflow": "Decoder", "version": self.version, **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Decoder:
        """Rebuild the decoder from what `to_dict` wrote; its passes are found again."""
        content = cls._content(values)
        known = tuple(index_array("known", as_list(content.get("known"), "known")).tolist())
        return cls(Task.from_dict(content.get("task")), known)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file as every result does, or store beside a checkpoint how its family decodes.

        In a folder that exists it writes attnflow_decoder.json: how many tokens each kind of task writes, from what,
        and who reads whom by block and distance, among the 1,024 positions nearest to what is written. It holds for
        texts of any length. `generate`, `generate_blocks` and `infill` then refuse a model from that folder if they
        would read otherwise, or read what this family does not show: save one of at least three blocks.

        Raises:
            ValueError: the suffix is another one than of results; or who reads whom depends on more than stream, block
                and distance, so that no such description exists.
        """
        return write_description(self.facts, Path(path)) if Path(path).is_dir() else super().save(path)


def decoder(family: Sequence[Task] | Task | MergedTask, known: Sequence[int] | None = None) -> Decoder:
    """Derive how a family of tasks writes a text: pass by pass, with a cache, from the order of its mask.

    A position can be run once every data token at or below it is known, and a token can be written by a position that
    predicts it and can be run. A position stays in the cache once everything at or below it is written: a [MASK] that
    stands for a token is not final before that token. Of several positions that predict a token, those that read less
    than another one draft it, and the one that reads most verifies it. No kind of family is special: block diffusion
    caches its clean blocks, a causal family each token, and a single task with full attention nothing.

    Args:
        family: tasks on one sample, as long as the longest text to be written; a `MergedTask`; or one task. Its tokens
            may be any ids, such as `range(n)`, and all places to be written must be [MASK]s or absent.
        known: data tokens that `passes` starts from. By default those that nothing predicts; and where nothing could
            start from these (a gap reads both sides), all but the tokens of one task.

    Raises:
        ValueError: a token cannot be written, as what predicts it reads tokens that are not written before it; an
            input is neither data nor fixed; nothing is predicted; one position predicts several tokens for one place
            (a tree of answers); the family cannot be merged, or was with `key_bias`.

    Cost: the closure of the task's mask, tokens x positions bytes, and tokens x predictors of each for drafts: seconds
    at 1,024 tokens with four predictors each.

    >>> import attnflow as af
    >>> print(decoder(af.tasks.block_two_stream(range(6), 2, mask_token=9)))
    4 tokens after 2 known ones in 2 passes
      pass 0: feeds [0, 1, 4, 5] (2 as [MASK]), writes [2, 3], caches [0, 1]
      pass 1: feeds [2, 3, 6, 7] (2 as [MASK]), writes [4, 5], caches [2, 3]
    >>> decoder(af.tasks.masked_lm(range(3), range(3), mask_token=9)).caches
    False
    """
    if isinstance(family, MergedTask) and len(family.multiplicity):
        raise ValueError(
            "some keys of this merged task stand for several positions, which no decoder counts: merge without key_bias"
        )
    if isinstance(family, Task | MergedTask):
        task = family if isinstance(family, Task) else family.task
    else:
        tasks = list(family)
        task = tasks[0] if len(tasks) == 1 else merge(tasks).task
    facts = facts_of(task)
    start = facts.without(facts.data) if known is None else index_array("known", known, facts.num_tokens)
    if known is None and len(facts.stuck(start)) == facts.num_tokens - len(start):
        table = task.targets.table
        gaps = (table["data_index"][table["task"] == number] for number in dict.fromkeys(table["task"].tolist()))
        start = next((rest for rest in map(facts.without, gaps) if not len(facts.stuck(rest))), start)
    facts.require_writable(start)
    plan = Decoder(task, tuple(np.unique(start).tolist()))
    vars(plan)["facts"] = facts
    return plan
