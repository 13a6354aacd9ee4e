"""Attention backward: gradients of queries, of keys, values and columns, each by the program that owns the tile.

`delta_kernel` (query blocks, heads, batch): sum of output * its gradient, a number per query.
`query_kernel` (heads, query blocks, batch): walks the key blocks of its queries, as the forward pass does. On the way
it repairs delta: the output was rounded to 16 bits, which shifts dS of a whole row and would add up in the gradient of
a bias; delta is also the sum of weight * (dO v), which it meets tile by tile.
`key_kernel` (key blocks, key-value heads, batch): walks, head by head, the query blocks of its keys on transposed
tiles, so that weights enter their product from registers. Nothing is accumulated by two programs: bit-identical runs.
Shared memory, 16-bit, head_dim 128: keys and values of a block 32 KiB, and per stage 64 queries and gradients 32 KiB.
"""

# Kernels are in Triton's language, whose types pyright cannot see.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnflow.bias.impl.triton.device import (
    BLOCK,
    DOT,
    allowed_tile,
    exp_difference,
    load_pairs,
    load_tile,
    scored,
    store_tile,
)


@triton.jit
def delta_kernel(
    output, gradient, delta, output_b, output_h, output_m, gradient_b, gradient_h, gradient_m, num_heads, num_rows,
    VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta[row] = sum of output * gradient."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * ROWS
    rows = start + tl.arange(0, ROWS)
    output += b * output_b + h * output_h
    gradient += b * gradient_b + h * gradient_h
    o = load_tile(output, output_m, start, num_rows, ROWS, VALUE, VALUE_PADDED, True, True)
    g = load_tile(gradient, gradient_m, start, num_rows, ROWS, VALUE, VALUE_PADDED, True, True)
    tl.store(delta + (b * num_heads + h) * num_rows + rows, tl.sum(o * g, 1), mask=rows < num_rows)


@triton.jit
def _walk_keys(
    acc, sum_, excess, q, gradient, logsum, delta, first, last, list_, key, value, pairs, columns, words, start,
    key_n, value_n, pairs_m, num_rows, num_cols, num_words, scale, softcap,
    MASKED: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, UP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add dS k of the key blocks first .. last - 1 of a list, and the sums over a row of weights and of dS."""
    for entry in range(first, last):
        block = tl.load(list_ + entry)
        col = block * BLOCK
        k = load_tile(key, key_n, col, num_cols, BLOCK, WIDTH, PADDED, MASKED, UP)
        v = load_tile(value, value_n, col, num_cols, BLOCK, VALUE, VALUE_PADDED, MASKED, UP)
        score, slope = scored(tl.dot(q, tl.trans(k), input_precision=DOT), scale, softcap, SOFTCAP)
        if HAS_PAIRS:
            score += load_pairs(pairs, pairs_m, start, col, num_rows, num_cols, ROWS, BLOCK, False, MASKED)
        if HAS_COLUMNS:
            cols = col + tl.arange(0, BLOCK)
            score += tl.load(columns + cols, mask=cols < num_cols, other=0.0)[None, :]
        if MASKED:
            rows = start + tl.arange(0, ROWS)
            score = tl.where(allowed_tile(words + block.to(tl.int64) * num_words, rows, False), score, float("-inf"))
        along = tl.dot(gradient, tl.trans(v), input_precision=DOT)
        weight = exp_difference(score, logsum[:, None], EXACT)
        change = weight * (along - delta[:, None])
        sum_ += tl.sum(weight, 1)
        excess += tl.sum(change, 1)
        acc = tl.dot((change * slope).to(k.dtype), k, acc, input_precision=DOT)
    return acc, sum_, excess


@triton.jit
def query_kernel(
    query, key, value, pairs, columns, words, full, count, index, gradient, logsum, delta, exact_delta, query_gradient,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, pairs_b, pairs_g, pairs_m,
    columns_b, columns_g, gradient_b, gradient_h, gradient_m, result_b, result_h, result_m, mask_b, mask_h,
    num_heads, num_rows, num_cols, num_words, num_row_blocks, num_blocks, per_kv, per_pairs, per_columns,
    scale, softcap,
    HAS_PAIRS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, UP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """query_gradient = scale * dS k, and exact_delta."""
    h, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row_block = num_row_blocks - 1 - tl.program_id(1)
    start = row_block * ROWS
    rows = start + tl.arange(0, ROWS)
    wide = h.to(tl.int64)
    key += b * key_b + (h // per_kv).to(tl.int64) * key_h
    value += b * value_b + (h // per_kv).to(tl.int64) * value_h
    lists = b * mask_b + wide * mask_h
    words += lists * num_blocks * num_words
    entry = lists * num_row_blocks + row_block
    if HAS_PAIRS:
        pairs += b * pairs_b + (h // per_pairs).to(tl.int64) * pairs_g
    if HAS_COLUMNS:
        columns += b * columns_b + (h // per_columns).to(tl.int64) * columns_g
    q = load_tile(query + b * query_b + wide * query_h, query_m, start, num_rows, ROWS, WIDTH, PADDED, True, UP)
    gradient += b * gradient_b + wide * gradient_h
    g = load_tile(gradient, gradient_m, start, num_rows, ROWS, VALUE, VALUE_PADDED, True, UP)
    line = (b * num_heads + wide) * num_rows + rows
    lse = tl.load(logsum + line, mask=rows < num_rows, other=0.0)
    dlt = tl.load(delta + line, mask=rows < num_rows, other=0.0)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    sum_, excess = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    middle, last = tl.load(full + entry), tl.load(count + entry)
    list_ = index + entry * num_blocks
    acc, sum_, excess = _walk_keys(
        acc, sum_, excess, q, g, lse, dlt, 0, middle, list_, key, value, pairs, columns, words, start,
        key_n, value_n, pairs_m, num_rows, num_cols, num_words, scale, softcap,
        False, HAS_PAIRS, HAS_COLUMNS, SOFTCAP, WIDTH, PADDED, VALUE, VALUE_PADDED, ROWS, UP, EXACT,
    )  # fmt: skip
    acc, sum_, excess = _walk_keys(
        acc, sum_, excess, q, g, lse, dlt, middle, last, list_, key, value, pairs, columns, words, start,
        key_n, value_n, pairs_m, num_rows, num_cols, num_words, scale, softcap,
        True, HAS_PAIRS, HAS_COLUMNS, SOFTCAP, WIDTH, PADDED, VALUE, VALUE_PADDED, ROWS, UP, EXACT,
    )  # fmt: skip
    # Weights sum to 1, or to less where a sink takes part; sum_ also has the rounding of the log-sum-exp.
    exact = excess + dlt * sum_ if HAS_SINKS else dlt + excess / tl.where(sum_ > 0.0, sum_, 1.0)
    tl.store(exact_delta + line, exact, mask=rows < num_rows)
    query_gradient += b * result_b + wide * result_h
    store_tile(query_gradient, result_m, start, num_rows, acc * scale, ROWS, WIDTH, PADDED)


@triton.jit
def _walk_queries(
    key_acc, value_acc, column_acc, k, v, first, last, list_, query, gradient, logsum, delta, pairs, column, words,
    col, query_m, gradient_m, pairs_m, num_rows, num_cols, scale, softcap,
    MASKED: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    UP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the parts of the query blocks first .. last - 1 of a list; all tiles are [keys, queries]."""
    for entry in range(first, last):
        row = tl.load(list_ + entry) * BLOCK
        rows = row + tl.arange(0, BLOCK)
        q = load_tile(query, query_m, row, num_rows, BLOCK, WIDTH, PADDED, MASKED, UP)
        g = load_tile(gradient, gradient_m, row, num_rows, BLOCK, VALUE, VALUE_PADDED, MASKED, UP)
        lse = tl.load(logsum + rows, mask=rows < num_rows, other=0.0)
        dlt = tl.load(delta + rows, mask=rows < num_rows, other=0.0)
        score, slope = scored(tl.dot(k, tl.trans(q), input_precision=DOT), scale, softcap, SOFTCAP)
        if HAS_PAIRS:
            score += load_pairs(pairs, pairs_m, row, col, num_rows, num_cols, BLOCK, BLOCK, True, MASKED)
        if HAS_COLUMNS:
            score += column[:, None]
        if MASKED:
            score = tl.where(allowed_tile(words, rows, True), score, float("-inf"))
        weight = exp_difference(score, lse[None, :], EXACT)
        value_acc = tl.dot(weight.to(g.dtype), g, value_acc, input_precision=DOT)
        along = tl.dot(v, tl.trans(g), input_precision=DOT)
        change = weight * (along - dlt[None, :])
        if HAS_COLUMNS:
            column_acc += tl.sum(change, 1)
        key_acc = tl.dot((change * slope).to(q.dtype), q, key_acc, input_precision=DOT)
    return key_acc, value_acc, column_acc


@triton.jit
def key_kernel(
    query, key, value, pairs, columns, words, full, count, index, gradient, logsum, delta,
    key_gradient, value_gradient, column_gradient,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, pairs_b, pairs_g, pairs_m,
    columns_b, columns_g, gradient_b, gradient_h, gradient_m,
    key_gradient_b, key_gradient_h, key_gradient_n, value_gradient_b, value_gradient_h, value_gradient_n,
    mask_b, mask_h, num_heads, num_rows, num_cols, num_words, num_row_blocks, num_blocks,
    per_kv, per_pairs, per_columns, scale, softcap,
    HAS_PAIRS: tl.constexpr, HAS_COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    UP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """key_gradient = scale * dS^T q, value_gradient = weights^T dO, and column_gradient = dS^T 1 per query head."""
    block, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    col = block * BLOCK
    cols = col + tl.arange(0, BLOCK)
    key += b * key_b + kv.to(tl.int64) * key_h
    value += b * value_b + kv.to(tl.int64) * value_h
    k = load_tile(key, key_n, col, num_cols, BLOCK, WIDTH, PADDED, True, UP)
    v = load_tile(value, value_n, col, num_cols, BLOCK, VALUE, VALUE_PADDED, True, UP)
    key_acc = tl.zeros([BLOCK, PADDED], tl.float32)
    value_acc = tl.zeros([BLOCK, VALUE_PADDED], tl.float32)
    for part in range(per_kv):
        h = kv * per_kv + part
        wide = h.to(tl.int64)
        lists = b * mask_b + wide * mask_h
        entry = lists * num_blocks + block
        line = (b * num_heads + wide) * num_rows
        column = tl.zeros([BLOCK], tl.float32)
        pair_base = pairs
        if HAS_PAIRS:
            pair_base = pairs + b * pairs_b + (h // per_pairs).to(tl.int64) * pairs_g
        if HAS_COLUMNS:
            where = columns + b * columns_b + (h // per_columns).to(tl.int64) * columns_g + cols
            column = tl.load(where, mask=cols < num_cols, other=0.0)
        query_base = query + b * query_b + wide * query_h
        gradient_base = gradient + b * gradient_b + wide * gradient_h
        bits = words + entry * num_words
        list_ = index + entry * num_row_blocks
        middle, last = tl.load(full + entry), tl.load(count + entry)
        column_acc = tl.zeros([BLOCK], tl.float32)
        key_acc, value_acc, column_acc = _walk_queries(
            key_acc, value_acc, column_acc, k, v, 0, middle, list_, query_base, gradient_base, logsum + line,
            delta + line, pair_base, column, bits, col, query_m, gradient_m, pairs_m, num_rows, num_cols,
            scale, softcap, False, HAS_PAIRS, HAS_COLUMNS, SOFTCAP, WIDTH, PADDED, VALUE, VALUE_PADDED, UP, EXACT,
        )  # fmt: skip
        key_acc, value_acc, column_acc = _walk_queries(
            key_acc, value_acc, column_acc, k, v, middle, last, list_, query_base, gradient_base, logsum + line,
            delta + line, pair_base, column, bits, col, query_m, gradient_m, pairs_m, num_rows, num_cols,
            scale, softcap, True, HAS_PAIRS, HAS_COLUMNS, SOFTCAP, WIDTH, PADDED, VALUE, VALUE_PADDED, UP, EXACT,
        )  # fmt: skip
        if HAS_COLUMNS:
            where = column_gradient + (b * num_heads + wide) * num_cols + cols
            tl.store(where, column_acc, mask=cols < num_cols)
    store_tile(
        key_gradient + b * key_gradient_b + kv.to(tl.int64) * key_gradient_h,
        key_gradient_n, col, num_cols, key_acc * scale, BLOCK, WIDTH, PADDED,
    )  # fmt: skip
    store_tile(
        value_gradient + b * value_gradient_b + kv.to(tl.int64) * value_gradient_h,
        value_gradient_n, col, num_cols, value_acc, BLOCK, VALUE, VALUE_PADDED,
    )  # fmt: skip
