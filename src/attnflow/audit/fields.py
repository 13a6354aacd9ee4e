"""Allowed receptive fields by layer, and the sets of positions whose perturbation tests most forbidden pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.report import Violation

_RANKING_DEPTH: Final = 64  # deep enough to rank positions by the order; ties fall back to their number
_STAGES: Final = 6
_EARLY: Final = 4  # sets beyond the passes for what only the first layers may not read
_PLAN_WORK: Final = 500_000_000  # multiply-adds that one step of planning may cost
_BLOCKS: Final = (64, 16)  # rows that kernels work on at a time


@dataclass(frozen=True)
class Relation:
    """A declared order: bool [rows, n, n] per layer call, or one for all; one row unless sequences differ."""

    layers: tuple[Tensor, ...]  # the relations; entry [b, i, j] lets i read j
    repeat: bool  # whether the single relation holds in every layer
    name: str  # the order in words
    # masks that the model asks for against its configuration and inputs, with whether they allow too much
    disputed: tuple[tuple[Violation, bool], ...] = ()
    unsure: tuple[str, ...] = ()  # what neither the configuration nor the inputs tell


class Fields:
    """The declared receptive fields F_l = A_l x ... x A_1 with A = allow | I, grown layer by layer on demand."""

    def __init__(self, relation: Relation, batch: int) -> None:
        self.relation = relation
        self.batch = batch
        first = relation.layers[0]
        self.size = int(first.shape[-1])
        self._identity = torch.eye(self.size, dtype=torch.bool)[None]
        self._grown: list[Tensor] = [self._identity.expand(first.shape[0], -1, -1)]
        self._final = False

    def at(self, depth: int) -> Bool[Tensor, "rows n n"]:
        """F after `depth` layers; -1 means arbitrarily many layers of a repeated relation."""
        while not self._final and (depth < 0 or len(self._grown) <= depth):
            index = len(self._grown) - 1
            if not self.relation.repeat and index >= len(self.relation.layers):
                raise UnsupportedArchitecture(
                    f"the declared order has {len(self.relation.layers)} layers, but the model runs more; pass order= "
                    "with one mask per layer call, or a single mask for all layers"
                )
            allow = self.relation.layers[0 if self.relation.repeat else index] | self._identity
            grown = (allow.float() @ self._grown[-1].float()) > 0
            if torch.equal(grown, self._grown[-1]):
                grown = self._grown[-1]  # one tensor for all saturated depths
                self._final = self.relation.repeat
            self._grown.append(grown)
        return self._grown[min(depth, len(self._grown) - 1)]

    def clean(self, depth: int, selected: Bool[Tensor, "batch n"]) -> Bool[Tensor, "batch n"]:
        """Rows that must not move after `depth` layers when the `selected` positions change."""
        field = self.at(depth).expand(self.batch, -1, -1)
        return ~((field.float() @ selected.float()[:, :, None])[:, :, 0] > 0)

    def ranked(self, positions: Sequence[tuple[int, int]], row: int) -> list[tuple[int, int]]:
        """(sequence, position) pairs: other sequences than `row` first, then lower before upper in the order."""
        field = self.at(_RANKING_DEPTH if self.relation.repeat else len(self.relation.layers))
        counts: list[list[int]] = field.sum(-1).expand(self.batch, -1).tolist()
        return sorted(positions, key=lambda pair: (pair[0] == row, pair[0], counts[pair[0]][pair[1]], pair[1]))


@dataclass(frozen=True)
class ProbePlan:
    passes: tuple[Tensor, ...]  # bool [batch, n] each
    coverage: float  # share of the forbidden pairs that they test
    forbidden: int  # number of forbidden pairs


class _Borders(NamedTuple):
    """Rows where kernels go wrong: the first and last of a block of 64 or 16 rows, and the ends of a sequence."""

    spread: list[int]  # two, about a third from both ends
    ends: list[int]  # the ends of each run of positions, and of its first and last blocks: ten for each run
    others: list[int]  # at all blocks of the runs, and of documents inside


def _borders(field: Tensor, runs: Sequence[tuple[int, int]]) -> _Borders:
    """The borders of runs of positions, each [start, end), whose final receptive fields are given."""
    borders = _Borders([], [], [])
    starts = [i for i in range(1, len(field)) if not field[i, i - 1]]  # of documents
    for start, end in runs:
        width = _BLOCKS[0] if end - start > 3 * _BLOCKS[0] else _BLOCKS[-1]
        blocks = [range(start + size, end - 1, size) for size in _BLOCKS]
        thirds = [max(1, round(part * (end - start) / 3 / width)) * width for part in (1, 2)]
        if end - start >= 3 * width:
            borders.spread.extend((start + thirds[0], start + thirds[1] - 1))
        borders.ends.extend((start, max(start, end - 2)))
        borders.ends.extend(row - back for rows in blocks for row in (*rows[:1], *rows[-1:]) for back in (0, 1))
        inside = [s for s in starts if start < s < end]
        for first, last in zip([start, *inside], [*inside, end], strict=True):
            firsts = [first, *(row for size in _BLOCKS for row in range(first + size, last - 1, size))]
            borders.others.extend(row - back for row in firsts for back in (0, 1) if row > back)
    return borders


def plan(
    fields: Fields, seen: Mapping[int, Tensor], passes: int, runs: Sequence[tuple[int, int]] = (), beyond: bool = False
) -> ProbePlan:
    """Sets that test most forbidden pairs: S tests (i, j) if j is in S and F[i] is disjoint from S.

    For a causal order n - 1 cuts test every pair. The fields' complements at borders come first; with `beyond` those at
    the ends of each run [start, end) always do, and half of the passes are left for other pairs.
    """
    depths: list[int] = []  # where fields or positions differ, ascending; of many, a few evenly spread ones
    for depth in sorted(seen):
        same = depths and torch.equal(fields.at(depths[-1]), fields.at(depth))
        if not (same and torch.equal(seen[depths[-1]], seen[depth])):
            depths.append(depth)
    if len(depths) > _STAGES:
        depths = [depths[i] for i in torch.linspace(0, len(depths) - 1, _STAGES).long().tolist()]
    rows = fields.at(depths[-1]).shape[0]
    chosen: list[list[Tensor]] = []
    tested = forbidden = 0
    for row in range(rows):
        # where nobody looks nothing is forbidden
        stages = [fields.at(depth)[row] | ~seen[depth][:, None] for depth in depths]
        borders = _borders(fields.at(depths[-1])[row], runs or [(0, fields.size)])
        sets, left, total = _greedy(stages, passes, borders, beyond)
        chosen.append(sets)
        tested += (total - left) * (fields.batch // rows)
        forbidden += total * (fields.batch // rows)
    per_pass = map(torch.stack, zip_longest(*chosen, fillvalue=torch.zeros(fields.size, dtype=torch.bool)))
    full = tuple(selected.expand(fields.batch, -1).clone() for selected in per_pass)
    return ProbePlan(full, tested / forbidden if forbidden else 1.0, forbidden)


def batch_sets(batch: int, size: int) -> list[Tensor]:
    """2 ceil(log2 batch) sets of sequences; for any two, some set holds only the first."""
    bits = [torch.arange(batch) >> bit & 1 for bit in range((batch - 1).bit_length())]
    return [(side == value)[:, None].repeat(1, size) for side in bits for value in (0, 1)]


def _greedy(stages: Sequence[Tensor], passes: int, borders: _Borders, beyond: bool) -> tuple[list[Tensor], int, int]:
    size = stages[0].shape[0]
    fields = [field.float() for field in stages]
    untested = [1 - field for field in fields]
    totals = [float(left.sum()) for left in untested]
    chosen: list[Tensor] = []
    limit = max(16, _PLAN_WORK // max(1, size * size * len(stages)))

    def take(candidates: Tensor, most: int, counted: Tensor | float = 1.0) -> None:
        if len(candidates) > limit:
            candidates = candidates[torch.linspace(0, len(candidates) - 1, limit).long()]
        pool = candidates.float()
        rows_of = [(field @ pool.T == 0).float() for field in fields]
        while len(chosen) < most and len(pool):
            gain = torch.zeros(len(pool))
            for rows, left, total in zip(rows_of, untested, totals, strict=True):
                gain += (rows * ((left * counted) @ pool.T)).sum(0) / max(1.0, total)
            best = int(gain.argmax())
            if gain[best] == 0:
                break
            chosen.append(pool[best] > 0)
            for rows, left in zip(rows_of, untested, strict=True):
                left *= 1 - rows[:, best : best + 1] * pool[best]

    always = [*borders.spread, *(borders.ends if beyond else [])]
    room = passes // 2 if beyond and size > _BLOCKS[-1] else 0  # for pairs anywhere else
    take(~stages[-1][always], len(always) if beyond else passes)
    most = max(passes, len(chosen) + room)
    take(~stages[-1][borders.others], passes if beyond else 0)
    candidates = _candidates(stages)
    take(candidates, most)
    if beyond and len(stages) > 1:  # what growing fields forbid to the first layers alone, which cuts never test
        take(candidates, len(chosen) + _EARLY, fields[-1])
    return chosen, int(sum(float(left.sum()) for left in untested)), int(sum(totals))


def _candidates(stages: Sequence[Tensor]) -> Bool[Tensor, "sets n"]:
    size = stages[0].shape[0]
    cuts = [~row for field in reversed(stages) for row in field]
    singles = list(torch.eye(size, dtype=torch.bool))
    widths = [1 << bit for bit in range(1, (size - 1).bit_length())]
    place = torch.arange(size)
    blocks = [place // width == start for width in widths for start in range(-(-size // width))]
    pool = {tuple(candidate.tolist()): candidate for candidate in (*cuts, *singles, *blocks) if candidate.any()}
    return torch.stack(list(pool.values()))
