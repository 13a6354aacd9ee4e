"""Replays layers alone: which of its own inputs move a layer call's output, and which allowed ones do not."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import plural
from attnflow.audit.declared import pairs_passed
from attnflow.audit.fields import Relation
from attnflow.audit.functions import Function
from attnflow.audit.inputs import Inputs, fresh
from attnflow.audit.passes import frame_of
from attnflow.audit.report import Violation, few
from attnflow.audit.rounding import row_change
from attnflow.audit.rows import Frame, canonical
from attnflow.audit.survey import CallSurvey, LayerCall
from attnflow.models.anatomy.mixing import attends, moves_between_positions
from attnflow.models.passes.evaluation import REFUSALS, precision, refusal
from attnflow.models.passes.processes import stores_shards
from attnflow.models.passes.watching import Call, calls_of
from attnflow.models.subject import unwrapped

Outputs = dict[tuple[int, int], Tensor]  # {(joint position of the first row, rows): [batch, rows, features]}

_CARRIERS: Final = ("hidden_states", "encoder_hidden_states")
_COLUMNS: Final = 4  # positions that are tried where missing pairs are only noted
_SAMPLES: Final = 3


def layer_calls(inputs: Inputs) -> list[Call]:
    layers = {name: unwrapped(inputs.model.get_submodule(name)) for name in inputs.layers}
    return calls_of(layers, lambda: inputs.model(**fresh(inputs.kwargs)))


class ReplayedLayer:
    depth: Final = 1  # layers, each of which rounds

    def __init__(self, call: Call, name: str, frame: Frame, generator: torch.Generator) -> None:
        self.module = call.module
        self._arguments, self._name, self._frame, self._generator = call.arguments(), name, frame, generator
        self._tensor = cast(Tensor, self._arguments[name]).detach()
        self.dtype = self._tensor.dtype
        rows, self._offset = cast(tuple[Tensor, int], _rows(self._tensor, frame))
        self.columns = range(self._offset, self._offset + rows.shape[1])
        self._scale = float(rows.double().std(correction=0)) or 1.0
        self._noise: dict[int, Tensor] = {}

    def outputs(self, dtype: torch.dtype | None, column: int | None = None, sample: int = 0) -> Outputs:
        moved = self._tensor.clone()
        if column is not None:
            rows = cast(tuple[Tensor, int], _rows(moved, self._frame))[0]
            if sample not in self._noise:
                noise = torch.randn(rows.shape, generator=self._generator) * self._scale
                self._noise[sample] = noise.to(moved)
            rows[:, column - self._offset] += self._noise[sample][:, column - self._offset]
        bound = inspect.signature(self.module.forward).bind_partial()
        arguments = {**self._arguments, self._name: moved}
        bound.arguments.update({name: _isolated(value, dtype, len(self.columns)) for name, value in arguments.items()})
        with torch.no_grad():
            output = self.module.forward(*bound.args, **bound.kwargs)
        first = cast(tuple[Any, ...], output)[0] if isinstance(output, tuple | list) else output
        view = _rows(first, self._frame) if isinstance(first, Tensor) else None
        if view is None:
            raise UnsupportedArchitecture(
                f"{type(self.module).__name__} returns no tensor [batch, n, width]: measure the model with by='output'"
            )
        return {(view[1], view[0].shape[1]): view[0]}


def replayed(inputs: Inputs, call: Call, generator: torch.Generator) -> list[ReplayedLayer]:
    """A layer call as a function of each input with information: its first tensor, and a decoder's encoder states."""
    if any(map(stores_shards, inputs.model.modules())):
        raise UnsupportedArchitecture(
            "FSDP gathers weights only in calls of the whole model, so that no layer runs alone: measure the model "
            "with by='output', or load it on one process"
        )
    frame, arguments = frame_of(inputs), call.arguments()
    names = [name for name in arguments if name in (next(iter(arguments)), *_CARRIERS)]
    tensors = {name: value for name in names if isinstance(value := arguments[name], Tensor)}
    carriers = [n for n, t in tensors.items() if t.ndim == 2 + frame.batched and _rows(t, frame) is not None]
    if not carriers:
        raise UnsupportedArchitecture(
            f"{type(call.module).__name__} takes no tensor [batch, n, width]: measure the model with by='output'"
        )
    return [ReplayedLayer(call, name, frame, generator) for name in carriers]


def _rows(tensor: Tensor, frame: Frame) -> tuple[Tensor, int] | None:
    view = canonical(tensor, frame, layered=True)
    return view if isinstance(view, tuple) else None


def _isolated(value: Any, dtype: torch.dtype | None, written: int) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_isolated(item, dtype, written) for item in cast(list[Any], value))
    if not hasattr(value, "update") or isinstance(value, dict):
        return value
    copied = copy.deepcopy(value)
    if hasattr(copied, "crop"):
        copied.crop(-written)
    return copied


def missing_pairs(seen: CallSurvey, relation: Relation, seed: int, thorough: bool) -> tuple[list[Violation], list[str]]:
    """Allowed pairs whose source never moves the target of a layer replayed in float64; notes, also on what failed."""
    violations: list[Violation] = []
    notes: list[str] = []
    inputs = seen.inputs.without_cache()
    generator = torch.Generator().manual_seed(seed)
    where = ""
    try:
        for number, (call, layer) in enumerate(zip(seen.calls, layer_calls(inputs), strict=False)):
            if not holds_attention(inputs, call):
                continue
            where = f" of {call.name}"
            allow = relation.layers[0 if relation.repeat else number].expand(inputs.batch, -1, -1)
            lacking = _lacking(replayed(inputs, layer, generator)[0], allow, thorough)
            lacking = lacking & inputs.real[:, :, None] & inputs.real[:, None, :]
            for row, target, source in lacking.nonzero()[:1].tolist():
                pair = Violation("missing", call.index, call.name, source, target, 0.0, row, row, confirmed=True)
                violations.append(pair)
    except (*REFUSALS, UnsupportedArchitecture) as error:  # layers that do not run alone, or not in float64
        notes.append(f"missing pairs{where} were not looked for: {refusal(error)}")
    if violations and not thorough:
        first = violations[0]
        notes.append(
            f"{plural(len(violations), 'layer')} lack pairs that the order allows, first {first.module}: "
            f"position {first.target} never moves with {first.source} (both_sides=True makes it a finding)"
        )
    return violations, notes


def asked_and_done(seen: CallSurvey, disputed: Sequence[tuple[Violation, bool]], seed: int) -> list[Violation]:
    """The disputed masks that a layer, replayed, really follows: it may narrow its mask itself, as GPT-Neo does."""
    kept: list[Violation] = []
    inputs, generator = seen.inputs.without_cache(), torch.Generator().manual_seed(seed)
    calls = layer_calls(inputs) if disputed else []
    numbers = [call.name for call in seen.calls]
    for violation, wider in disputed:
        assert violation.source is not None
        try:
            part = replayed(inputs, calls[numbers.index(violation.module)], generator)[0]
            with precision(part.module, torch.float64):
                ((offset, _), before), *_ = part.outputs(torch.float64).items()
                after = part.outputs(torch.float64, violation.source)[offset, before.shape[1]]
            change = float(row_change(after, before)[violation.target_row, violation.target - offset])
            if (change > 0) == wider:
                kept.append(replace(violation, change=change, confirmed=True))
        except (*REFUSALS, UnsupportedArchitecture):
            kept.append(violation)
    return kept


def _lacking(part: ReplayedLayer, allow: Tensor, thorough: bool) -> Tensor:
    """bool [batch, n, n]: allowed pairs, of the columns tried, where nothing moved."""
    columns = list(part.columns)
    if not thorough and len(columns) > _COLUMNS:
        columns = [columns[round(i * (len(columns) - 1) / _COLUMNS)] for i in range(_COLUMNS)]
    lacking = torch.zeros_like(allow)
    with torch.no_grad(), precision(part.module, torch.float64):
        base = part.outputs(torch.float64)
        for column in columns:
            moved = torch.zeros(allow.shape[:2], dtype=torch.bool)
            for sample in range(_SAMPLES if thorough else 1):
                for (offset, length), values in part.outputs(torch.float64, column, sample).items():
                    before, rows = base[offset, length], slice(offset, offset + length)
                    unit = torch.finfo(torch.float64).eps * before.abs().amax(-1).cpu()
                    moved[:, rows] |= row_change(values, before) > unit
                    lacking[:, rows, column] = True
            lacking[:, :, column] &= allow[:, :, column] & ~moved
    return lacking & ~torch.eye(allow.shape[1], dtype=torch.bool)


def holds_attention(inputs: Inputs, call: LayerCall) -> bool:
    modules = list(inputs.model.get_submodule(call.name).modules())
    return any(map(attends, modules)) and not any(map(moves_between_positions, modules))


def remarks(seen: CallSurvey, order: object) -> list[str]:
    notes = [
        f"{name} reaches no layer of {seen.inputs.subject.kind}: it is not used as it was passed"
        for name in seen.unused
    ]
    model, slot = seen.inputs.model, seen.inputs.slots[-1]
    passed = pairs_passed(seen.inputs, slot) if order is None and len(seen.inputs.slots) == 1 else None
    if passed is not None:
        notes.append(
            "the attention_mask of pairs is itself tested: the audit is against the declared order; "
            "order='mask' audits against its pairs"
        )
    if isinstance(model, Function):
        words = f"has {model.size[-1]} numbers, and the last never moves: number i is read as the score of token i + 1"
        notes += [f"{name} {words}" for name in sorted(model.ahead)]
        if model.twin is None:
            notes.append("what the first call leaves behind was not looked for: the function cannot be copied")
    unmasked = [call for call in seen.calls if call.asked is None and not call.masked]
    bare = [call.name for call in unmasked if holds_attention(seen.inputs, call)]
    if bare and len(unmasked) < len(seen.calls):
        notes.append(f"{few(bare)}: attention without the mask that other layers get")
    return notes
