"""Decoding: a few query rows against a cache of keys, split over the keys, without a gradient.

`row_pairs_kernel` (key blocks, maps, batch): the bias rows, once for all heads that share them, in float32. For one row
the tile is [64 keys, hidden units]: no centring or transposing beforehand, so one kernel reads the cached columns once.
`decode_kernel` (splits, key-value heads, batch): the rows of all query heads of a key-value head form one tile (16
rows or more, what a tensor core takes); each split leaves its sum, maximum and output.
`combine_kernel` (rows, batch * heads): adds the splits.
Key blocks that nobody may attend to, such as the unwritten end of a static cache, are not read.
"""

# Kernels are in Triton's language, whose types pyright cannot see.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnflow.bias.impl.triton.device import BLOCK, DOT, LOG2E, bucket_tile, load_tile, scored, tail


@triton.jit
def row_pairs_kernel(
    rows_vectors, columns_vectors, gain, shift, weight, left, right, table, bucket_of, row_positions, column_positions,
    dense, mask, pairs,
    rows_b, rows_g, rows_m, columns_b, columns_g, columns_n, left_b, left_g, left_m, right_b, right_g, right_n,
    row_positions_b, column_positions_b, dense_b, dense_g, dense_m, mask_b, mask_m,
    num_groups, num_rows, num_cols, distances, buckets, origin, rank,
    EPS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr, EXACT: tl.constexpr,
    GUIDANCE: tl.constexpr, PRODUCT: tl.constexpr, OFFSET: tl.constexpr, DENSE: tl.constexpr, RANKS: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """pairs[row, key] for one block of keys, where any head may attend."""
    g, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    col = tl.program_id(0) * BLOCK
    cols = col + tl.arange(0, BLOCK)
    unit = tl.arange(0, HIDDEN_PADDED)
    for row in range(num_rows):
        needed = 1
        if MASK:
            seen = tl.load(mask + b * mask_b + row * mask_m + cols, mask=cols < num_cols, other=0)
            needed = tl.max(seen.to(tl.int32), 0)
        if needed > 0:
            bias = tl.zeros([BLOCK], tl.float32)
            if GUIDANCE:
                source = columns_vectors + b * columns_b + g * columns_g
                c = load_tile(source, columns_n, col, num_cols, BLOCK, HIDDEN, HIDDEN_PADDED, True, True)
                line = rows_vectors + b * rows_b + g * rows_g + row * rows_m + unit
                x = c + tl.load(line, mask=unit < HIDDEN, other=0.0).to(tl.float32)[None, :]
                x -= (tl.sum(x, 1) / HIDDEN)[:, None]
                x = tl.where(unit[None, :] < HIDDEN, x, 0.0)
                r = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + EPS)
                gamma = tl.load(gain + g * HIDDEN + unit, mask=unit < HIDDEN, other=0.0)
                beta = tl.load(shift + g * HIDDEN + unit, mask=unit < HIDDEN, other=0.0)
                w = tl.load(weight + g * HIDDEN + unit, mask=unit < HIDDEN, other=0.0)
                z = x * r[:, None] * gamma[None, :] + beta[None, :]
                size = tl.abs(z)
                bias += tl.sum((tl.maximum(z, 0.0) - size * tail(size, EXACT)) * w[None, :], 1)
            if PRODUCT:
                for start in range(0, rank, RANKS):
                    d = start + tl.arange(0, RANKS)
                    u = tl.load(left + b * left_b + g * left_g + row * left_m + d, mask=d < rank, other=0.0)
                    other = right + b * right_b + g * right_g + cols[:, None].to(tl.int64) * right_n + d[None, :]
                    v = tl.load(other, mask=(cols[:, None] < num_cols) & (d[None, :] < rank), other=0.0)
                    bias += tl.sum(u.to(tl.float32)[None, :] * v.to(tl.float32), 1)
            if OFFSET:
                bucket = bucket_tile(
                    bucket_of, row_positions + b * row_positions_b, column_positions + b * column_positions_b,
                    row + tl.arange(0, 1), cols, num_rows, num_cols, distances, origin,
                )  # fmt: skip
                bias += tl.sum(tl.load(table + g * buckets + bucket), 0)
            if DENSE:
                dense_at = dense + b * dense_b + g * dense_g + row * dense_m + cols
                bias += tl.load(dense_at, mask=cols < num_cols, other=0.0).to(tl.float32)
            result = pairs + ((b * num_groups + g) * num_rows + row) * num_cols + cols
            tl.store(result, bias, mask=cols < num_cols)


@triton.jit
def decode_kernel(
    query, key, value, pairs, columns, mask, output, total, top,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, pairs_b, pairs_g, pairs_m,
    columns_b, columns_g, mask_b, mask_h, mask_m,
    num_heads, num_rows, num_cols, per_kv, per_pairs, per_columns, blocks_per_split, num_splits, scale, softcap,
    HAS_PAIRS: tl.constexpr, HAS_COLUMNS: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, UP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Unnormalised output, sum and maximum of one split of the keys; line `part * num_rows + row` of the tile."""
    split, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    line = tl.arange(0, ROWS)
    h, row = kv * per_kv + line // num_rows, line % num_rows
    real = line < per_kv * num_rows
    d, dv = tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    where = query + b * query_b + h[:, None].to(tl.int64) * query_h + row[:, None] * query_m + d[None, :]
    q = tl.load(where, mask=real[:, None] & (d[None, :] < WIDTH), other=0.0)
    if UP:
        q = q.to(tl.float32)
    key += b * key_b + kv.to(tl.int64) * key_h
    value += b * value_b + kv.to(tl.int64) * value_h
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    sum_ = tl.zeros([ROWS], tl.float32)
    max_ = tl.full([ROWS], float("-inf"), tl.float32)
    for step in range(blocks_per_split):
        start = (split * blocks_per_split + step) * BLOCK
        cols = start + tl.arange(0, BLOCK)
        allowed = real[:, None] & (cols[None, :] < num_cols)
        if MASK:
            bits = mask + b * mask_b + h[:, None].to(tl.int64) * mask_h + row[:, None] * mask_m + cols[None, :]
            allowed = tl.load(bits, mask=allowed, other=0) != 0
        if tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0:
            k = load_tile(key, key_n, start, num_cols, BLOCK, WIDTH, PADDED, True, UP)
            score, _ = scored(tl.dot(q, tl.trans(k), input_precision=DOT), scale, softcap, SOFTCAP)
            if HAS_PAIRS:
                group = (h // per_pairs)[:, None].to(tl.int64)
                bias = pairs + b * pairs_b + group * pairs_g + row[:, None] * pairs_m + cols[None, :]
                score += tl.load(bias, mask=allowed, other=0.0).to(tl.float32)
            if HAS_COLUMNS:
                column = (h // per_columns)[:, None].to(tl.int64)
                score += tl.load(columns + b * columns_b + column * columns_g + cols[None, :], mask=allowed, other=0.0)
            score = tl.where(allowed, score, float("-inf"))
            new = tl.maximum(max_, tl.max(score, 1))
            finite = tl.where(new == float("-inf"), 0.0, new)
            weight = tl.exp2((score - finite[:, None]) * LOG2E)
            shrink = tl.exp2((max_ - finite) * LOG2E)
            sum_ = sum_ * shrink + tl.sum(weight, 1)
            v = load_tile(value, value_n, start, num_cols, BLOCK, VALUE, VALUE_PADDED, True, UP)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=DOT)
            max_ = new
    place = ((b * num_heads + h) * num_rows + row) * num_splits + split
    tl.store(total + place, sum_, mask=real)
    tl.store(top + place, max_, mask=real)
    where = output + place[:, None] * VALUE + dv[None, :]
    tl.store(where, acc, mask=real[:, None] & (dv[None, :] < VALUE))


@triton.jit
def combine_kernel(
    parts, total, top, sinks, output, output_b, output_h, output_m, sinks_b, sinks_h, sinks_m,
    num_heads, num_rows, num_splits,
    HAS_SINKS: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """output[row] from its splits; 0 where nothing was allowed."""
    row, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = line // num_heads, line % num_heads
    split, dv = tl.arange(0, SPLITS), tl.arange(0, VALUE_PADDED)
    place = (line * num_rows + row) * num_splits + split
    top_ = tl.load(top + place, mask=split < num_splits, other=float("-inf"))
    total_ = tl.load(total + place, mask=split < num_splits, other=0.0)
    largest = tl.max(top_, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    share = tl.exp2((top_ - finite) * LOG2E)
    sum_ = tl.sum(total_ * share, 0)
    where = parts + place[:, None] * VALUE + dv[None, :]
    partial = tl.load(where, mask=(split[:, None] < num_splits) & (dv[None, :] < VALUE), other=0.0)
    acc = tl.sum(partial * share[:, None], 0)
    if HAS_SINKS:
        sink = tl.load(sinks + b * sinks_b + h * sinks_h + row * sinks_m)
        sum_ += tl.where(sum_ > 0.0, tl.exp2((sink - finite) * LOG2E), 0.0)
    acc /= tl.where(sum_ > 0.0, sum_, 1.0)
    where = output + b * output_b + h * output_h + row * output_m + dv
    tl.store(where, acc.to(output.dtype.element_ty), mask=dv < VALUE)
