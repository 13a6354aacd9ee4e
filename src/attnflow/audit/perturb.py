"""Changes positions, sees what moves, and narrows it down to a module, a source and a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from attnflow._core.errors import RankFailed, UnsupportedArchitecture
from attnflow.audit import rounding
from attnflow.audit.choices import separated
from attnflow.audit.fields import Fields
from attnflow.audit.functions import Function
from attnflow.audit.inputs import Variation
from attnflow.audit.passes import Event, Key, Recording, Runner, put_back, refuse_nan
from attnflow.audit.report import Kind, Violation
from attnflow.models.passes.evaluation import REFUSALS, precision
from attnflow.models.subject import Subject

_NOISE: Final = 4.0  # noise is known from a few runs only


@dataclass(frozen=True)
class Moved:
    event: Event  # the event, as it was before
    change: Tensor  # largest change of each forbidden row [batch, positions of the event]; 0 elsewhere
    confirmed: bool | None = None  # as of a violation

    def largest(self) -> tuple[int, int]:
        row, column = divmod(int(self.change.argmax()), self.change.shape[1])
        return row, column + self.event.offset


@dataclass(frozen=True)
class Hit:
    selected: Tensor
    drawn: Variation
    moved: Moved


class Prober:
    """Perturbs the inputs of one runner; what moves against the order is looked at in a second precision (`recurs`)."""

    def __init__(self, runner: Runner, fields: Fields, seed: int, base: Recording | None = None) -> None:
        self.runner = runner
        self.fields = fields
        self.generator = torch.Generator().manual_seed(seed)
        self.rounding = 0.0  # largest change that was found to be rounding
        self.dirty: set[str] = set()  # modules with an output that moved against the order
        self.stateful: Moved | None = None  # first event that differs because of the runs in between
        self.moved: set[str] = set()  # outputs of the model without positions that moved at all
        self.base = runner.arranged(runner.record(runner.inputs.base) if base is None else base)
        for event in self.base.values():
            if event.key.side == "out" and not event.pooled:
                refuse_nan(runner.inputs, event.key.module, event.offset, event.values)
        self.layered = runner.layer_calls > 0
        self._noise: dict[Key, float] = {}
        self._every = torch.ones(runner.inputs.batch, runner.inputs.size, dtype=torch.bool)
        self._unit = max((rounding.unit(event.values) for event in self.base.values()), default=0.0)
        self._other: Recording | None = None
        self._apart: set[Key] | None = None  # tensors that float64 computes otherwise from the same inputs
        self._other_fails = False

    @property
    def noise(self) -> float:
        return max(self._noise.values(), default=0.0)

    def settle(self) -> None:
        """Repeat the base pass after itself, which shows noise, and after a perturbed one, which shows state."""
        inputs = self.runner.inputs
        first = self._moves(inputs.base)
        if first:
            self.base = self.runner.record(inputs.base)
            again = self._moves(inputs.base)
            beyond = isinstance(self.runner.model, Function) and any(_size(moved)[1] for moved in (*first, *again))
            if not again or beyond:  # of a function all generators are seeded anew: a large difference is no noise
                self.stateful = first[0]
                return
            for moved in (*first, *again):
                key = moved.event.key
                self._noise[key] = max(self._noise.get(key, 0.0), float(moved.change.max()))
        self.stateful = next(iter(self._after_others(self.runner)), None)
        model = self.runner.model
        if self.stateful is None and isinstance(model, Function) and model.twin is not None:
            # A copy that is called with changed inputs first shows what a first call leaves behind.
            twin = Runner(replace(inputs, subject=Subject(model.twin)), "layers", self.runner.seed)
            twin.layouts = self.runner.layouts
            self.stateful = next((moved for moved in self._after_others(twin) if _size(moved)[0].any()), None)

    def _after_others(self, runner: Runner) -> list[Moved]:
        """What differs in a pass on the same inputs that follows one on other inputs."""
        inputs = self.runner.inputs
        self._moves(inputs.changed(self._every, inputs.draw(self.generator)), lambda _: ~self._every, runner)
        return self._moves(inputs.base, runner=runner)

    def probe(self, selected: Tensor, rows: Sequence[int] | None = None) -> Hit | None:
        """Change the `selected` positions; the first event that moves against the order, in all or these `rows`."""
        drawn = self.runner.inputs.draw(self.generator)
        kept = self._every if rows is None else torch.zeros_like(self._every).index_fill(0, torch.tensor(rows), True)

        @cache
        def clean(depth: int) -> Tensor:
            return self.fields.clean(depth, selected) & kept

        def watched(event: Event) -> Tensor:
            return clean(max(event.depth, 1) if self.layered else -1)

        call = self.runner.inputs.changed(selected, drawn)
        moves = self._consequential(self._moves(call, watched))
        real = self._real(moves, selected, drawn, watched) if moves else []
        carried = moves if real and real[0].confirmed is False else real
        self.dirty |= {moved.event.key.module for moved in carried if moved.event.key.side == "out"}
        return Hit(selected, drawn, real[0]) if real else None

    def unmoved(self, selected: Tensor) -> dict[str, list[int]]:
        """{path of an output that pools: the sequences whose row holds still when the `selected` positions change}."""
        still: dict[str, Tensor] = {}

        def visit(event: Event) -> None:
            before = self.base.get(event.key)
            if event.pooled and before is not None and self.runner.layouts[event.key.leaf].pools:
                moved = (event.values != before.values).flatten(1).any(1).cpu()
                still[event.key.leaf] = still.get(event.key.leaf, torch.ones_like(moved)) & ~moved

        with torch.no_grad():
            for _ in range(2):
                self.runner.run(self.runner.inputs.changed(selected, self.runner.inputs.draw(self.generator)), visit)
        return {path: rows.nonzero()[:, 0].tolist() for path, rows in still.items() if rows.any()}

    def violation(self, hit: Hit) -> Violation:
        """Halve a hit, ranked by the order, to the last source needed: a leaked state may depend on inputs below it."""
        event, (row, target) = hit.moved.event, hit.moved.largest()
        ranked = self.fields.ranked([(b, j) for b, j in hit.selected.nonzero().tolist()], row)
        # the least change that counts while the changed set is halved
        floor = max(self.rounding, _NOISE * self._noise.get(event.key, 0.0))
        floor = math.sqrt(floor * float(hit.moved.change.max())) if self.rounding else floor
        low, high = 0, len(ranked)  # ranked[low:] moves the target, ranked[high:] does not
        while high - low > 1:
            middle = (low + high) // 2
            moves = self._rows(ranked[middle:], hit, row, target)[1] > floor
            low, high = (middle, high) if moves else (low, middle)
        source_row, source = ranked[low]
        call, change, before, now = self._rows(ranked[low:], hit, row, target)
        kind: Kind = "order" if source_row == row else "batch"
        place = kind, event.layer, event.blame, source, target, change, source_row, row, self.runner.path
        tokens = self._ids(self.runner.inputs.base, source_row), self._ids(call, source_row)
        is_score = before.numel() == 1 and bool(tokens[0])
        shown = (tokens, (float(before), float(now))) if is_score else ((), ())
        calls = self.runner.inputs.base, call
        through, vote = "", ""
        if not self.runner.several:  # ranks choose otherwise, and one that ran more often would wait for the others
            through, vote = separated(
                lambda changed: self._vector(calls[changed], event.key, row, target),
                lambda vector: _distance(vector, before) > floor,
            )
        return Violation(*place, hit.moved.confirmed, *shown, through=through, vote=vote)

    def padding_read(self) -> list[Violation]:
        violations: list[Violation] = []
        inputs, none, watched = self.runner.inputs, ~self._every, self._every.clone()
        for slot in inputs.slots:  # what stands beside the tokens may be of the other input itself
            beside = set(range(slot.length)) - set(slot.places or range(slot.length))
            watched[:, [slot.offset + place for place in beside]] = False
        for name, changed in inputs.hidden(self.generator).items():
            drawn = inputs.draw(self.generator)
            drawn = Variation({**drawn.kwargs, name: changed}, drawn.noise)
            moves = self._moves(inputs.changed(none, drawn), lambda _: watched)
            moves = [moved for moved in moves if moved.event.raw.shape[1:2] != changed.shape[1:2]]  # its own
            real = self._real(self._consequential(moves), none, drawn, lambda _: watched) if moves else []
            for moved in real[:1]:
                event, (row, target) = moved.event, moved.largest()
                place = "padding", event.layer, event.blame, None, target, float(moved.change.max()), None, row
                violations.append(Violation(*place, self.runner.path, moved.confirmed, why=f"padding of {name}"))
        return violations

    def _ids(self, call: Variation, row: int) -> tuple[int, ...]:
        name = self.runner.inputs.slots[0].name
        ids: Any = None if name is None or len(self.runner.inputs.slots) > 1 else call.kwargs[name]
        return () if ids is None or ids.is_floating_point() else tuple(torch.atleast_2d(ids)[row].tolist())

    def state_violation(self) -> Violation:
        assert self.stateful is not None
        event, (row, target) = self.stateful.event, self.stateful.largest()
        change = float(self.stateful.change.max())
        return Violation("state", event.layer, event.blame, None, target, change, None, row, self.runner.path)

    def _moves(
        self,
        call: Variation,
        watched: Callable[[Event], Tensor] | None = None,
        runner: Runner | None = None,
        alone: bool = False,
    ) -> list[Moved]:
        """What differs in one call; if `alone`, every module gets these rows as before, so that a change is its own."""
        moves: list[Moved] = []

        def visit(event: Event) -> None:
            count = len(moves)
            self._compare(event, self._every if watched is None else watched(event), moves)
            if alone and len(moves) > count:
                rows = (moves[-1].change > 0)[:, :, None].to(event.values.device)
                put_back(event, torch.where(rows, self.base[event.key].values, event.values))

        with torch.no_grad():
            (runner or self.runner).run(call, visit)
        self._agree(moves)
        return moves

    def _agree(self, moves: list[Moved]) -> None:
        """Raise on every rank if those of a sharded model saw other moves: their next passes would not be the same."""
        processes = self.runner.inputs.processes
        if processes is None or self.runner.inputs.joins:
            return
        seen = processes.gather([(moved.event.blame, float(moved.change.sum())) for moved in moves])
        for others in seen:
            sizes = [abs(a - b) > 1e-3 * abs(a) for (_, a), (_, b) in zip(seen[0], others, strict=False)]
            if [name for name, _ in others] != [name for name, _ in seen[0]] or any(sizes):
                first = next(iter(seen[0] + others))[0]
                raise RankFailed(f"ranks compute other values from the same changed inputs, first near {first}")

    def _compare(self, event: Event, watched: Tensor, moves: list[Moved]) -> None:
        before = self.base.get(event.key)
        if event.pooled and (before is None or not torch.equal(before.values, event.values)):
            self.moved.add(event.key.leaf)
        if before is None or before.values.shape != event.values.shape:
            return
        if event.pooled:
            layout = self.runner.layouts[event.key.leaf]
            if layout.pools or layout.pooled:  # else rows may be pads
                watched = watched | ~self.runner.inputs.real
            watched = watched.all(1, keepdim=True)
        else:
            watched = watched[:, event.offset : event.offset + event.values.shape[1]]
        if len(event.values) < len(watched):  # one for all sequences: it must hold still where it must for each of them
            watched = watched.all(0, keepdim=True)
        rows = watched.to(event.values.device)
        if torch.equal(event.values[rows], before.values[rows]):
            return
        change = rounding.row_change(event.values, before.values)
        change = torch.where(watched & (change > _NOISE * self._noise.get(event.key, 0.0)), change, 0.0)
        if change.any():
            moves.append(Moved(before, change))

    def _consequential(self, moves: list[Moved]) -> list[Moved]:
        """Keep rows that also move in the output of the layer or model: scores that are masked later do not leak."""
        ends = {key for key in self.base if self.runner.is_end(key)}
        if not ends:
            return moves
        reached = ~self._every
        for moved in moves:
            if moved.event.key in ends:
                reached[:, moved.event.offset : moved.event.offset + moved.change.shape[1]] |= moved.change > 0
        there: list[Moved] = []
        for moved in moves:
            rows = reached[:, moved.event.offset : moved.event.offset + moved.change.shape[1]]
            rows = rows.any(0, keepdim=True) if len(moved.change) < len(rows) else rows
            there.append(_within(moved, rows))
        return [moved for moved in there if moved.change.any()]

    def _real(
        self, moves: list[Moved], selected: Tensor, drawn: Variation, watched: Callable[[Event], Tensor]
    ) -> list[Moved]:
        other, function = rounding.other_precision(self.runner.dtype), isinstance(self.runner.model, Function)
        if self._other_fails:
            return self._by_size(moves) if function else moves
        inputs = self.runner.inputs.in_precision(other)
        try:
            with precision(self.runner.model, other):
                if self._other is None:
                    self._other = self.runner.record(inputs.base)
                second = self.runner.record(inputs.changed(selected, drawn))
        except (*REFUSALS, UnsupportedArchitecture):  # what moved stands, unconfirmed
            self._other_fails = True
            return self._by_size(moves) if function else moves
        if function and all(torch.equal(each.values, self._other[key].values) for key, each in self.base.items()):
            self._other_fails = True  # it computes in a precision of its own
            return self._by_size(moves)
        real: list[Moved] = []
        left: list[Moved] = []
        for moved in moves:
            before, after = self._other.get(moved.event.key), second.get(moved.event.key)
            if before is None or after is None or before.values.shape != after.values.shape:
                real.append(moved)
                continue
            if not before.values.isfinite().all() and moved.event.values.isfinite().all():
                real.append(moved)  # a model whose masks overflow in the other precision: nothing is told by NaN
                continue
            leak = rounding.recurs(moved.change, moved.event.values, before.values, after.values, self.runner.dtype)
            parts = (torch.where(leak, moved.change, 0.0), True), (torch.where(leak, 0.0, moved.change), None)
            for part, (change, confirmed) in zip((real, left), parts, strict=True):
                part += [Moved(moved.event, change, confirmed)] if change.any() else []
        real = self._consequential(real)
        if left and self.runner.dtype != torch.float64:
            real += self._unconfirmed(left, selected, drawn, watched)
        if not any(moved.confirmed is False for moved in real):  # else what is left may carry such a change on
            self.rounding = max([self.rounding, *(float(moved.change.max()) for moved in left)])
        places = {key: place for place, key in enumerate(self.base)}
        return sorted(real, key=lambda moved: places[moved.event.key])

    def _unconfirmed(
        self, left: list[Moved], selected: Tensor, drawn: Variation, watched: Callable[[Event], Tensor]
    ) -> list[Moved]:
        """Of the moves that float64 lacks, those too large for one module, or of one that computes otherwise there."""
        large = [moved for moved in left if (moved.change > self._bound(moved.event)).any()]
        if large and not isinstance(self.runner.model, Function):
            alone = self._moves(self.runner.inputs.changed(selected, drawn), watched, alone=True)
            beyond = {moved.event.key: moved.change > self._bound(moved.event) for moved in alone}
            large = [_within(moved, beyond[moved.event.key]) for moved in left if moved.event.key in beyond]
            large = [moved for moved in large if moved.change.any()]
        if large or isinstance(self.runner.model, Function):
            return [replace(moved, confirmed=False) for moved in large]
        if self._apart is None:
            self._apart = self._computed_otherwise()
        return [replace(moved, confirmed=False) for moved in left if moved.event.key in self._apart]

    def _computed_otherwise(self) -> set[Key]:
        """The tensors where float64 computes most rows far otherwise, from the very same inputs."""
        apart: set[Key] = set()

        def visit(event: Event) -> None:
            before = self.base.get(event.key)
            if before is not None and before.values.shape == event.values.shape and not event.pooled:
                apart.update([event.key] * rounding.computed_otherwise(event.values, before.values, self._unit))
                put_back(event, before.values)

        other = rounding.other_precision(self.runner.dtype)
        with torch.no_grad(), precision(self.runner.model, other):
            self.runner.run(self.runner.inputs.in_precision(other).base, visit)
        return apart

    def _bound(self, event: Event) -> float:
        return rounding.rounding_bound(event.values, self._unit)

    def _by_size(self, moves: list[Moved]) -> list[Moved]:
        """The moves that exceed rounding, confirmed if one does by far: where nothing runs in another precision."""
        for moved in moves:
            self.rounding = max(self.rounding, float(torch.where(_size(moved)[0], 0.0, moved.change).max()))
        real = [_within(moved, _size(moved)[0]) for moved in moves]
        real = [moved for moved in real if moved.change.any()]
        confirmed = any(_size(moved)[1] for moved in real) or None
        return self._consequential([replace(moved, confirmed=confirmed) for moved in real])

    def _rows(
        self, pairs: Sequence[tuple[int, int]], hit: Hit, row: int, target: int
    ) -> tuple[Variation, float, Tensor, Tensor]:
        """(the call with these positions changed, how far the target moves, its vector before, and then)."""
        selected = torch.zeros_like(hit.selected)
        for b, j in pairs:
            selected[b, j] = True
        call = self.runner.inputs.changed(selected, hit.drawn)
        base = self.base[hit.moved.event.key]
        before, now = base.values[row, target - base.offset], self._vector(call, base.key, row, target)
        return call, _distance(now, before), before, now

    def _vector(self, call: Variation, key: Key, row: int, target: int) -> Tensor:
        """The target's vector in the pass of a call; that of the base pass where the call has none."""
        base = self.base[key]
        return self.runner.record(call).get(key, base).values[row, target - base.offset]


def _distance(now: Tensor, before: Tensor) -> float:
    return float(rounding.row_change(now[None, None], before[None, None]))


def _within(moved: Moved, rows: Tensor) -> Moved:
    return replace(moved, change=torch.where(rows, moved.change, 0.0))


def _size(moved: Moved) -> tuple[Tensor, bool]:
    values, eps = moved.event.values, torch.finfo(moved.event.values.dtype).eps
    far = math.sqrt(eps) * rounding.scale_of(values)
    return moved.change > rounding.rounding_bound(values, eps), float(moved.change.max()) > far
