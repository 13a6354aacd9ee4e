"""Attention forward: one program per (query head, block of queries, batch element), online softmax over key blocks.

Grid (heads, query blocks, batch): heads vary fastest, so that the heads which share a bias read its tiles from the L2
cache; blocks are taken from the last one on, because those have most keys under a causal mask. Each program walks the
list of its key blocks: first the full ones, without a mask, then the partial ones, with a word of bits per row.
Shared memory: one tile of queries and `num_stages` tiles of keys, values and biases; 16-bit, head_dim 128, 128 x 64:
32 + 2 * (16 + 16 + 16) = 128 KiB.
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
    LOG2E,
    allowed_tile,
    exp_difference,
    load_pairs,
    load_tile,
    scored,
    store_tile,
)


@triton.jit
def _walk(
    output, total, top, query, first, last, list_, key, value, pairs, columns, words, start,
    key_n, value_n, pairs_m, num_rows, num_cols, num_words, scale, softcap,
    MASKED: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, UP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Entries first .. last - 1 of a list of key blocks."""
    for entry in range(first, last):
        block = tl.load(list_ + entry)
        col = block * BLOCK
        k = load_tile(key, key_n, col, num_cols, BLOCK, WIDTH, PADDED, MASKED, UP)
        score, _ = scored(tl.dot(query, tl.trans(k), input_precision=DOT), scale, softcap, SOFTCAP)
        if HAS_PAIRS:
            score += load_pairs(pairs, pairs_m, start, col, num_rows, num_cols, ROWS, BLOCK, False, MASKED)
        if HAS_COLUMNS:
            cols = col + tl.arange(0, BLOCK)
            score += tl.load(columns + cols, mask=cols < num_cols, other=0.0)[None, :]
        if MASKED:
            rows = start + tl.arange(0, ROWS)
            score = tl.where(allowed_tile(words + block.to(tl.int64) * num_words, rows, False), score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)  # nothing was allowed so far: exp2(-inf - 0) = 0, not NaN
        weight = exp_difference(score, finite[:, None], EXACT)
        shrink = tl.exp2((top - finite) * LOG2E)
        total = total * shrink + tl.sum(weight, 1)
        v = load_tile(value, value_n, col, num_cols, BLOCK, VALUE, VALUE_PADDED, MASKED, UP)
        output = tl.dot(weight.to(v.dtype), v, output * shrink[:, None], input_precision=DOT)
        top = new
    return output, total, top


@triton.jit
def forward_kernel(
    query, key, value, pairs, columns, sinks, words, full, count, index, output, logsum,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, pairs_b, pairs_g, pairs_m,
    columns_b, columns_g, sinks_b, sinks_h, sinks_m, output_b, output_h, output_m, mask_b, mask_h,
    num_heads, num_rows, num_cols, num_words, num_row_blocks, num_blocks, per_kv, per_pairs, per_columns,
    scale, softcap,
    HAS_PAIRS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, UP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """output and log-sum-exp (natural, 0 for a row with nothing allowed)."""
    h, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row_block = num_row_blocks - 1 - tl.program_id(1)
    start = row_block * ROWS
    rows = start + tl.arange(0, ROWS)
    query += b * query_b + h.to(tl.int64) * query_h
    key += b * key_b + (h // per_kv).to(tl.int64) * key_h
    value += b * value_b + (h // per_kv).to(tl.int64) * value_h
    lists = b * mask_b + h.to(tl.int64) * mask_h  # relations are numbered; strides are 0 where they are shared
    words += lists * num_blocks * num_words
    entry = lists * num_row_blocks + row_block
    if HAS_PAIRS:
        pairs += b * pairs_b + (h // per_pairs).to(tl.int64) * pairs_g
    if HAS_COLUMNS:
        columns += b * columns_b + (h // per_columns).to(tl.int64) * columns_g
    q = load_tile(query, query_m, start, num_rows, ROWS, WIDTH, PADDED, True, UP)
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    middle, last = tl.load(full + entry), tl.load(count + entry)
    list_ = index + entry * num_blocks
    acc, total, top = _walk(
        acc, total, top, q, 0, middle, list_, key, value, pairs, columns, words, start,
        key_n, value_n, pairs_m, num_rows, num_cols, num_words, scale, softcap,
        False, HAS_PAIRS, HAS_COLUMNS, SOFTCAP, WIDTH, PADDED, VALUE, VALUE_PADDED, ROWS, UP, EXACT,
    )  # fmt: skip
    acc, total, top = _walk(
        acc, total, top, q, middle, last, list_, key, value, pairs, columns, words, start,
        key_n, value_n, pairs_m, num_rows, num_cols, num_words, scale, softcap,
        True, HAS_PAIRS, HAS_COLUMNS, SOFTCAP, WIDTH, PADDED, VALUE, VALUE_PADDED, ROWS, UP, EXACT,
    )  # fmt: skip
    empty = total == 0.0
    if HAS_SINKS:
        sinks += b * sinks_b + h.to(tl.int64) * sinks_h
        sink = tl.load(sinks + rows * sinks_m, mask=rows < num_rows, other=0.0)
        new = tl.where(empty, 0.0, tl.maximum(top, sink))
        shrink = tl.exp2(tl.where(empty, 0.0, top - new) * LOG2E)
        total = total * shrink + tl.where(empty, 0.0, tl.exp2((sink - new) * LOG2E))
        acc *= shrink[:, None]
        top = new
    acc /= tl.where(empty, 1.0, total)[:, None]
    output += b * output_b + h.to(tl.int64) * output_h
    store_tile(output, output_m, start, num_rows, acc, ROWS, VALUE, VALUE_PADDED)
    log_total = tl.where(empty, 0.0, top + tl.log(tl.where(empty, 1.0, total)))
    tl.store(logsum + (b * num_heads + h) * num_rows + rows, log_total, mask=rows < num_rows)
