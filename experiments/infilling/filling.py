"""Gaps of held-out rows: what a model thinks of their tokens, what it writes there, and whether that is the task's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnflow as af
from attnflow.tasks import Collator, Task
from attnflow.tasks.collation import MaskForm
from experiments.hasse.arms import TaskOf
from experiments.hasse.writing import share, touching


@dataclass(frozen=True)
class Gaps:
    length: int  # of a row
    firsts: Sequence[int]  # where they begin
    block: int  # tokens of each
    mask_token: int  # id of [MASK]

    @property
    def places(self) -> list[int]:
        """The places of all their tokens in a row, in order."""
        return [first + offset for first in self.firsts for offset in range(self.block)]

    def family(self, tokens: Sequence[int], hidden: Sequence[int]) -> Sequence[Task]:
        """The tasks of filling some places, given what stands in the others."""
        return af.tasks.butterfly(tokens, block=self.block, masked=hidden, mask_token=self.mask_token)


Reading = tuple[Collator, list[int], list[int]]  # of a batch; positions of some labels; the places that they are of


def readings(gaps: Gaps, causal: TaskOf | None, per_pass: int | None, masks: MaskForm = "dense") -> list[Reading]:
    """Batches that together read every token of a gap once: those of a pass from all before them.

    Args:
        gaps: of each row.
        causal: the task of a model that writes from the left side.
        per_pass: otherwise, tokens that are read at once, from left to right.
        masks: how they travel.
    """
    if causal is not None:
        return [_reading(causal, gaps.length, gaps.places, masks)]
    if per_pass is None:
        raise ValueError("a model that fills gaps needs per_pass, the number of tokens to read at once; got None")
    found: list[Reading] = []
    for start in range(0, gaps.block, per_pass):
        hidden = [place for place in gaps.places if place % gaps.block >= start]
        wanted = [place for place in hidden if place % gaps.block < start + per_pass]
        found.append(_reading(partial(_merged, gaps, hidden), gaps.length, wanted, masks))
    return found


def _merged(gaps: Gaps, hidden: Sequence[int], tokens: Sequence[int]) -> Task:
    return af.tasks.merge(gaps.family(tokens, hidden)).task


def _reading(task_of: TaskOf, length: int, wanted: Sequence[int], masks: MaskForm) -> Reading:
    at = {label.data_index: label.position for label in task_of(list(range(length))).labels}
    return Collator(task_of, by_length=True, masks=masks), [at[place] for place in wanted], list(wanted)


@torch.no_grad()
def nats(
    model: Any, batch: Callable[[Collator, Tensor], Mapping[str, Tensor]], passes: Sequence[Reading], rows: Tensor
) -> Tensor:
    """Mean over the tokens of its gaps, for each row."""
    total, count = torch.zeros(len(rows)), sum(len(places) for _, _, places in passes)
    for collate, positions, _ in passes:
        made = dict(batch(collate, rows))
        labels = made.pop("labels")
        each = af.tasks.loss(model(**made, use_cache=False), labels, reduction="none")
        total += each[:, positions, 0].sum(dim=1).cpu()
    return total / count


@torch.no_grad()
def filled(model: Any, gaps: Gaps, rows: Tensor, per_pass: int | None) -> tuple[Tensor, int, float]:
    """(tokens [rows, gaps, block], passes for a gap, processor seconds of all), greedily; the gaps one by one.

    Args:
        model: that fills gaps, or a causal one.
        gaps: of each row.
        rows: held-out ones.
        per_pass: tokens that are filled at once; None to write on from the left side, one by one.
    """
    device = next(model.parameters()).device

    def write(first: int) -> tuple[Tensor, int]:
        left, right = rows[:, :first].to(device), rows[:, first + gaps.block :].to(device)
        if per_pass is not None:
            one = af.tasks.infill(model, left, right, gaps.block, mask_token=gaps.mask_token, per_pass=per_pass)
            return torch.tensor(one.tokens), one.passes
        whole = model.generate(
            left, attention_mask=torch.ones_like(left), max_new_tokens=gaps.block, min_new_tokens=gaps.block,
            do_sample=False, pad_token_id=gaps.mask_token,
        )  # fmt: skip
        return whole[:, first:].cpu(), gaps.block

    write(gaps.firsts[0])  # what a process does once is not timed
    began = time.process_time()
    written = [write(first) for first in gaps.firsts]
    seconds = time.process_time() - began
    return torch.stack([tokens for tokens, _ in written], dim=1), written[0][1], seconds


def quality(gaps: Gaps, rows: Tensor, tokens: Tensor, tokenizer: Any, vocabulary: frozenset[str]) -> dict[str, object]:
    """Of what stands in the gaps: share of right tokens and of gaps wholly right by row, of letters in real words.

    Words count that a gap has letters of, with the text around it; the first and the last one of a row do not.
    """
    truth = torch.stack([rows[:, first : first + gaps.block] for first in gaps.firsts], dim=1)
    right = tokens == truth
    every: list[str] = []
    for number, first in enumerate(gaps.firsts):
        whole = torch.cat([rows[:, :first], tokens[:, number], rows[:, first + gaps.block :]], dim=1)
        pieces = (whole, whole[:, :first], whole[:, : first + gaps.block])
        for text, before, until in zip(*(tokenizer.batch_decode(one.tolist()) for one in pieces), strict=True):
            every += touching(str(text), len(str(before)), len(str(until)))
    return {
        "right": right.float().mean(dim=(1, 2)).tolist(),
        "whole": right.all(dim=2).float().mean(dim=1).tolist(),
        "real_words": share(every, vocabulary),
    }


@torch.no_grad()
def agreement(model: Any, gaps: Gaps, rows: Tensor, per_pass: int) -> Mapping[str, object]:
    """Whether `infill` fills gaps as the tasks say that were trained: the first pass by the merged task of all gaps,
    later ones by that of the gap, given what has been filled.

    Returns:
        Tokens compared, those that differ, and the closest choice in a gap of such: between the two best tokens of a
        place, or two places of which one is filled; in nats.
    """
    tokens = filled(model, gaps, rows, per_pass)[0]
    device = next(model.parameters()).device

    def chances(row: Tensor, hidden: Sequence[int]) -> dict[int, Tensor]:
        collate, positions, places = _reading(partial(_merged, gaps, hidden), gaps.length, hidden, "dense")
        batch = {name: value.to(device) for name, value in collate([row]).items() if name != "labels"}
        logits = model(**batch, use_cache=False).logits[0, positions].cpu()
        return dict(zip(places, logits.log_softmax(dim=-1), strict=True))

    compared, closest = 0, list[float]()
    for row, of_row in zip(rows, tokens, strict=True):
        start = chances(row, gaps.places)
        for first, of_gap in zip(gaps.firsts, of_row, strict=True):
            text, hidden, calls = row.clone(), list(range(first, first + gaps.block)), list[float]()
            while hidden:
                now = start if len(hidden) == gaps.block else chances(text, hidden)
                best = {place: now[place].topk(2) for place in hidden}
                order = sorted(hidden, key=lambda place: -float(best[place].values[0]))
                for place in order[:per_pass]:
                    text[place] = best[place].indices[0]
                    calls.append(float(best[place].values[0] - best[place].values[1]))
                if len(order) > per_pass:
                    last, spared = order[per_pass - 1 : per_pass + 1]
                    calls.append(float(best[last].values[0] - best[spared].values[0]))
                hidden = sorted(order[per_pass:])
            differ = int((text[first : first + gaps.block] != of_gap).sum())
            compared += gaps.block
            closest += [min(calls)] * differ
    return {"compared": compared, "differ": len(closest), "closest": max(closest, default=0.0)}
