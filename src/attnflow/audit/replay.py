"""Replays layers alone: which of its own inputs move a layer call's output, and which allowed ones do not."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import plural
from attnflow.audit.fields import Relation
from attnflow.audit.inputs import Inputs, fresh
from attnflow.audit.packing import real_positions
from attnflow.audit.passes import frame_of
from attnflow.audit.report import Violation
from attnflow.audit.rounding import row_change
from attnflow.audit.rows import Frame, canonical
from attnflow.audit.survey import LayerCall, Survey
from attnflow.models.evaluation import REFUSALS, precision, refusal
from attnflow.models.loaded import unwrapped
from attnflow.models.mixing import attends, moves_between_positions
from attnflow.models.watching import Call, calls_of

Outputs = dict[tuple[int, int], Tensor]  # {(joint position of the first row, rows): [batch, rows, features]}

_CARRIERS: Final = ("hidden_states", "encoder_hidden_states")
_COLUMNS: Final = 4  # positions that are tried where missing pairs are only noted
_SAMPLES: Final = 3


def layer_calls(model: nn.Module, inputs: Inputs) -> list[Call]:
    """The layer calls of one forward, in order of execution."""
    layers = {name: unwrapped(model.get_submodule(name)) for name in inputs.layers}
    return calls_of(layers, lambda: model(**fresh(inputs.kwargs)))


class ReplayedLayer:
    """A layer call as a function of one of its inputs."""

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
        """The output with arguments in `dtype`, input position `column` moved by noise `sample`."""
        moved = self._tensor.clone()
        if column is not None:
            rows = cast(tuple[Tensor, int], _rows(moved, self._frame))[0]
            if sample not in self._noise:
                noise = torch.randn(rows.shape, generator=self._generator) * self._scale
                self._noise[sample] = noise.to(moved)
            rows[:, column - self._offset] += self._noise[sample][:, column - self._offset]
        bound = inspect.signature(self.module.forward).bind_partial()
        arguments = {**self._arguments, self._name: moved}
        bound.arguments.update({name: _isolated(value, dtype) for name, value in arguments.items()})
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
    """(a view [batch, positions, width], the joint position of its first row)."""
    view = canonical(tensor, frame, layered=True)
    return view if isinstance(view, tuple) else None


def _isolated(value: Any, dtype: torch.dtype | None) -> Any:
    """An argument for one replay: tensors in `dtype`, caches copied so that replays stay independent."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_isolated(item, dtype) for item in cast(list[Any], value))
    return copy.deepcopy(value) if hasattr(value, "update") and not isinstance(value, dict) else value


def missing_pairs(
    model: nn.Module, seen: Survey, relation: Relation, seed: int, thorough: bool
) -> tuple[list[Violation], list[str]]:
    """Allowed pairs (target, source) of attention layers whose source never moves the target: one violation per layer.

    Each layer call is replayed alone in float64; a change counts from one unit in the last place. `thorough` tries all
    positions and three samples, otherwise a few and one, with the first violation as a note. A note also says where a
    replay failed.
    """
    violations: list[Violation] = []
    notes: list[str] = []
    inputs = seen.inputs.without_cache(model)
    generator = torch.Generator().manual_seed(seed)
    where = ""
    try:
        for number, (call, layer) in enumerate(zip(seen.calls, layer_calls(model, inputs), strict=False)):
            if not holds_attention(model, call):
                continue
            where = f" of {call.name}"
            allow = relation.layers[0 if relation.repeat else number].expand(inputs.batch, -1, -1)
            lacking = _lacking(replayed(inputs, layer, generator)[0], allow, thorough)
            for slot in inputs.slots:
                real, rows = real_positions(inputs, slot), slice(slot.offset, slot.offset + slot.length)
                lacking[:, rows] &= real[:, :, None]
                lacking[:, :, rows] &= real[:, None, :]
            if lacking.any():
                row, target, source = lacking.nonzero()[0].tolist()
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


def _lacking(part: ReplayedLayer, allow: Tensor, thorough: bool) -> Tensor:
    """bool [batch, n, n]: allowed pairs, of the columns tried, in which nothing moved."""
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


def holds_attention(model: nn.Module, call: LayerCall) -> bool:
    """Whether a layer has attention and no mixer of another kind."""
    modules = list(model.get_submodule(call.name).modules())
    return any(map(attends, modules)) and not any(map(moves_between_positions, modules))
