"""Compares the rows and documents of one batch with themselves alone, and finds by experiments why they differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from attnflow._core.errors import AttnflowError
from attnflow.audit.batch.cutting import Cut, CutBatch, Place, attached_masks, rows_of, stirred
from attnflow.audit.inputs import fresh
from attnflow.audit.packing import as_tensor
from attnflow.audit.rows import as_numbers, leaves
from attnflow.models.passes.evaluation import REFUSALS, precision, refusal, seed_all
from attnflow.models.subject import Subject

_KEPT: Final = ("logits_to_keep", "num_logits_to_keep")  # the last columns of a padded row are not those of the row
_EXPLAINED: Final = 4  # differences whose cause is looked for
_QUIET: Final = 32  # roundings of the largest number that are not looked at; in half precision fewer
_SAME: Final = 0.01  # share of a difference that counts as none beside it
_REFUSED: Final = (AttnflowError, *REFUSALS)
Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """A row, or a document of a packed row, that has other outputs in the batch than alone.

    Attributes:
        row: number of the row in the batch.
        document: number of the document in its row.
        column: the first column of the batch that differs; None for outputs without positions.
        output: name of the output that differs most.
        difference: the largest difference.
        scale: the largest number of that output.
        confirmed: whether it keeps its size in float64.
        cause: the likeliest cause, in words.
    """

    row: int
    document: int
    column: int | None
    output: str
    difference: float
    scale: float
    confirmed: bool
    cause: str

    def __str__(self) -> str:
        where = "" if self.column is None else f" from column {self.column} on"
        size = f"{self.difference:.3g} of {self.scale:.3g}{'' if self.confirmed else ', not in float64'}"
        return f"row {self.row}, document {self.document}: {self.output} differs{where} ({size}): {self.cause}"


class Gap(NamedTuple):
    output: str
    column: int | None
    difference: float
    scale: float

    @property
    def relative(self) -> float:
        return self.difference / (self.scale or 1.0)


class Suspect(NamedTuple):
    part: Cut
    gap: Gap
    alone: Outputs


class AloneComparison:
    def __init__(self, subject: Subject, kwargs: Mapping[str, Any], seed: int) -> None:
        self.subject, self.seed, self.passes = subject, seed, 0
        self.model = model = subject.model
        self.batch = rows_of(subject, {name: value for name, value in kwargs.items() if name not in _KEPT})
        self.base: Outputs = {}
        self.parts: list[Cut] = []
        self.documents = self.compared = 0
        self.outputs: dict[str, None] = {}  # names of those that were compared
        self.uncompared: dict[str, str] = dict(self.batch.unread)
        self.notes: dict[str, None] = {}
        self.differences: list[Difference] = []
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.large = torch.finfo(dtype).eps ** 0.5  # shares of the largest number: no rounding comes to this,
        self.quiet = min(_QUIET * self.large**2, self.large / 8)  # and this is not looked at

    def choose(self, rows: int | None, documents: int | None, places: Sequence[tuple[int, Tensor]] | None) -> None:
        batch = self.batch
        if batch.stuck:
            self.uncompared["rows"] = batch.stuck
        elif places is not None:
            taken = [row for row, _ in places]
            for number, (row, columns) in enumerate(places):
                beside = (axis.real[row].nonzero()[:, 0] for axis in batch.axes[:-1])
                self.parts.append(Cut(row, number, (*beside, columns), taken.count(row) == 1))
            self.documents = len(self.parts)
        else:
            self.documents = len(batch.parts(None))
            parts = [part for part in batch.parts(documents) if not batch.trivial(part)]
            order = sorted({p.row for p in parts}, key=lambda row: sum(int(a.real[row].sum()) for a in batch.axes))
            self.parts = [part for part in parts if part.row in order[:rows]]
        if attached_masks(self.model) and any(len(part.columns[-1]) < batch.axes[-1].length for part in self.parts):
            self.uncompared["rows"] = "the attached mask is made for whole rows, not for parts of them"
            self.parts = []

    def run(self, kwargs: Mapping[str, Any], seed: int = 0) -> Outputs:
        def other(path: str, value: object) -> None:
            if not isinstance(value, int | float) and "cache" not in type(value).__name__.lower():
                self.uncompared.setdefault(path.lstrip("."), f"is a {type(value).__name__}, which is not looked into")

        self.passes += 1
        seed_all(self.seed + seed)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = self.model(**fresh(kwargs))
        return {path.lstrip(".") or "output": tensor for path, tensor in leaves(output, other)}

    def tried(self, kwargs: Mapping[str, Any]) -> Outputs:
        try:
            return self.run(kwargs)
        except _REFUSED:
            return {}

    def begin(self, losses: Mapping[str, Any]) -> None:
        labelled = {**self.batch.kwargs, **losses}
        try:
            self.base = self.run(self.batch.kwargs)
        except REFUSALS:
            if not losses:
                raise
            self.batch, self.base = replace(self.batch, kwargs=labelled), self.run(labelled)
            return
        outputs = self.tried(labelled) if losses else {}
        if set(self.base) <= set(outputs) and any("loss" in n and v.numel() > 1 for n, v in outputs.items()):
            self.batch, self.base = replace(self.batch, kwargs=labelled), outputs

    def look_in_training(self, modes: Sequence[tuple[nn.Module, bool]]) -> None:
        for module, flag in modes:
            module.training = flag
        outputs = self.tried(self.batch.kwargs)
        gaps = [self._distance(n, v, outputs[n], None) for n, v in self.base.items() if n in outputs]
        if not outputs or any(gap.relative > self.large for gap in gaps):
            why = "the model is in it, and gives other outputs than in eval mode: pass training=True"
            self.uncompared["training mode"] = why

    def compare(self) -> None:
        suspects: list[Suspect] = []
        for part in self.parts:
            try:
                alone = self.run(self.batch.alone(part))
            except _REFUSED as error:
                self.uncompared.setdefault(f"row {part.row}, document {part.document}", refusal(error))
                continue
            for name in sorted(set(self.base) ^ set(alone)):
                self.uncompared.setdefault(name, f"is returned {'alone' if name in alone else 'in the batch'} only")
            gaps: list[Gap] = []
            for name in [name for name in self.base if name in alone]:
                gap = self._gap(name, self.base, alone, part)
                if isinstance(gap, Gap):
                    gaps.append(gap)
                elif self.base[name].ndim:
                    self.uncompared.setdefault(name, gap)
                else:
                    self.notes[f"{name} is one number for the whole batch: not compared"] = None
            self.compared += bool(gaps)
            self.outputs |= {gap.output: None for gap in gaps}
            worst = max(gaps, key=lambda gap: (gap.column is not None, gap.relative), default=None)
            if worst is not None and worst.relative > self.quiet:
                suspects.append(Suspect(part, worst, alone))
        for suspect, confirmed in self._no_rounding(suspects):
            if self._moves(self._another, suspect):
                self.uncompared.setdefault(suspect.gap.output, "is drawn at random, in the batch and alone")
                continue
            part, gap, few = suspect.part, suspect.gap, len(self.differences) < _EXPLAINED
            cause = self._cause(suspect) if few else f"not looked for beyond the first {_EXPLAINED}"
            self.differences.append(
                Difference(part.row, part.document, gap.column, gap.output, gap.difference, gap.scale, confirmed, cause)
            )

    def _gap(self, name: str, outputs: Outputs, alone: Outputs, part: Cut, rows: CutBatch | None = None) -> Gap | str:
        place = (rows or self.batch).where(outputs[name], alone[name], part, "encoder" in name)
        if isinstance(place, str):
            return place
        nan = any(tensor.isnan().any() for tensor in place[:2])
        return "holds NaN, which hides what differs" if nan else self._distance(name, *place)

    def _distance(self, name: str, value: Tensor, other: Tensor, place: Place = None) -> Gap:
        if value.shape != other.shape:
            return Gap(name, None, torch.inf, 1.0)
        value, other = (as_numbers(tensor).detach().double() for tensor in (value, other))
        apart = torch.where(value == other, 0.0, (value - other).abs()).nan_to_num(nan=torch.inf)
        scale = max(float(side.abs().nan_to_num(nan=0.0, posinf=0.0).amax()) for side in (value, other))
        column = None
        if place is not None:
            moved = apart.movedim(place[0], 0).flatten(1).amax(1) > self.quiet * scale
            column = int(place[1][moved.nonzero()[0, 0]]) if moved.any() else None
        return Gap(name, column, float(apart.amax()), scale)

    def _no_rounding(self, suspects: Sequence[Suspect]) -> Iterator[tuple[Suspect, bool]]:
        """Those that keep their size in float64 or are too large for rounding, and whether they keep it."""
        exact: list[float | None] = [None] * len(suspects)
        kwargs = self.batch.kwargs
        floating = {n: v.double() for n, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        rows, why = replace(self.batch, kwargs=kwargs | floating), "no number came"
        try:
            with precision(self.model, torch.float64):
                base = self.run(rows.kwargs) if suspects else {}
                for number, (part, gap, _) in enumerate(suspects):
                    double = self._gap(gap.output, base, self.run(rows.alone(part)), part)
                    exact[number] = double.relative if isinstance(double, Gap) else None
        except _REFUSED as error:
            why = refusal(error)
        for suspect, kept in zip(suspects, exact, strict=True):
            gap = suspect.gap
            confirmed = kept is not None and kept > _SAME * gap.relative
            if confirmed or gap.relative > self.large:
                yield suspect, confirmed
            elif kept is None:
                self.uncompared.setdefault(gap.output, f"differs by {gap.difference:.2g}, rounding or not: {why}")
            else:
                self.notes["small differences were rounding: there are none in float64"] = None

    @cached_property
    def _another(self) -> Outputs:
        return self.run(self.batch.kwargs, seed=1)

    # -------- experiments

    def _cause(self, suspect: Suspect) -> str:
        part, batch = suspect.part, self.batch
        cache = "pass use_cache=False: beside a cache, position_ids keep no documents apart"
        if self._equal(self._without_cache, suspect):
            return cache
        if self._equal(self._restarted, suspect):
            words = self._positions_in_words(part)
            return f"{words}; {cache}" if self._uncached and not part.whole else words
        reads = [
            words
            for words, place, where in self._changes(part)
            if where.any() and self._moves(self.tried(stirred(batch, place, where, self.seed)), suspect)
        ]
        if reads:
            return f"it reads {' and '.join(reads)}"
        apart = suspect.gap.difference
        if batch.size > 1 and (row := batch.row(part.row)) is not None:  # the row with its padding, in a batch of one
            apart = self._apart(self.tried(row), suspect, replace(batch, size=1))
        if apart <= self._least(suspect.gap):
            return "the other rows: how many or how long they are, not what they hold"
        shorter = any(len(run) < axis.length for run, axis in zip(part.columns, batch.axes, strict=True))
        if shorter and abs(apart - suspect.gap.difference) <= self._least(suspect.gap):
            return "its place in the row or the length of the row, not what stands there (chunks, windows, positions)"
        return "not known"

    def _moves(self, outputs: Outputs, suspect: Suspect) -> bool:
        part, gap, alone = suspect
        name = gap.output
        if name not in outputs:
            return False
        places = [self.batch.where(o[name], alone[name], part, "encoder" in name) for o in (self.base, outputs)]
        sides = [place[0] for place in places if not isinstance(place, str)]
        return len(sides) == 2 and self._distance(name, sides[0], sides[1]).difference > self._least(gap)

    def _equal(self, outputs: Outputs, suspect: Suspect) -> bool:
        return self._apart(outputs, suspect, self.batch) <= self._least(suspect.gap)

    def _apart(self, outputs: Outputs, suspect: Suspect, rows: CutBatch) -> float:
        """How far an output of an experiment is from the same alone, infinite if it is missing."""
        part, gap, alone = suspect
        if gap.output not in outputs:
            return torch.inf
        other = self._gap(gap.output, outputs, alone, replace(part, row=min(part.row, rows.size - 1)), rows)
        return other.difference if isinstance(other, Gap) else torch.inf

    def _least(self, gap: Gap) -> float:
        return max(self.quiet * gap.scale, _SAME * gap.difference)

    @cached_property
    def _uncached(self) -> dict[str, Any]:
        usual = getattr(self.subject.text_config, "use_cache", True)
        makes = self.subject.takes_use_cache and self.batch.kwargs.get("use_cache", usual) is not False
        return {**self.batch.kwargs, "use_cache": False} if makes else {}

    @cached_property
    def _without_cache(self) -> Outputs:
        return self.tried(self._uncached) if self._uncached else {}

    @cached_property
    def _restarted(self) -> Outputs:
        """The batch with position ids that begin at 0 in every part; nothing where the model takes none."""
        if not self.batch.axes:
            return {}
        axis = self.batch.axes[-1]
        positions = torch.zeros(axis.real.shape, dtype=torch.int64)
        for part in [*self.batch.parts(None), *self.parts]:
            positions[part.row, part.columns[-1]] = torch.arange(len(part.columns[-1]))
        positions = positions.to(self.batch.kwargs[axis.name].device)
        return self.tried({**(self._uncached or self.batch.kwargs), f"{axis.prefix}position_ids": positions})

    def _positions_in_words(self, part: Cut) -> str:
        axis, run = self.batch.axes[-1], part.columns[-1]
        given = self.batch.kwargs.get(f"{axis.prefix}position_ids")
        if given is None:
            if part.whole:
                return "the positions count the padding: pass position_ids, such as attention_mask.cumsum(-1) - 1"
            return "the positions run on over the documents: pass position_ids that restart"
        rows = as_tensor(given).reshape(-1, axis.length)
        counted, right = rows[min(part.row, len(rows) - 1), run], torch.arange(len(run))
        if part.whole and bool((counted - counted[0] == right).all()):
            return f"position_ids count the padding: they begin at {int(counted[0])}"
        if len(run) > 1 and torch.equal(counted[1:], right[:-1]):
            return "the positions restart one token late"
        if len(run) > 1 and torch.equal(counted, right + 1):
            return "the positions restart one token early"
        return "position_ids are not 0, 1, 2, ... there"

    def _changes(self, part: Cut) -> Iterator[tuple[str, int, Tensor]]:
        """(what is changed in words, its axis, where): the other rows, padding, the documents beside it."""
        row = (torch.arange(self.batch.size) == part.row)[:, None]
        for place, axis in enumerate(self.batch.axes):
            column, main = torch.arange(axis.length)[None], place == len(self.batch.axes) - 1
            yield f"the padding{'' if main else f' of {axis.name}'}", place, row & ~axis.real
            if main:
                yield "the other rows", place, ~row & axis.real
                yield "the document before it", place, row & axis.real & (column < part.columns[-1][0])
                yield "the document behind it", place, row & axis.real & (column > part.columns[-1][-1])
