"""The other side of an order: pairs that it allows and that a layer does not pass on."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import plural
from attnflow.audit.fields import Relation
from attnflow.audit.findings import Violation
from attnflow.audit.packing import real_positions
from attnflow.audit.perturb import row_change
from attnflow.audit.replay import Part, Replay, invocations
from attnflow.audit.survey import LayerCall, Survey
from attnflow.models.evaluation import REFUSALS, precision, refusal
from attnflow.models.mixing import attends, moves_between_positions

_COLUMNS: Final = 4  # positions that are tried where missing pairs are only noted
_SAMPLES: Final = 3


def missing_pairs(
    model: nn.Module, seen: Survey, relation: Relation, seed: int, thorough: bool
) -> tuple[list[Violation], list[str]]:
    """Pairs (target, source) of attention layers that are allowed, and whose source moves the target in no sample.

    Each layer call is replayed alone, from its own input, in float64; a change counts from one unit in the last place
    of its row.

    Args:
        model: the model.
        seen: its survey.
        relation: what the order allows, layer by layer.
        seed: of the noise.
        thorough: all positions and three samples, not a few positions and one.

    Returns:
        One violation for each layer, and notes: why layers were not asked, and unless `thorough` the first violation.
    """
    violations: list[Violation] = []
    notes: list[str] = []
    inputs = seen.inputs.without_cache(model)
    generator = torch.Generator().manual_seed(seed)
    where = ""
    try:
        for number, (call, layer) in enumerate(zip(seen.calls, invocations(model, inputs), strict=False)):
            if not holds_attention(model, call):
                continue
            where = f" of {call.name}"
            allow = relation.layers[0 if relation.repeat else number].expand(inputs.batch, -1, -1)
            lacking = _lacking(next(iter(Replay(inputs, layer, generator).parts())), allow, thorough)
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
    return any(map(attends, modules)) and not any(map(moves_between_positions, modules))
