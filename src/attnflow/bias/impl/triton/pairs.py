"""The bias of pairs, materialised: guidance + product + offset + dense into one buffer, in allowed blocks only.

`centre_kernel` (blocks, maps, batch): guidance vectors, centred over the hidden units and transposed to
[hidden, tokens], so that the loop over hidden units reads them in order.
`pairs_kernel` (query blocks * key blocks, maps, batch): one 64 x 64 tile; programs beyond the length of their query
block's list leave at once. Per pair and hidden unit: 9 or 12 operations and one special function; the variance of the
sum comes from one matrix product. Memory: the buffer; nothing has both n * n and hidden.
"""

# Kernels are in Triton's language, whose types pyright cannot see.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnflow.bias.impl.triton.device import BLOCK, DOT, bucket_tile, load_pairs, load_tile, tail


@triton.jit
def centre_kernel(
    source, result, source_b, source_g, source_m, num_groups, num_rows, num_padded,
    HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr,
):  # fmt: skip
    """result[unit, row] = source[row, unit] - its mean over units; zero in padded rows."""
    g, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    unit = tl.arange(0, HIDDEN_PADDED)
    source += b * source_b + g * source_g
    x = load_tile(source, source_m, start, num_rows, BLOCK, HIDDEN, HIDDEN_PADDED, True, True)
    x -= (tl.sum(x, 1) / HIDDEN)[:, None]
    result += (b * num_groups + g) * HIDDEN * num_padded
    where = result + unit[:, None].to(tl.int64) * num_padded + rows[None, :]
    inside = (unit[:, None] < HIDDEN) & (rows[None, :] < num_padded)
    tl.store(where, tl.where(rows[None, :] < num_rows, tl.trans(x), 0.0), mask=inside)


@triton.jit
def unit_tile(source, start, num_padded, HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr):
    """[hidden, tokens] of one block from what `centre_kernel` wrote."""
    unit = tl.arange(0, HIDDEN_PADDED)
    where = source + unit[:, None].to(tl.int64) * num_padded + (start + tl.arange(0, BLOCK))[None, :]
    return tl.load(where, mask=unit[:, None] < HIDDEN, other=0.0)


@triton.jit
def inverse_deviation(
    rows_centred, columns_centred, row, col, padded_rows, padded_cols,
    EPS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """1 / sqrt(var(a_i + c_j) + eps) of centred vectors, without a vector per pair.

    |a|^2 + |c|^2 + 2 a.c is one matrix product, but cancels where a is close to -c; EXACT adds up squares instead.
    """
    if EXACT:
        square = tl.zeros([BLOCK, BLOCK], tl.float32)
        a_base = rows_centred + row + tl.arange(0, BLOCK)
        c_base = columns_centred + col + tl.arange(0, BLOCK)
        for _ in range(HIDDEN):
            x = tl.load(a_base)[:, None] + tl.load(c_base)[None, :]
            square += x * x
            a_base += padded_rows
            c_base += padded_cols
    else:
        a = unit_tile(rows_centred, row, padded_rows, HIDDEN, HIDDEN_PADDED)
        c = unit_tile(columns_centred, col, padded_cols, HIDDEN, HIDDEN_PADDED)
        cross = tl.dot(tl.trans(a), c, input_precision=DOT)
        square = tl.sum(a * a, 0)[:, None] + tl.sum(c * c, 0)[None, :] + 2.0 * cross
    return tl.rsqrt(tl.maximum(square, 0.0) / HIDDEN + EPS)


@triton.jit
def pairs_kernel(
    rows_centred, columns_centred, gain, shift, weight, left, right, table, bucket_of, row_positions, column_positions,
    dense, count, index, pairs,
    left_b, left_g, left_m, right_b, right_g, right_n, row_positions_b, column_positions_b,
    dense_b, dense_g, dense_m, pairs_b, pairs_g, pairs_m, mask_b,
    num_groups, num_rows, num_cols, num_row_blocks, num_blocks, distances, buckets, origin, rank, largest,
    EPS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr, EXACT: tl.constexpr,
    GUIDANCE: tl.constexpr, PRODUCT: tl.constexpr, OFFSET: tl.constexpr, DENSE: tl.constexpr, RANKS: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """pairs[row, column] for one allowed tile; clipped to what its type can hold."""
    g, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row_block, slot = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    entry = b * mask_b * num_row_blocks + row_block
    if slot < tl.load(count + entry):
        block = tl.load(index + entry * num_blocks + slot)
        rows = row_block * BLOCK + tl.arange(0, BLOCK)
        cols = block * BLOCK + tl.arange(0, BLOCK)
        bias = tl.zeros([BLOCK, BLOCK], tl.float32)
        if GUIDANCE:
            padded_rows, padded_cols = num_row_blocks * BLOCK, num_blocks * BLOCK
            rows_centred += (b * num_groups + g) * HIDDEN * padded_rows
            columns_centred += (b * num_groups + g) * HIDDEN * padded_cols
            r = inverse_deviation(
                rows_centred, columns_centred, row_block * BLOCK, block * BLOCK, padded_rows, padded_cols,
                EPS, HIDDEN, HIDDEN_PADDED, EXACT,
            )  # fmt: skip
            for unit in range(HIDDEN):
                gamma = tl.load(gain + g * HIDDEN + unit)
                a = tl.load(rows_centred + rows) * gamma
                c = tl.load(columns_centred + cols) * gamma
                z = (a[:, None] + c[None, :]) * r + tl.load(shift + g * HIDDEN + unit)
                size = tl.abs(z)
                bias += (tl.maximum(z, 0.0) - size * tail(size, EXACT)) * tl.load(weight + g * HIDDEN + unit)
                rows_centred += padded_rows
                columns_centred += padded_cols
        if PRODUCT:
            left += b * left_b + g * left_g
            right += b * right_b + g * right_g
            for start in range(0, rank, RANKS):
                d = start + tl.arange(0, RANKS)
                where = left + rows[:, None].to(tl.int64) * left_m + d[None, :]
                u = tl.load(where, mask=(rows[:, None] < num_rows) & (d[None, :] < rank), other=0.0)
                where = right + cols[:, None].to(tl.int64) * right_n + d[None, :]
                v = tl.load(where, mask=(cols[:, None] < num_cols) & (d[None, :] < rank), other=0.0)
                if UP:
                    u, v = u.to(tl.float32), v.to(tl.float32)
                bias = tl.dot(u, tl.trans(v), bias, input_precision=DOT)
        if OFFSET:
            bucket = bucket_tile(
                bucket_of, row_positions + b * row_positions_b, column_positions + b * column_positions_b,
                rows, cols, num_rows, num_cols, distances, origin,
            )  # fmt: skip
            bias += tl.load(table + g * buckets + bucket)
        if DENSE:
            dense += b * dense_b + g * dense_g
            row, col = row_block * BLOCK, block * BLOCK
            bias += load_pairs(dense, dense_m, row, col, num_rows, num_cols, BLOCK, BLOCK, False, True)
        bias = tl.minimum(tl.maximum(bias, -largest), largest)
        where = pairs + b * pairs_b + g * pairs_g + rows[:, None].to(tl.int64) * pairs_m + cols[None, :]
        tl.store(where, bias.to(pairs.dtype.element_ty))
