"""Changes positions, sees what moves, and narrows it down to a module, a source and a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.fields import Fields
from attnflow.audit.functions import Function
from attnflow.audit.inputs import Call
from attnflow.audit.packing import all_real
from attnflow.audit.passes import Event, Key, Recording, Runner, refuse_nan
from attnflow.audit.report import Kind, Violation
from attnflow.audit.rows import as_numbers
from attnflow.models.evaluation import REFUSALS, precision

_NOISE: Final = 4.0  # noise is known from a few runs only
_ROUNDING: Final = 64  # units in the last place of the largest value, where only the size of a change can tell


@dataclass(frozen=True)
class Moved:
    """The rows of an event that moved against the declared order."""

    event: Event  # the event, as it was before
    change: Tensor  # largest change of each forbidden row [batch, positions of the event]; 0 elsewhere

    def largest(self) -> tuple[int, int]:
        """(row of the batch, joint position) of the largest change."""
        row, column = divmod(int(self.change.argmax()), self.change.shape[1])
        return row, column + self.event.offset


@dataclass(frozen=True)
class Hit:
    """A perturbation and the first event that it moved."""

    selected: Tensor
    drawn: Call
    moved: Moved
    confirmed: bool | None


class Prober:
    """Perturbs the inputs of one runner and compares every event with the unperturbed pass.

    Where two runs on the same inputs agree exactly, so must all that the order keeps. Any change is looked at in a
    second precision (`is_leak`), since rounding in a mixture of experts moves rows, too.
    """

    def __init__(self, runner: Runner, fields: Fields, seed: int, base: Recording | None = None) -> None:
        self.runner = runner
        self.fields = fields
        self.generator = torch.Generator().manual_seed(seed)
        self.rounding = 0.0  # largest change that was found to be rounding
        self.dirty: set[str] = set()  # modules with an output that moved against the order
        self.stateful: Moved | None = None  # first event that differs because of the runs in between
        self._pads = ~all_real(runner.inputs)
        self.moved: set[str] = set()  # outputs of the model without positions that moved at all
        self.base = runner.arranged(runner.record(runner.inputs.base) if base is None else base)
        for event in self.base.values():
            if event.key.side == "out" and not event.pooled:
                refuse_nan(runner.inputs, event.key.module, event.offset, event.values)
        self.layered = runner.layer_calls > 0
        self._noise: dict[Key, float] = {}
        self._other: Recording | None = None
        self._other_fails = False

    @property
    def noise(self) -> float:
        """The largest difference between two runs on the same inputs."""
        return max(self._noise.values(), default=0.0)

    def settle(self) -> None:
        """Repeat the base pass after itself, which shows noise, and after a perturbed one, which shows state."""
        inputs, every = self.runner.inputs, self._every(True)
        first = self._moves(self.runner, inputs.base, every)
        if first:
            self.base = self.runner.record(inputs.base)
            again = self._moves(self.runner, inputs.base, every)
            beyond = isinstance(self.runner.model, Function) and any(_size(moved)[1] for moved in (*first, *again))
            if not again or beyond:  # of a function all generators are seeded anew: a large difference is no noise
                self.stateful = first[0]
                return
            for moved in (*first, *again):
                key = moved.event.key
                self._noise[key] = max(self._noise.get(key, 0.0), float(moved.change.max()))
        self._moves(self.runner, inputs.changed(every, inputs.draw(self.generator)), ~every)
        self.stateful = next(iter(self._moves(self.runner, inputs.base, every)), None)
        if self.stateful is None and isinstance(self.runner.model, Function):
            self.stateful = self._in_another_order(self.runner.model.twin)

    def _in_another_order(self, twin: Function | None) -> Moved | None:
        """The first difference of a copy that is called with changed inputs first: what a first call leaves behind."""
        if twin is None:
            return None
        inputs, every = self.runner.inputs, self._every(True)
        other = Runner(twin, inputs, "layers", self.runner.seed)
        other.layouts = self.runner.layouts
        self._moves(other, inputs.changed(every, inputs.draw(self.generator)), ~every)
        return next((moved for moved in self._moves(other, inputs.base, every) if _size(moved)[0].any()), None)

    def probe(self, selected: Tensor, rows: Sequence[int] | None = None) -> Hit | None:
        """Change the `selected` positions; the first event that moves against the order, in all or these `rows`."""
        drawn = self.runner.inputs.draw(self.generator)
        clean: dict[int, Tensor] = {}
        moves: list[Moved] = []

        def visit(event: Event) -> None:
            depth = max(event.depth, 1) if self.layered else -1
            if depth not in clean:
                clean[depth] = self.fields.clean(depth, selected)
                if rows is not None:
                    others = torch.ones(len(selected), dtype=torch.bool).index_fill(0, torch.tensor(list(rows)), False)
                    clean[depth][others] = False
            self._compare(event, clean[depth], moves)

        with torch.no_grad():
            self.runner.run(self.runner.inputs.changed(selected, drawn), visit)
        if not moves:
            return None
        real, confirmed = self._confirmed(self._consequential(moves), selected, drawn)
        real = self._consequential(real)
        self.dirty |= {moved.event.key.module for moved in real if moved.event.key.side == "out"}
        return Hit(selected, drawn, real[0], confirmed) if real else None

    def violation(self, hit: Hit) -> Violation:
        """Narrow a hit down to one source, in about log2(size of the changed set) passes.

        The changed positions are ranked by the declared order. The source is the last one needed to move the target,
        since a leaked state may also depend on forbidden inputs below it.
        """
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
        tokens, values = (self._ids(self.runner.inputs.base, source_row), self._ids(call, source_row)), (before, now)
        if before.numel() > 1 or not tokens[0]:
            tokens, values = (), ()
        return Violation(
            *(kind, event.layer, event.blame, source, target, change, source_row, row, self.runner.path, hit.confirmed),
            tokens=tokens,
            values=tuple(float(value) for value in values),
        )

    def padding_read(self) -> list[Violation]:
        """What moves with other inputs where their masks hide them, as encoder states that a decoder is called with."""
        found: list[Violation] = []
        inputs, none, watched = self.runner.inputs, self._every(False), self._every(True)
        for slot in inputs.slots:  # what stands beside the tokens may be of the other input itself
            beside = set(range(slot.length)) - set(slot.places or range(slot.length))
            watched[:, [slot.offset + place for place in beside]] = False
        for name, changed in inputs.hidden(self.generator).items():
            drawn = inputs.draw(self.generator)
            drawn = Call({**drawn.kwargs, name: changed}, drawn.noise)
            moves = self._moves(self.runner, inputs.changed(none, drawn), watched)
            moves = [moved for moved in moves if moved.event.raw.shape[1:2] != changed.shape[1:2]]  # its own
            real, confirmed = self._confirmed(self._consequential(moves), none, drawn) if moves else ([], None)
            for moved in self._consequential(real)[:1]:
                event, (row, target) = moved.event, moved.largest()
                place = "padding", event.layer, event.blame, None, target, float(moved.change.max()), None, row
                found.append(Violation(*place, self.runner.path, confirmed, why=f"padding of {name}"))
        return found

    def rows_beside(self, name: str) -> list[Violation]:
        """The first output whose other rows, on either of its first axes, move with row 0 of another tower's input."""
        count, dtype = len(self.runner.inputs.kwargs[name]), self.runner.dtype
        value = self.runner.inputs.kwargs[name].clone()
        value[0] = value[0].flip(-1) + (value.std() if value.is_floating_point() else 0)
        inputs = replace(self.runner.inputs, kwargs={**self.runner.inputs.kwargs, name: value})
        calls = self.runner.inputs, inputs
        recordings = [self.runner.record(call.base) for call in calls]
        other, confirmed = other_precision(dtype), True
        try:
            with precision(self.runner.model, other):
                recordings += [self.runner.record(call.in_precision(other).base) for call in calls]
        except REFUSALS:  # what moved stands, unconfirmed
            recordings, confirmed = recordings[:2] * 2, None
        for key in recordings[0]:
            if key.module or any(key not in recording for recording in recordings):
                continue
            tensors = [as_numbers(recording[key].raw) for recording in recordings]
            if not tensors[0].ndim or len({tensor.shape for tensor in tensors}) > 1:
                continue
            turned = [tensor.transpose(0, 1) for tensor in tensors if tensor.ndim > 1]  # columns, or stacked layers
            readings = [reading for reading in (tensors, turned) if reading]
            changes: list[Tensor] = []
            for before, after, *others in ([tensor.flatten(1)[:, None] for tensor in read] for read in readings):
                change = row_change(after, before)[:, 0]
                leak = is_leak(change[:, None], before, others[0], others[1], dtype)[:, 0]
                changes += [torch.where(leak, change, 0.0)[1:]] if len(change) == count else []
            if changes and all(change.any() for change in changes):
                change, label = changes[0], f"{type(self.runner.model).__name__}{key.leaf}"
                place = "batch", None, label, None, 0, float(change.max()), 0, 1 + int(change.argmax())
                return [Violation(*place, confirmed=confirmed, why=f"row 0 of {name}")]
        return []

    def _ids(self, call: Call, row: int) -> tuple[int, ...]:
        """The token ids of one sequence of a call; none of vectors."""
        name = self.runner.inputs.slots[0].name
        ids: Any = None if name is None or len(self.runner.inputs.slots) > 1 else call.kwargs[name]
        return () if ids is None or ids.is_floating_point() else tuple(torch.atleast_2d(ids)[row].tolist())

    def state_violation(self) -> Violation:
        """The state that `settle` saw, as a violation."""
        assert self.stateful is not None
        event, (row, target) = self.stateful.event, self.stateful.largest()
        change = float(self.stateful.change.max())
        return Violation("state", event.layer, event.blame, None, target, change, None, row, self.runner.path)

    def _every(self, value: bool) -> Tensor:
        return torch.full((self.runner.inputs.batch, self.runner.inputs.size), value)

    def _moves(self, runner: Runner, call: Call, watched: Tensor) -> list[Moved]:
        """What differs from the unperturbed pass in one call, of the `watched` positions."""
        moves: list[Moved] = []
        with torch.no_grad():
            runner.run(call, lambda event: self._compare(event, watched, moves))
        return moves

    def _compare(self, event: Event, watched: Tensor, moves: list[Moved]) -> None:
        before = self.base.get(event.key)
        if event.pooled and (before is None or not torch.equal(before.values, event.values)):
            self.moved.add(event.key.leaf)
        if before is None or before.values.shape != event.values.shape:
            return
        if event.pooled:
            if self.runner.layouts[event.key.leaf].pooled:  # else rows may be pads
                watched = watched | self._pads
            watched = watched.all(1, keepdim=True)
        else:
            watched = watched[:, event.offset : event.offset + event.values.shape[1]]
        if len(event.values) < len(watched):  # one for all sequences: it must hold still where it must for each of them
            watched = watched.all(0, keepdim=True)
        rows = watched.to(event.values.device)
        if torch.equal(event.values[rows], before.values[rows]):
            return
        change = row_change(event.values, before.values)
        change = torch.where(watched & (change > _NOISE * self._noise.get(event.key, 0.0)), change, 0.0)
        if change.any():
            moves.append(Moved(before, change))

    def _consequential(self, moves: list[Moved]) -> list[Moved]:
        """Keep rows that also move in the output of the layer or model: scores that are masked later do not leak."""
        ends = {key for key in self.base if self.runner.is_end(key)}
        if not ends:
            return moves
        reached = self._every(False)
        for moved in moves:
            if moved.event.key in ends:
                reached[:, moved.event.offset : moved.event.offset + moved.change.shape[1]] |= moved.change > 0
        there: list[Moved] = []
        for moved in moves:
            rows = reached[:, moved.event.offset : moved.event.offset + moved.change.shape[1]]
            rows = rows.any(0, keepdim=True) if len(moved.change) < len(rows) else rows
            there.append(Moved(moved.event, torch.where(rows, moved.change, 0.0)))
        return [moved for moved in there if moved.change.any()]

    def _confirmed(self, moves: list[Moved], selected: Tensor, drawn: Call) -> tuple[list[Moved], bool | None]:
        """(the moves that are not rounding, whether that could be decided)."""
        other, function = other_precision(self.runner.dtype), isinstance(self.runner.model, Function)
        if self._other_fails:
            return self._by_size(moves) if function else (moves, None)
        inputs = self.runner.inputs.in_precision(other)
        try:
            with precision(self.runner.model, other):
                if self._other is None:
                    self._other = self.runner.record(inputs.base)
                second = self.runner.record(inputs.changed(selected, drawn))
        except (*REFUSALS, UnsupportedArchitecture):  # what moved stands, unconfirmed
            self._other_fails = True
            return self._by_size(moves) if function else (moves, None)
        if function and all(torch.equal(each.values, self._other[key].values) for key, each in self.base.items()):
            self._other_fails = True  # it computes in a precision of its own
            return self._by_size(moves)
        real: list[Moved] = []
        unsure = False
        for moved in moves:
            before, after = self._other.get(moved.event.key), second.get(moved.event.key)
            if before is None or after is None or before.values.shape != after.values.shape:
                real.append(moved)
                continue
            if not bool(before.values.isfinite().all()) and bool(moved.event.values.isfinite().all()):
                unsure = True  # a model whose masks overflow in the other precision: nothing is told by NaN
                real.append(moved)
                continue
            leak = is_leak(moved.change, moved.event.values, before.values, after.values, self.runner.dtype)
            self.rounding = max(self.rounding, float(torch.where(leak, 0.0, moved.change).max()))
            if (leak & (moved.change > 0)).any():
                real.append(Moved(moved.event, torch.where(leak, moved.change, 0.0)))
        return real, None if unsure else True

    def _by_size(self, moves: list[Moved]) -> tuple[list[Moved], bool | None]:
        """(the moves that exceed rounding, True if one does by far): where nothing runs in another precision."""
        for moved in moves:
            self.rounding = max(self.rounding, float(torch.where(_size(moved)[0], 0.0, moved.change).max()))
        real = [Moved(moved.event, torch.where(_size(moved)[0], moved.change, 0.0)) for moved in moves]
        real = [moved for moved in real if moved.change.any()]
        return real, any(_size(moved)[1] for moved in real) or None

    def _rows(
        self, pairs: Sequence[tuple[int, int]], hit: Hit, row: int, target: int
    ) -> tuple[Call, float, Tensor, Tensor]:
        """(the call with these positions changed, how far the target moves, its vector before, and then)."""
        selected = torch.zeros_like(hit.selected)
        for b, j in pairs:
            selected[b, j] = True
        key = hit.moved.event.key
        call = self.runner.inputs.changed(selected, hit.drawn)
        after = self.runner.record(call)
        place = row, target - self.base[key].offset
        before = self.base[key].values[place]
        now = after[key].values[place] if key in after else before
        return call, float(row_change(now[None, None], before[None, None])), before, now


def _size(moved: Moved) -> tuple[Tensor, bool]:
    """(which rows moved by more than the rounding of their values, whether one did by far)."""
    values = moved.event.values
    scale = float(values.double().abs().nan_to_num(nan=0.0, posinf=0.0).max())
    eps = torch.finfo(values.dtype).eps
    return moved.change > _ROUNDING * eps * scale, float(moved.change.max()) > math.sqrt(eps) * scale


def row_change(after: Tensor, before: Tensor) -> Tensor:
    """The largest absolute change of each row, float64 [batch, positions] on the CPU; NaN equals NaN."""
    same = (after == before) | (after.isnan() & before.isnan())
    difference = (after.double() - before.double()).abs().nan_to_num(nan=torch.inf)
    return torch.where(same, 0.0, difference).amax(-1).cpu()


def other_precision(dtype: torch.dtype) -> torch.dtype:
    """The precision to compare with."""
    return torch.float32 if dtype == torch.float64 else torch.float64


def is_leak(change: Tensor, values: Tensor, other_values: Tensor, other_moved: Tensor, dtype: torch.dtype) -> Tensor:
    """Which rows moved by more than rounding; `other_values` and `other_moved` are in the other precision.

    A leak keeps its size in float64, while rounding shrinks with the precision; the border is their geometric mean. In
    float64 the rounding is estimated by scaling that of float32. A leak exceeds one unit in the last place and eight
    times the estimate, because both runs err and only a sample of the errors was seen.
    """
    eps, other = torch.finfo(dtype).eps, torch.finfo(other_precision(dtype)).eps
    if other < eps:
        return row_change(other_moved, other_values) >= change * math.sqrt(other / eps)
    error = float(row_change(values, other_values).max()) * eps / other
    return change > 8 * (error + eps * float(values.abs().nan_to_num(nan=0.0).max()))
