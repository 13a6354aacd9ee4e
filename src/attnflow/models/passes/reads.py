"""What an attention module made its queries and keys of, and norms held at the scale of one pass.

Most attention modules compute y_j = turn_j (W norm(x_j) + b), where the turn is a rotation, a scale, or nothing. A
recorded pass shows which norm and which matrix these are. The parts that summands of the stream x have in y are then
products of matrices, and no pass has to be differentiated for each of them.

A norm is known by what it computes, never by its name: y = gain * (x - mean(x) or x) * s + bias, with one number s for
each vector. Three probes show bias, gain and mean; the scale follows from an input and its output, and the formula
must then give that output.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import torch
from torch import Tensor, nn

_NORM: Final = 1e-4  # of the largest output of a norm; the caller checks its result far more strictly
_CLOSE: Final = 1e-5  # of the largest entry
_PROBED: Final = 8  # vectors
_NO_NORMS: Final = (nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList)


@dataclass(frozen=True, eq=False)
class HeldNorm:
    """gain * (x - mean(x) if `centred` else x) * scale + bias."""

    gain: Tensor
    bias: Tensor
    centred: bool
    scale: Tensor  # [..., 1], one number for each vector of the pass

    def __call__(self, x: Tensor) -> Tensor:
        return self.gain * self.reduced(x) * self.scale + self.bias

    def reduced(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def fitted(self, x: Tensor, y: Tensor) -> HeldNorm | None:
        """Fit the scale to an input and its output; None if no scale fits."""
        direction = self.gain * self.reduced(x)
        size = (direction * direction).sum(-1, keepdim=True)
        scale = ((y - self.bias) * direction).sum(-1, keepdim=True) / size.where(size > 0, 1.0)
        fitted = replace(self, scale=scale)
        difference = (fitted(x) - y).abs().amax()
        return fitted if bool(difference <= _NORM * y.abs().amax()) else None  # False of NaN, too


def may_be_norm(module: nn.Module) -> bool:
    return not isinstance(module, _NO_NORMS) and not module._modules


@torch.no_grad()
def hold(module: nn.Module, x: Tensor, y: Tensor) -> HeldNorm | None:
    """Find the linear map that a norm was for the input x with the output y; None for a module that is not a norm.

    Costs six calls of the module, on a few vectors if no parameter tells more of them apart.
    """
    if y.shape != x.shape or not x.is_floating_point() or x.shape[-1] < 2 or y is x:
        return None
    every, given = x, y
    if all(parameter.numel() <= x.shape[-1] for parameter in (*module.parameters(), *module.buffers())):
        flat = x.flatten(0, -2)
        x = flat[:: 1 + len(flat) // _PROBED].reshape(*(1 for _ in x.shape[:-2]), -1, x.shape[-1])
    call = cast("Callable[[Tensor], Tensor]", module.forward)
    signs = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    signs[1::2] = -1
    if x.shape[-1] % 2:
        signs[-1] = 0
    probe = signs.expand_as(x)
    bias = call(torch.zeros_like(x))
    bias = bias.where(bias.isfinite(), 0.0)
    first, second = call(probe) - bias, call(probe.roll(1, -1)) - bias
    gain = torch.where(probe != 0, first * probe, second * probe.roll(1, -1))
    ones = call(torch.ones_like(x)) - bias
    centred = bool(ones.abs().amax() <= 1e-3 * gain.abs().amax())
    large = call(1e4 * x)  # a norm forgets the length, and its epsilon does not count here
    if not bool((call(3e4 * x) - large).abs().amax() <= 1e-2 * (large - bias).abs().amax()):
        return None
    return HeldNorm(_shared(gain), _shared(bias), centred, torch.ones_like(x[..., :1])).fitted(every, given)


def _shared(values: Tensor) -> Tensor:
    for axis in range(values.ndim - 1):
        first = values.narrow(axis, 0, 1)
        values = first if torch.equal(first.expand_as(values), values) else values
    return values


@dataclass(frozen=True, eq=False)
class ModuleCall:
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass(eq=False)
class Reads:
    """What an attention module made its queries and keys of; they are differentiable by the outputs of `matrices`."""

    matrices: list[ModuleCall] = field(default_factory=lambda: list[ModuleCall]())
    small: list[ModuleCall] = field(default_factory=lambda: list[ModuleCall]())  # such as norms, of the whole layer
    _norms: dict[int, HeldNorm | None] = field(default_factory=lambda: dict[int, HeldNorm | None]())

    def before_norm(self, x: Tensor) -> tuple[Tensor, HeldNorm | None]:
        """The input of the norm that put out x, and that norm held; x itself if none did."""
        for number, call in reversed(list(enumerate(self.small))):
            if call.output.data_ptr() == x.data_ptr() and call.output.shape == x.shape:
                if number not in self._norms:
                    self._norms[number] = hold(call.module, call.input.detach(), call.output.detach())
                norm = self._norms[number]
                if norm is not None and norm.gain.numel() == norm.bias.numel() == x.shape[-1]:
                    return call.input, norm
        return x, None


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
    leaves = [call.output for call in reads.matrices]
    unequal = torch.linspace(1, 2, target.shape[-1], dtype=target.dtype, device=target.device)  # so nothing cancels
    grads = torch.autograd.grad((target * unequal).sum(), leaves, retain_graph=True, allow_unused=True)
    grads = cast("Sequence[Tensor | None]", grads)
    used = [(call, grad) for call, grad in zip(reads.matrices, grads, strict=True) if grad is not None]
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
    stored = [p.detach() for p in call.module._parameters.values() if isinstance(p, nn.Parameter)]
    tables = [p for p in stored if p.ndim == 2]
    biases = [p for p in stored if p.shape == y.shape[1:]]
    if len(tables) != 1 or len(x) != len(y) or len(stored) != 1 + len(biases) or len(biases) > 1:
        return None
    bias = (biases[0] if biases else torch.zeros_like(y[0]))[columns]
    y = y[places][:, columns]
    for matrix in (tables[0], tables[0].T):
        if matrix.shape == (call.output.shape[-1], x.shape[1]):
            difference = (torch.addmm(bias, x[places], matrix[columns].T) - y).abs().amax()
            if bool(difference <= _CLOSE * y.abs().amax()):
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
        received = target.detach().double()
        return bool(((turn(value) - received).abs() <= _CLOSE * received.abs().amax(-1, keepdim=True)).all())

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
    turn = Matrices(torch.stack([pulled([row]) for row in range(size)], dim=1))
    return turn if explains(turn) else None
