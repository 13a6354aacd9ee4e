"""The plain way from the stream to queries and keys: a norm, a matrix, and a turn of each position.

Most attention modules compute y_j = turn_j (W norm(x_j) + b), where the turn is a rotation, a scale, or nothing. A
recorded pass shows which norm and which matrix these are. The parts that summands of x have in y are then products of
matrices, and no pass has to be differentiated for each of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn

from attnflow.models.recording import ModuleCall, Reads

_CLOSE: Final = 1e-5  # of the largest entry


@dataclass(frozen=True, eq=False)
class Diagonals:
    """Mixes each entry with those a step away, as rotations do: own_j x_j[h] + after_j x_j[h + step] + ..."""

    own: Tensor  # [positions, head_dim]
    after: Tensor  # [positions, head_dim], 0 for the last entries
    before: Tensor  # [positions, head_dim], 0 for the first entries
    step: int

    def __call__(self, x: Tensor) -> Tensor:
        """Turn x [..., positions, head_dim]."""
        early, late = slice(None, -self.step), slice(self.step, None)
        result = self.own * x
        result[..., early].addcmul_(self.after[:, early], x[..., late])
        result[..., late].addcmul_(self.before[:, late], x[..., early])
        return result

    def scaled(self, scale: Tensor) -> Diagonals:
        """Multiply by a number for each position, [positions, 1]."""
        return Diagonals(self.own * scale, self.after * scale, self.before * scale, self.step)


@dataclass(frozen=True, eq=False)
class Matrices:
    matrices: Tensor  # [positions, head_dim, rows]

    def __call__(self, x: Tensor) -> Tensor:
        """Turn x [..., positions, rows] into [..., positions, head_dim]."""
        return torch.einsum("jhr,...jr->...jh", self.matrices, x)

    def scaled(self, scale: Tensor) -> Matrices:
        """Multiply by a number for each position, [positions, 1]."""
        return Matrices(self.matrices * scale[..., None])


@dataclass(frozen=True, eq=False)
class DirectPath:
    """y_j = turn_j(matrix x_j) + constant_j, in float64."""

    source: Tensor  # the stream x of all positions, [all, width]
    matrix: Tensor  # [rows, width], with the norm's gain, and without the mean where the norm subtracts it
    turn: Diagonals | Matrices  # with the scale of the norm in this pass; of rows to [positions, head_dim]
    constant: Tensor  # [positions, head_dim]


def direct_path(target: Tensor, places: slice, reads: Reads) -> DirectPath | None:
    """Find the path to queries or keys [positions, head_dim] at some places; None if it is another one.

    `target` must be differentiable by the matrices of `reads`. Whether summands add up to `source` is for the caller
    to check. Costs three to `head_dim` backward passes through what follows the matrix.
    """
    if not target.requires_grad or not reads.matrices:
        return None
    leaves = [one.output for one in reads.matrices]
    unequal = torch.linspace(1, 2, target.shape[-1], dtype=target.dtype, device=target.device)  # so nothing cancels
    some = (target * unequal).sum()
    found = torch.autograd.grad(some, leaves, retain_graph=True, allow_unused=True)
    grads = cast("Sequence[Tensor | None]", found)
    used = [(one, grad) for one, grad in zip(reads.matrices, grads, strict=True) if grad is not None]
    if len(used) != 1 or used[0][0].output.shape[:-1].numel() != len(target):
        return None
    call, grad = used[0]
    columns = grad.reshape(len(target), -1).abs().amax(0).nonzero().flatten()  # of the leaf, that the target reads
    if not len(columns):
        return None
    weights, turn = _weights(call, columns, places), _turn(target, call.output, columns, places)
    if weights is None or turn is None:
        return None
    matrix, bias = weights
    source, norm = reads.before_norm(call.input)
    if norm is not None:
        bias = bias + matrix @ norm.bias.reshape(-1).double()
        matrix = matrix * norm.gain.reshape(-1).double()
        matrix = matrix - matrix.mean(-1, keepdim=True) if norm.centred else matrix
    constant = turn(bias.expand(len(target[places]), -1))
    turn = turn if norm is None else turn.scaled(norm.scale.reshape(-1, 1)[places].double())
    return DirectPath(source.detach().reshape(-1, matrix.shape[1]), matrix, turn, constant)


def _weights(call: ModuleCall, columns: Tensor, places: slice) -> tuple[Tensor, Tensor] | None:
    """Rows of the matrix and bias of a module that is one linear map; None if that is not what it computed there."""
    x, y = (side.detach().reshape(-1, side.shape[-1]) for side in (call.input, call.output))
    own = [p.detach() for p in call.module._parameters.values() if isinstance(p, nn.Parameter)]
    tables = [p for p in own if p.ndim == 2]
    biases = [p for p in own if p.shape == y.shape[1:]]
    if len(tables) != 1 or len(x) != len(y) or len(own) != len(tables) + len(biases) or len(biases) > 1:
        return None
    bias = (biases[0] if biases else torch.zeros_like(y[0]))[columns]
    seen = y[places][:, columns]
    for matrix in (tables[0], tables[0].T):
        if matrix.shape == (y.shape[1], x.shape[1]):
            difference = (torch.addmm(bias, x[places], matrix[columns].T) - seen).abs().amax()
            if bool(difference <= _CLOSE * seen.abs().amax()):
                return matrix[columns].double(), bias.double()
    return None


def _turn(target: Tensor, leaf: Tensor, columns: Tensor, places: slice) -> Diagonals | Matrices | None:
    """The derivative of each target by the columns of the leaf at its position; None if it is not the whole path.

    Rotations mix an entry with one other, which is a fixed step away: half of the head, 1, or half of the part that is
    rotated. Two backward passes then show all of the derivative; otherwise it takes one for each entry.
    """
    size = target.shape[-1]
    value = leaf.detach().reshape(-1, leaf.shape[-1])[places][:, columns].double()
    target = target[places]

    def pulled(entries: Sequence[int]) -> Tensor:
        grad = torch.autograd.grad(target[:, entries].sum(), leaf, retain_graph=True)[0]
        return grad.reshape(-1, leaf.shape[-1])[places][:, columns].double()

    def explains(turn: Diagonals | Matrices) -> bool:  # it is linear, and each position has its own
        found, seen = turn(value), target.detach().double()
        return bool(((found - seen).abs() <= _CLOSE * seen.abs().amax(-1, keepdim=True)).all())

    entry = torch.arange(size, device=leaf.device)

    def steps() -> Generator[int]:
        yield max(1, size // 2)
        yield 1
        yield max(1, int((entry * (pulled([0]) != 0).any(0)).max()))  # the farthest that the first entry is mixed with

    if len(columns) == size:
        for step in steps():
            first = entry // step % 2 == 0
            above, below = (pulled(entry[members].tolist()) for members in (first, ~first))
            after = above.roll(-step, 1) * (first & (entry + step < size))
            before = below.roll(step, 1) * ~first
            if explains(turn := Diagonals(torch.where(first, above, below), after, before, step)):
                return turn
    turn = Matrices(torch.stack([pulled([one]) for one in range(size)], dim=1))
    return turn if explains(turn) else None
