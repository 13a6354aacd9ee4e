"""The other side of an order: pairs that it allows and that a layer does not pass on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import plural
from attnflow.audit.fields import Relation
from attnflow.audit.findings import Violation
from attnflow.audit.packing import padding
from attnflow.audit.perturb import row_change
from attnflow.audit.replay import Part, Replay, layer_calls
from attnflow.audit.survey import LayerCall, Survey
from attnflow.models.evaluation import precision

_COLUMNS: Final = 4  # positions that are tried where missing pairs are only noted
_SAMPLES: Final = 3
_MIXERS: Final = ["mamba", "deltanet", "recurrent", "shortconv", "ssm", "linearattention", "lightning", "rwkv", "lstm"]


@dataclass
class MissingPairs:
    """What is missing: one violation per layer, the same as sentences, and why some layers were not asked."""

    violations: list[Violation] = field(default_factory=list[Violation])
    summary: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def missing_pairs(model: nn.Module, seen: Survey, relation: Relation, seed: int, thorough: bool) -> MissingPairs:
    """Pairs (target, source) of attention layers that are allowed, and whose source moves the target in no sample.

    Each layer call is replayed alone, from its own input, in float64; a change counts from one unit in the last place
    of its row.

    Args:
        model: the model.
        seen: its survey.
        relation: what the order allows, layer by layer.
        seed: of the noise.
        thorough: all positions and three samples, not a few positions and one.
    """
    result = MissingPairs()
    inputs = seen.inputs.without_cache(model)
    generator = torch.Generator().manual_seed(seed)
    try:
        calls = layer_calls(model, inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        result.notes.append(f"missing pairs were not looked for: {error}")
        return result
    for number, (call, layer) in enumerate(zip(seen.calls, calls, strict=False)):
        if not holds_attention(model, call):
            continue
        allow = relation.layers[0 if relation.repeat else number]
        try:
            part = next(iter(Replay(inputs, layer, generator).parts()))
            lacking = _lacking(part, allow.expand(inputs.batch, -1, -1), thorough)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, UnsupportedArchitecture) as error:
            result.notes.append(f"missing pairs of {call.name} were not looked for: {str(error).splitlines()[0]}")
            return result
        for slot in inputs.slots:
            real = padding(inputs, slot)
            if real is not None:
                rows = slice(slot.offset, slot.offset + slot.length)
                lacking[:, rows] &= real[:, :, None]
                lacking[:, :, rows] &= real[:, None, :]
        if lacking.any():
            row, target, source = (int(index) for index in lacking.nonzero()[0])
            result.violations.append(
                Violation("missing", call.index, call.name, source, target, 0.0, row, row, confirmed=True)
            )
    if result.violations:
        first = result.violations[0]
        result.summary.append(
            f"{plural(len(result.violations), 'layer')} lack pairs that the order allows, first {first.module}: "
            f"position {first.target} never moves with {first.source} (both_sides=True makes it a finding)"
        )
    return result


def _lacking(part: Part, allow: Tensor, thorough: bool) -> Tensor:
    """bool [batch, n, n]: allowed pairs of the columns that were tried in which nothing moved."""
    columns = list(part.columns)
    if not thorough and len(columns) > _COLUMNS:
        columns = [columns[round(i * (len(columns) - 1) / _COLUMNS)] for i in range(_COLUMNS)]
    lacking = torch.zeros_like(allow)
    with torch.no_grad(), precision(part.module, torch.float64):
        base = part.outputs(torch.float64)
        for column in columns:
            moved = torch.zeros(allow.shape[:2], dtype=torch.bool)
            for sample in range(_SAMPLES if thorough else 1):
                for offset, values in part.outputs(torch.float64, column, sample).items():
                    unit = torch.finfo(torch.float64).eps * base[offset].abs().amax(-1).cpu()
                    moved[:, offset : offset + values.shape[1]] |= row_change(values, base[offset]) > unit
                    seen = torch.zeros(allow.shape[1], dtype=torch.bool)
                    seen[offset : offset + values.shape[1]] = True
                    lacking[:, :, column] |= seen
            lacking[:, :, column] &= allow[:, :, column] & ~moved
    return lacking & ~torch.eye(allow.shape[1], dtype=torch.bool)


def holds_attention(model: nn.Module, call: LayerCall) -> bool:
    """Whether a layer has attention among its modules, and no mixer of another kind beside it."""
    modules = list(model.get_submodule(call.name).modules())
    names = [type(module).__name__.lower() for module in modules]
    if any(isinstance(module, nn.Conv1d) for module in modules) or any(w in name for name in names for w in _MIXERS):
        return False
    return any(word in name for name in names for word in ("attention", "attn"))
