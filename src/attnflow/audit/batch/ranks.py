"""The loss of a step on several processes: each rank reads what it trains, and all of it is placed in the batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnflow._core.markup import plural
from attnflow.audit.batch.gradients import NOTHING, UNKNOWN, Targets
from attnflow.audit.batch.labels import Findings
from attnflow.audit.batch.loss import matched, with_shift
from attnflow.audit.batch.reading import BatchReading, Family, family_of
from attnflow.audit.batch.targets import LossUnread, TrainsNothing, read_targets
from attnflow.audit.shards import Shard, positions_of
from attnflow.models.passes.processes import Processes, by_rank


@dataclass(frozen=True)
class RankLoss:
    """What one rank read off its loss."""

    targets: Targets | None  # None if it trains nothing
    family: Family  # of the model that was called
    returned: bool  # whether the step returned a loss here; the first stages of a pipeline have none
    drawn: tuple[str, ...]  # generators that the step drew from, as it found and as it left them; () if it drew nothing


@dataclass
class RankedLoss:
    """The loss of one step; all ranks call the same methods in the same order. Without a shard there is one rank."""

    processes: Processes | None
    shard: Shard
    parts: dict[int, RankLoss] = field(default_factory=dict[int, RankLoss])  # by rank

    def read(
        self, step: Callable[[Any], object], batch: Mapping[str, Any], least: int, model: nn.Module | None
    ) -> Family:
        """Run the step on each rank, and return the family of the model that it calls."""
        if self.processes is not None:
            self.processes.require_same("batch", batch)
        several = self.shard is not None
        self.parts = by_rank(self.processes, lambda: _read(step, batch, least, model, several))
        if not any(part.targets is not None for part in self.parts.values()):
            raise LossUnread("no rank returned a loss that trains anything")
        return next(part.family for part in self.parts.values() if part.targets is not None)

    def placed(self, reading: BatchReading, findings: Findings) -> Targets | None:
        """What all ranks train, in the columns of the batch; None if that cannot be told."""
        if self.shard is None:
            (part,) = self.parts.values()
            assert part.targets is not None
            return matched(part.targets, reading, findings)
        ranks = tuple(self.parts)
        number = 0 if self.processes is None else ranks.index(self.processes.rank)
        places = by_rank(self.processes, lambda: positions_of(self.shard, reading.shape, number, len(ranks)))
        whole: Targets | None = None
        owner = torch.full((math.prod(reading.shape),), -1)
        for rank, part in self.parts.items():
            if not part.returned:
                continue
            flat = places[rank].flatten()
            owner[flat] = torch.where(owner[flat] < 0, rank, owner[flat])
            spread = None if part.targets is None else _spread(part.targets, places[rank], reading, rank, findings)
            if spread is not None:
                whole = spread if whole is None else _added(whole, spread, rank, findings)
        self._covered(owner.view(reading.shape), findings)
        findings.notes += self._drawn_alike()
        if whole is None:
            return None
        return with_shift(replace(whole, owner=owner.view(reading.shape), **self._value()), reading)

    def _covered(self, owner: Tensor, findings: Findings) -> None:
        absent = owner[:, :-1] < 0  # no label follows the last
        if absent.any():
            row, column = absent.nonzero()[0].tolist()
            what = f"{plural(int(absent.sum()), 'position')}, the first of them {column} of sequence {row}"
            findings.untested.append((what, "no rank's shard covers them"))
        else:
            findings.checked.append(f"shards: {plural(len(self.parts), 'rank')} cover all positions")

    def _value(self) -> dict[str, Any]:
        """The loss and what of it does not come from the logits, of the rank where that is most.

        A rank returns the loss of its own tokens, or the sum or the mean over all ranks.
        """
        read = [part.targets for part in self.parts.values() if part.targets is not None]
        own = [float(targets.value.sum()) for targets in read]
        if any(bool((targets.token == UNKNOWN).any()) for targets in read):
            return {"loss": sum(targets.loss for targets in read), "rest": math.nan}
        total = sum(own)
        ways = [[targets.loss - expected for targets in read] for expected in (total, total / len(self.parts))]
        rests = min([[targets.rest for targets in read], *ways], key=lambda rests: max(map(abs, rests)))
        worst = max(range(len(rests)), key=lambda index: abs(rests[index]))
        return {"loss": read[worst].loss, "rest": rests[worst], "scalars": read[worst].scalars}

    def _drawn_alike(self) -> list[str]:
        """Ranks whose steps began with equal generators: no mistake, as trainers seed all ranks alike."""
        states: dict[str, list[int]] = {}
        for rank, part in self.parts.items():
            for state in part.drawn:
                states.setdefault(state, []).append(rank)
        groups = dict.fromkeys(tuple(ranks) for ranks in states.values() if len(ranks) > 1)
        return [
            f"ranks {', '.join(map(str, ranks))} draw the same random numbers, so that dropout hides the same features "
            "on each (transformers' Trainer seeds all ranks alike): to change that, seed each with its rank"
            for ranks in groups
        ]


def _read(
    step: Callable[[Any], object], batch: Mapping[str, Any], least: int, model: nn.Module | None, several: bool
) -> RankLoss:
    before, seen = _generators(), list[object]()
    drawn: tuple[str, ...] = ()

    def watched(given: Any) -> object:
        nonlocal drawn
        returned = step(given)
        seen.append(returned)
        after = _generators()
        if after != before:  # a step that seeds them itself leaves another seed
            drawn = after[0], f"{before[0]} {after[1]}"
        return returned

    targets: Targets | None = None
    try:
        targets = read_targets(watched, batch, least, model, several)
    except LossUnread as error:
        nothing = isinstance(error, TrainsNothing) or seen[:1] == [None]
        if not several or not nothing:
            raise
    returned = targets is not None or seen[0] is not None
    family = family_of(None if targets is None else targets.model)
    if several and targets is not None:  # they travel
        targets = replace(targets, model=None, inputs=())
    return RankLoss(targets, family, returned, drawn)


def _generators() -> tuple[str, str]:
    """(a fingerprint of torch's generators, their seeds)."""
    states, seeds = [torch.random.get_rng_state()], [torch.initial_seed()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().cpu())
        seeds.append(torch.cuda.initial_seed())
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest(), str(seeds)


def _spread(targets: Targets, places: Tensor, reading: BatchReading, rank: int, findings: Findings) -> Targets | None:
    """What a rank trains, in the columns of the batch; logits of padding behind its shard may train nothing."""
    rows, width = len(places), places.shape[-1]
    columns = targets.token.numel() // max(1, rows)
    if targets.token.numel() % max(1, rows) or columns < width:
        shape = f"rank {rank} has logits of {list(targets.token.shape)}, and {list(places.shape)} positions by shard="
        findings.untested.append(("which positions the loss trains", shape))
        return None
    beyond = int((targets.token.reshape(rows, -1)[:, width:] != NOTHING).sum())
    if beyond:
        row, column = divmod(int(places.flatten()[-1]), reading.shape[1])
        message = f"rank {rank} trains {plural(beyond, 'position')} behind its shard: padding of its logits"
        findings.add("padding", _at(reading, row, column), message)
    flat, size = places.flatten(), reading.shape

    def spread(values: Tensor, empty: int | float) -> Tensor:
        whole = torch.full((math.prod(size),), empty, dtype=values.dtype)
        return whole.scatter(0, flat, values.reshape(rows, -1)[:, :width].flatten()).view(size)

    return targets.changed(spread)


def _at(reading: BatchReading, row: int, column: int) -> Tensor:
    place = torch.zeros(reading.shape, dtype=torch.bool)
    place[row, column] = True
    return place


def _added(one: Targets, other: Targets, rank: int, findings: Findings) -> Targets:
    """What two ranks train; a position that both train counts as often as they say."""
    both = (one.token >= 0) & (other.token >= 0)
    if both.any():
        row, column = both.nonzero()[0].tolist()
        places = f"{plural(int(both.sum()), 'position')}, the first of them {column} of sequence {row}"
        findings.notes.append(f"rank {rank} also trains {places}, which a rank before it trains")
    apart = (one.weight - other.weight).abs() > max(one.precision, other.precision) * one.weight.abs()
    for clash, words in ((one.token != other.token, "trains it on another token"), (apart, "gives it another weight")):
        if (both & clash).any():
            row, column = (both & clash).nonzero()[0].tolist()
            what = f"position {column} of sequence {row}"
            findings.untested.append((what, f"rank {rank} {words} than a rank before it"))
    whole = one.joined(other)
    added = torch.where(both, other.weight, 0.0), torch.where(both, other.value, 0.0)
    calls = max(one.calls, other.calls)
    return replace(whole, weight=whole.weight + added[0], value=whole.value + added[1], calls=calls)
