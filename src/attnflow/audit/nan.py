"""A model whose outputs are NaN cannot be audited: NaN hides every change."""

from __future__ import annotations

import torch
from torch import Tensor

from attnflow.audit.inputs import Inputs
from attnflow.audit.packing import padding


def refuse_nan(inputs: Inputs, module: str, offset: int, values: Tensor) -> None:
    """Check one output, [batch or 1, positions, features], whose first row is joint position `offset`.

    Padding may be NaN (a query with no key to attend to); real positions may not.

    Raises:
        ValueError: naming the module and the position.
    """
    if not values.is_floating_point() or not values.isnan().any():
        return
    bad = values.isnan().any(-1).cpu()
    for slot in inputs.slots:
        real = padding(inputs, slot)
        if slot.offset <= offset < slot.offset + slot.length and real is not None:
            bad = bad & real[:, offset - slot.offset : offset - slot.offset + bad.shape[1]]
    if bad.any():
        row, column = (int(index) for index in torch.nonzero(bad)[0])
        raise ValueError(
            f"{module or 'the model'} gives NaN at position {column + offset} (sequence {row}), which hides what "
            "moves it: repair the weights or the inputs first, or audit in a wider precision (dtype=)"
        )
