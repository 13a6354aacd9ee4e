"""What all kernels share: their operands as they take them, loads of padded tiles, mask bits, scores, the normal law.

Index arithmetic: a tile's base is moved by 64-bit scalars; offsets inside a tile, and along one sequence, are 32 bits.
"""

# Kernels are in Triton's language, whose types pyright cannot see.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
from __future__ import annotations

from collections import namedtuple
from typing import Final

import triton
import triton.language as tl

from attnflow.bias.impl.triton import tuning
from attnflow.bias.terms import EPS as _EPS

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)  # decided when triton is imported (TRITON_INTERPRET=1)

BLOCK: Final = tl.constexpr(64)  # keys of a block, and bits of a word
DOT: Final = tl.constexpr("tf32x3")  # products of float32 matrices: three of TF32, 22 bits; 16-bit ones are exact
EPS: Final = tl.constexpr(_EPS)
LOG2E: Final = tl.constexpr(1.4426950408889634)
LOG_ROOT_TWO_PI: Final = tl.constexpr(1.3257480647361595)  # log2(sqrt(2 pi))
RANKS: Final = tl.constexpr(tuning.RANKS)
UP: Final = tl.constexpr(INTERPRETED)  # a product of bfloat16 matrices is NaN in the interpreter
padded = triton.constexpr_function(tuning.padded)


# A tensor [batch, heads or maps, tokens, width] with contiguous widths; strides are 0 where one serves all.
View = namedtuple("View", "base batch head token")
# Words of the mask, and one pair of `Lists` of blocks: views.
Relation = namedtuple("Relation", "words full total others")
# What the attention kernels take of a call: views or None, then numbers; `per_...` heads share one of each.
Attention = namedtuple(
    "Attention", "query key value pairs columns sinks rows cols per_kv per_pairs per_columns scale softcap"
)
# What the kernels of pairs take, named as in `OPERANDS`; a and c are the vectors of the guidance network.
Terms = namedtuple(
    "Terms",
    "a c gain shift weight left right rank table bucket_of row_positions column_positions distances origin dense",
)


@triton.jit
def at(view, b, h):
    """Where the matrix of a batch element and a head or map begins."""
    return view.base + b.to(tl.int64) * view.batch + h.to(tl.int64) * view.head


@triton.jit
def load_tile(base, stride, start, limit, COUNT: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """Rows start .. start + COUNT - 1 of a matrix: zero beyond WIDTH, and beyond `limit` rows if CHECK."""
    PADDED: tl.constexpr = padded(WIDTH)
    d, row = tl.arange(0, PADDED), tl.arange(0, COUNT)
    where = base + start.to(tl.int64) * stride + (row[:, None] * stride + d[None, :])
    if CHECK and WIDTH < PADDED:
        loaded = tl.load(where, mask=(start + row[:, None] < limit) & (d[None, :] < WIDTH), other=0.0)
    elif CHECK:
        loaded = tl.load(where, mask=start + row[:, None] < limit, other=0.0)
    elif WIDTH < PADDED:
        loaded = tl.load(where, mask=d[None, :] < WIDTH, other=0.0)
    else:
        loaded = tl.load(where)
    if UP:
        loaded = loaded.to(tl.float32)
    return loaded


@triton.jit
def load_pairs(
    base, stride, row, col, num_rows, num_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Tile of a matrix from (row, col) on, in float32, [COLS, ROWS] if TRANSPOSED; zero beyond its edges if CHECK."""
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    if TRANSPOSED:
        rows, cols = tl.arange(0, ROWS)[None, :], tl.arange(0, COLS)[:, None]
    where = base + (row.to(tl.int64) * stride + col) + (rows * stride + cols)
    if CHECK:
        return tl.load(where, mask=(row + rows < num_rows) & (col + cols < num_cols), other=0.0).to(tl.float32)
    return tl.load(where).to(tl.float32)


@triton.jit
def store_tile(base, stride, start, limit, tile, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Write rows start .. start + COUNT - 1 of a matrix, those below `limit`, WIDTH numbers each."""
    d, row = tl.arange(0, padded(WIDTH)), tl.arange(0, COUNT)
    where = base + start.to(tl.int64) * stride + (row[:, None] * stride + d[None, :])
    mask = (start + row[:, None] < limit) & (d[None, :] < WIDTH)
    tl.store(where, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def allowed_tile(words, row_index, TRANSPOSED: tl.constexpr):
    """Booleans of the pairs (row, key of a block) from one word per row; [keys, rows] if TRANSPOSED."""
    word = tl.load(words + row_index)
    bit = tl.arange(0, BLOCK).to(tl.int64)
    if TRANSPOSED:
        return ((word[None, :] >> bit[:, None]) & 1) != 0
    return ((word[:, None] >> bit[None, :]) & 1) != 0


@triton.jit
def tanh(x):
    """The hyperbolic tangent from one exponential; no library call, which the interpreter would not know."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def scored(product, call):
    """(score without bias, its derivative by scale * product), from q k^T."""
    score = product * call.scale
    slope = 1.0
    if call.softcap is not None:
        bent = tanh(score / call.softcap)
        score = call.softcap * bent
        slope = 1.0 - bent * bent
    return score, slope


@triton.jit
def biased(score, call, pairs, columns, bits, row, col, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Scores of a tile [ROWS, keys] with their bias, and -inf where no pair exists; None for what a call has not."""
    if pairs is not None:
        score += load_pairs(pairs, call.pairs.token, row, col, call.rows, call.cols, ROWS, BLOCK, False, MASKED)
    if columns is not None:
        cols = col + tl.arange(0, BLOCK)
        score += tl.load(columns + cols, mask=cols < call.cols, other=0.0)[None, :]
    if MASKED:
        score = tl.where(allowed_tile(bits, row + tl.arange(0, ROWS), False), score, float("-inf"))
    return score


@triton.jit
def exp_difference(score, top, EXACT: tl.constexpr):
    """exp(score - top); in one fused operation less where the inputs have 16 bits."""
    if EXACT:
        return tl.exp2((score - top) * LOG2E)
    return tl.exp2(score * LOG2E - top * LOG2E)


@triton.jit
def tail(x, EXACT: tl.constexpr):
    """Phi(-x) of the normal law for x >= 0, as 2 to the power of a polynomial: one special-function instruction.

    Absolute error 6e-8 if EXACT, else 1e-6, and x * tail(x) likewise; both polynomials fall to -inf beyond x = 6.
    """
    if EXACT:
        p = -2.2933744718844906e-06 * x + 3.306767989941228e-05
        p = p * x - 1.5710165426946476e-04
        p = p * x - 2.0486065500496808e-04
        p = p * x + 7.149047332262293e-03
        p = p * x - 5.255343407641344e-02
        p = p * x - 4.591896924820169e-01
        p = p * x - 1.1511075039086216
        p = p * x - 9.999999444417823e-01
    else:
        p = -5.021373705299537e-04 * x + 7.289731001881461e-03
        p = p * x - 5.2346561348137255e-02
        p = p * x - 4.5942501243270145e-01
        p = p * x - 1.1510437654683319
        p = p * x - 1.0000025676750945
    return tl.exp2(p)


@triton.jit
def bucket_tile(terms, b, rows, cols, num_rows, num_cols):
    """Bucket of the distance of each pair; pairs beyond the ends have that of some distance."""
    row = tl.load(at(terms.row_positions, b, b) + rows, mask=rows < num_rows, other=0)
    column = tl.load(at(terms.column_positions, b, b) + cols, mask=cols < num_cols, other=0)
    distance = column[None, :] - row[:, None] + terms.origin
    distance = tl.minimum(tl.maximum(distance, 0), terms.distances - 1)
    return tl.load(terms.bucket_of + distance)
