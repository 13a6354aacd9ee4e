"""The guidance network on all pairs as two Triton kernels: B_ij = w . GELU(LayerNorm(a_i + c_j)) + b, and gradients.

Forward, a program owns a tile of pairs and goes through the hidden units. Backward, a program owns some queries, whose
hidden layer x = a_i + c_j it makes again for one key after another. The gradient of the keys is the same kernel with
the two sides exchanged. With r = 1 / sqrt(mean x^2 + eps), u = r x, z = scale u + shift and the upstream gradient G,

    e = G w GELU'(z),   d shift = sum e,   d scale = sum e u,   d w = sum G GELU(z),   t = scale e,
    d a_i = sum_j r (t - mean t - u mean(t u)), and d c_j is the same sum over i.

Nothing is added up by atomic operations, so that two runs agree in every bit. Blocks of pairs that the mask leaves out
are skipped. Import this file only where Triton is installed (`attnflow.bias.dense` does).
"""

# pyright: reportMissingImports=false
# Triton comes with a CUDA build of PyTorch, and exists for Linux only.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from attnflow.bias.terms import EPS

ROWS: Final = 32  # queries of a tile: 122 registers a thread and no spill; 64 would need 169
COLUMNS: Final = 128  # keys of a tile
TILE_WARPS: Final = 4
SIDE_WARPS: Final = 4
_HELD: Final = 1024  # numbers of one array of a backward program: 8 a thread
_PROGRAMS: Final = 8 * 132  # backward programs that keep an H100 busy

_jit = cast("Callable[[Any], Any]", triton.jit)
_EPS = tl.constexpr(EPS)
_HALF_LOG2E = tl.constexpr(0.7213475204444817)
_LOG2_ROOT_TWO_PI = tl.constexpr(1.3257480647361595)


@_jit
@no_type_check
def _beyond(s):
    """The normal distribution's P(X > s) for s >= 0, within 6e-8; its logarithm is a polynomial of degree 8."""
    p = -2.2933744718844906e-06 * s + 3.306767989941228e-05
    p = p * s - 1.5710165426946476e-04
    p = p * s - 2.0486065500496808e-04
    p = p * s + 7.149047332262293e-03
    p = p * s - 5.255343407641344e-02
    p = p * s - 4.591896924820169e-01
    p = p * s - 1.1511075039086216
    p = p * s - 9.999999444417823e-01
    return tl.exp2(p)


@_jit
@no_type_check
def tile_kernel(
    a, c, scale, shift, weight, offset, needed, bias, rows, cols, groups,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """a, c: centred, [maps, hidden, tokens]; bias: [maps, rows, cols]; needed: [row blocks, column blocks], uint8."""
    j, i, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(needed + i * tl.num_programs(0) + j) != 0:
        row, col, g = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS), m % groups
        a += m.to(tl.int64) * HIDDEN * rows
        c += m.to(tl.int64) * HIDDEN * cols
        square = tl.zeros([ROWS, COLUMNS], tl.float32)
        for h in range(HIDDEN):
            at, ct = tl.load(a + h * rows + row, row < rows, 0.0), tl.load(c + h * cols + col, col < cols, 0.0)
            x = at[:, None] + ct[None, :]
            square += x * x
        inverse = tl.rsqrt(square / HIDDEN + _EPS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32) + tl.load(offset + g)
        for h in range(HIDDEN):
            at, ct = tl.load(a + h * rows + row, row < rows, 0.0), tl.load(c + h * cols + col, col < cols, 0.0)
            gain, w = tl.load(scale + g * HIDDEN + h), tl.load(weight + g * HIDDEN + h)
            z = ((at * gain)[:, None] + (ct * gain)[None, :]) * inverse + tl.load(shift + g * HIDDEN + h)
            s = tl.abs(z)
            total += (tl.maximum(z, 0.0) - s * _beyond(s)) * w
        place = bias + m.to(tl.int64) * rows * cols + row[:, None].to(tl.int64) * cols + col[None, :]
        tl.store(place, total, (row[:, None] < rows) & (col[None, :] < cols))


@_jit
@no_type_check
def side_kernel(
    own, other, gradient, scale, shift, weight, needed, to_own, to_parameters, rows, cols, groups, chunk,
    needed_row, needed_col, gradient_map, gradient_row, gradient_col,
    HIDDEN: tl.constexpr, UNITS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    PARAMETERS: tl.constexpr,
):  # fmt: skip
    """own, other: centred, [maps, tokens, hidden]; to_own: [splits, maps, rows, hidden]; UNITS >= HIDDEN, a power of 2.

    A program owns OWN of the BLOCK tokens of a block of pairs, and takes the other side by STEP tokens.
    """
    i, split, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, unit, g = i * OWN + tl.arange(0, OWN), tl.arange(0, UNITS), m % groups
    inside, width = row < rows, unit < HIDDEN
    gain = tl.load(scale + g * HIDDEN + unit, width, 0.0)[None, :]
    beta = tl.load(shift + g * HIDDEN + unit, width, 0.0)[None, :]
    w = tl.load(weight + g * HIDDEN + unit, width, 0.0)[None, :]
    place, held = (m.to(tl.int64) * rows + row[:, None]) * HIDDEN + unit[None, :], inside[:, None] & width[None, :]
    a = tl.load(own + place, held, 0.0)
    other += m.to(tl.int64) * cols * HIDDEN
    lines = gradient + m.to(tl.int64) * gradient_map + row.to(tl.int64) * gradient_row
    side = tl.zeros([OWN, UNITS], tl.float32)
    if PARAMETERS:
        to_scale, to_shift, to_weight = side, side, side
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, cols), STEP):
        if tl.load(needed + (i * OWN // BLOCK) * needed_row + (start // STEP) * needed_col) != 0:
            line = lines + tl.full([], start, tl.int64) * gradient_col
            for k in range(start, tl.minimum(start + STEP, cols)):
                up = tl.load(line, inside, 0.0).to(tl.float32)[:, None]
                line += gradient_col
                x = a + tl.load(other + k * HIDDEN + unit, width, 0.0)[None, :]
                inverse = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + _EPS)[:, None]
                u = x * inverse
                z = u * gain + beta
                s = tl.abs(z)
                beyond = _beyond(s)
                slope = tl.where(z > 0, 1.0 - beyond, beyond) + z * tl.exp2(-z * z * _HALF_LOG2E - _LOG2_ROOT_TWO_PI)
                e = slope * w * up
                if PARAMETERS:
                    to_weight += (tl.maximum(z, 0.0) - s * beyond) * up
                    to_shift += e
                    to_scale += e * u
                t = e * gain
                side += (t - u * (tl.sum(t * u, 1) / HIDDEN)[:, None]) * inverse
    share = split * tl.num_programs(2) + m
    tl.store(to_own + share.to(tl.int64) * rows * HIDDEN + row[:, None] * HIDDEN + unit[None, :], side, held)
    if PARAMETERS:
        base = to_parameters + (share.to(tl.int64) * tl.num_programs(0) + i) * 3 * HIDDEN + unit
        tl.store(base, tl.sum(to_scale, 0), width)
        tl.store(base + HIDDEN, tl.sum(to_shift, 0), width)
        tl.store(base + 2 * HIDDEN, tl.sum(to_weight, 0), width)


def blocks(allow: Tensor | None, rows: int, cols: int) -> Tensor:
    """[row blocks, column blocks], uint8: which blocks hold a pair of the relation `allow`, [rows, cols]; None: all."""
    shape = -(-rows // ROWS), -(-cols // COLUMNS)
    if allow is None:
        return torch.ones(shape, dtype=torch.uint8)
    padded = functional.pad(allow, (0, -cols % COLUMNS, 0, -rows % ROWS))
    return padded.unflatten(0, (-1, ROWS)).unflatten(2, (-1, COLUMNS)).any(3).any(1).to(torch.uint8)


def owned(hidden: int) -> tuple[int, int]:
    """(tokens that a backward program owns, its hidden units as a power of 2)."""
    units = 1 << max(4, (hidden - 1).bit_length())
    return max(1, min(ROWS, _HELD // units)), units


@torch.library.custom_op("attnflow::pairs", mutates_args=())
@no_type_check  # torch reads the signature
def pairs(
    rows: Tensor, columns: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, offset: Tensor, needed: Tensor
) -> Tensor:
    """B in float32, [batch, groups, queries, keys], of the tensors of `Guidance`; 0 in blocks that are not `needed`."""
    (batch, groups, queries, hidden), keys = rows.shape, columns.shape[2]
    a, c = (_centred(t).mT.contiguous() for t in (rows, columns))
    bias = a.new_zeros((batch, groups, queries, keys))
    grid = (needed.shape[1], needed.shape[0], batch * groups)
    if bias.numel():
        parameters = (t.float().contiguous() for t in (scale, shift, weight, offset))
        tile_kernel[grid](
            *(a, c, *parameters, needed, bias, queries, keys, groups),
            HIDDEN=hidden, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=TILE_WARPS,
        )  # fmt: skip
    return bias


@torch.library.custom_op("attnflow::pairs_backward", mutates_args=())
@no_type_check
def pairs_backward(
    gradient: Tensor, rows: Tensor, columns: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, needed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 gradients of rows and columns, and of (scale, shift, weight), [groups, 3, hidden]; 0 where not needed."""
    groups, hidden = scale.shape
    a, c = _centred(rows), _centred(columns)
    gradient = gradient.flatten(0, 1)
    parameters = [t.float().contiguous() for t in (scale, shift, weight)]
    own, units = owned(hidden)

    def side(mine: Tensor, other: Tensor, upstream: Tensor, need: Tensor, block: int, step: int, learns: bool):
        (maps, tokens, _), others = mine.shape, other.shape[1]
        programs = -(-tokens // own)
        splits = max(1, min(-(-others // step), _PROGRAMS // max(1, programs * maps)))
        chunk = -(-others // (splits * step)) * step
        to_own = mine.new_zeros((splits, maps, tokens, hidden))
        to_parameters = mine.new_zeros((splits, maps, programs, 3, hidden) if learns else 1)
        if upstream.numel():
            side_kernel[programs, splits, maps](
                *(mine, other, upstream, *parameters, need, to_own, to_parameters, tokens, others, groups, chunk),
                *(*need.stride(), *upstream.stride()),
                HIDDEN=hidden, UNITS=units, OWN=own, BLOCK=block, STEP=step, PARAMETERS=learns, num_warps=SIDE_WARPS,
            )  # fmt: skip
        gathered = to_own.sum(0)
        return gathered - gathered.mean(-1, keepdim=True), to_parameters

    to_rows, learned = side(a, c, gradient, needed, ROWS, COLUMNS, True)
    to_columns, _ = side(c, a, gradient.mT, needed.T, COLUMNS, ROWS, False)
    shared = learned.sum((0, 2)).unflatten(0, (-1, groups)).sum(0)
    return to_rows.view(rows.shape), to_columns.view(columns.shape), shared


def _centred(features: Tensor) -> Tensor:
    """[batch * groups, tokens, hidden] in float32, less the mean over hidden units."""
    features = features.flatten(0, 1).float()
    return features - features.mean(dim=-1, keepdim=True)


@pairs.register_fake
def _(rows: Tensor, columns: Tensor, *_: Tensor) -> Tensor:
    return rows.new_empty((*rows.shape[:3], columns.shape[2]), dtype=torch.float32)


@pairs_backward.register_fake
def _(gradient: Tensor, rows: Tensor, columns: Tensor, scale: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shapes = rows.shape, columns.shape, (scale.shape[0], 3, scale.shape[1])
    to_rows, to_columns, shared = (rows.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return to_rows, to_columns, shared


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, offset, needed = ctx.saved_tensors
    to_rows, to_columns, shared = pairs_backward(gradient, *tensors, needed)
    parts = to_rows, to_columns, *shared.unbind(1), gradient.sum((0, 2, 3))
    return *(part.to(t.dtype) for part, t in zip(parts, (*tensors, offset), strict=True)), None


pairs.register_autograd(_backward, setup_context=_setup)
