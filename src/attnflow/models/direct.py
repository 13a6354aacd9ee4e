"""The plain way from the stream to queries and keys: a norm, a matrix, and a turn of each position.

Most attention modules compute y_j = turn_j (W norm(x_j) + b), where the turn is a rotation, a scale, or nothing. A
recorded pass shows which norm and which matrix these are. The parts that summands of x have in y are then products of
matrices, and no pass has to be differentiated for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn

from attnflow.models.recording import ModuleCall, Reads

_CLOSE: Final = 1e-5  # of the largest entry


@dataclass(frozen=True, eq=False)
class DirectPath:
    """y_j = turn_j (scale_j matrix x_j) + constant_j, in float64 but for the turn."""

    source: Tensor  # the stream x of all positions, [all, width]
    matrix: Tensor  # [rows, width], with the norm's gain, and without the mean where the norm subtracts it
    scale: Tensor  # [positions, 1], that of the norm in this pass
    turn: Tensor  # [positions, head_dim, rows]
    constant: Tensor  # [positions, head_dim]

    def parts(self, products: Tensor) -> Tensor:
        """Turn `x matrix^T` of summands, [summands, positions, rows], into [summands, positions, head_dim]."""
        return (self.turn.double() @ (products * self.scale).permute(1, 2, 0)).permute(2, 0, 1)


def direct_path(target: Tensor, places: slice, reads: Reads) -> DirectPath | None:
    """Find the path to queries or keys [positions, head_dim] at some places; None if it is another one.

    `target` must be differentiable by the matrices of `reads`. Whether summands add up to `source` is for the caller
    to check. Costs two to `head_dim` backward passes through what follows the matrix.
    """
    if not target.requires_grad or not reads.matrices:
        return None
    leaves = [one.output for one in reads.matrices]
    found = torch.autograd.grad(target.sum(), leaves, retain_graph=True, allow_unused=True)
    grads = cast("Sequence[Tensor | None]", found)
    used = [one for one, grad in zip(reads.matrices, grads, strict=True) if grad is not None]
    if len(used) != 1 or used[0].output.shape[:-1].numel() != len(target):
        return None
    weights, turned = _weights(used[0]), _turn(target, used[0].output, places)
    if weights is None or turned is None:
        return None
    turn, columns = turned
    matrix, bias = weights[0][columns].double(), weights[1][columns].double()
    source, norm = reads.before_norm(used[0].input)
    scale = matrix.new_ones(1, 1)
    if norm is not None:
        bias = bias + matrix @ norm.bias.reshape(-1).double()
        matrix = matrix * norm.gain.reshape(-1).double()
        matrix = matrix - matrix.mean(-1, keepdim=True) if norm.centred else matrix
        scale = norm.scale.reshape(-1, 1)[places].double()
    return DirectPath(source.detach().reshape(-1, matrix.shape[1]), matrix, scale, turn, turn.double() @ bias)


def _weights(call: ModuleCall) -> tuple[Tensor, Tensor] | None:
    """The matrix [rows, width] and bias [rows] of a module that is one linear map, checked at a few positions."""
    x, y = (side.detach().reshape(-1, side.shape[-1]) for side in (call.input, call.output))
    own = [p.detach() for p in call.module._parameters.values() if isinstance(p, nn.Parameter)]
    tables = [p for p in own if p.ndim == 2]
    biases = [p for p in own if p.shape == y.shape[1:]]
    if len(tables) != 1 or len(x) != len(y) or len(own) != len(tables) + len(biases) or len(biases) > 1:
        return None
    some = [0, len(x) // 2, len(x) - 1]
    bias = biases[0] if biases else torch.zeros_like(y[0])
    for matrix in (tables[0], tables[0].T):
        if matrix.shape == (y.shape[1], x.shape[1]):
            difference = (x[some].double() @ matrix.double().T + bias - y[some]).abs().amax()
            if bool(difference <= _CLOSE * y[some].abs().amax()):
                return matrix, bias
    return None


def _turn(target: Tensor, leaf: Tensor, places: slice) -> tuple[Tensor, Tensor] | None:
    """The derivative of each target by the leaf at its position, [positions, head_dim, columns], and those columns.

    Rotations mix an entry with one other: its neighbour, or that of the other half of the head. Two backward passes
    then show all of the derivative; otherwise it takes one for each entry.
    """
    size = target.shape[-1]
    value = leaf.detach().reshape(-1, leaf.shape[-1])[places]
    target = target[places]

    def pulled(entries: Sequence[int]) -> Tensor:
        grad = torch.autograd.grad(target[:, entries].sum(), leaf, retain_graph=True)[0]
        return grad.reshape(-1, leaf.shape[-1])[places]

    half, entry = size // 2, torch.arange(size)
    columns = pulled(range(size)).abs().amax(0).nonzero().flatten()
    for first, rows in (
        (list(range(half)), entry % half if half else entry),  # the row of each column, less half or 1
        (list(range(0, size, 2)), 2 * (entry // 2)),
    ):
        if len(columns) != size or size % 2:
            break
        rest = [one for one in range(size) if one not in first]
        turn = value.new_zeros(len(value), size, size)
        for members in (first, rest):
            turn[:, rows + members[0], entry] = pulled(members)[:, columns]
        if _explains(turn, value[:, columns], target):
            return turn, columns
    turn = torch.stack([pulled([one])[:, columns] for one in range(size)], dim=1)
    return (turn, columns) if _explains(turn, value[:, columns], target) else None


def _explains(turn: Tensor, value: Tensor, target: Tensor) -> bool:
    """Whether the derivative times the value is the target: it is linear, and each position has its own."""
    found = (turn.double() @ value.double()[..., None])[..., 0]
    return bool(((found - target.detach()).abs() <= _CLOSE * target.detach().abs().amax(-1, keepdim=True)).all())
