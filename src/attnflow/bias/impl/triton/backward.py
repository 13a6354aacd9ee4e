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
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from attnflow.bias.impl.triton.device import (
    BLOCK,
    DOT,
    allowed_tile,
    at,
    biased,
    exp_difference,
    load_pairs,
    load_tile,
    padded,
    scored,
    store_tile,
)


@triton.jit
def delta_kernel(output, gradient, delta, num_rows, VALUE: tl.constexpr):
    """delta[row] = sum of output * gradient."""
    h, b = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    o = load_tile(at(output, b, h), output.token, start, num_rows, BLOCK, VALUE, True).to(tl.float32)
    g = load_tile(at(gradient, b, h), gradient.token, start, num_rows, BLOCK, VALUE, True).to(tl.float32)
    tl.store(at(delta, b, h) + rows, tl.sum(o * g, 1), mask=rows < num_rows)


@triton.jit
def query_kernel(
    call, relation, gradient, logsum, delta, exact_delta, query_gradient,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """query_gradient = scale * dS k, and exact_delta."""
    h, b, row_block = tl.program_id(0), tl.program_id(2), tl.num_programs(1) - 1 - tl.program_id(1)
    start, kv = row_block * ROWS, h // call.per_kv
    rows = start + tl.arange(0, ROWS)
    key, value, words = at(call.key, b, kv), at(call.value, b, kv), at(relation.words, b, h)
    pairs = at(call.pairs, b, h // call.per_pairs) if call.pairs is not None else None
    columns = at(call.columns, b, h // call.per_columns) if call.columns is not None else None
    q = load_tile(at(call.query, b, h), call.query.token, start, call.rows, ROWS, WIDTH, True)
    g = load_tile(at(gradient, b, h), gradient.token, start, call.rows, ROWS, VALUE, True)
    lse = tl.load(at(logsum, b, h) + rows, mask=rows < call.rows, other=0.0)
    dlt = tl.load(at(delta, b, h) + rows, mask=rows < call.rows, other=0.0)
    acc = tl.zeros([ROWS, padded(WIDTH)], tl.float32)
    sum_, excess = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)  # over a row, of weights and of dS
    middle, last = tl.load(at(relation.full, b, h) + row_block), tl.load(at(relation.total, b, h) + row_block)
    list_ = at(relation.others, b, h) + row_block * relation.others.token
    for MASKED in tl.static_range(2):
        for entry in range(middle if MASKED else 0, last if MASKED else middle):
            block = tl.load(list_ + entry)
            col = block * BLOCK
            k = load_tile(key, call.key.token, col, call.cols, BLOCK, WIDTH, MASKED)
            v = load_tile(value, call.value.token, col, call.cols, BLOCK, VALUE, MASKED)
            score, slope = scored(tl.dot(q, tl.trans(k), input_precision=DOT), call)
            bits = words + block.to(tl.int64) * relation.words.token
            score = biased(score, call, pairs, columns, bits, start, col, ROWS, MASKED)
            along = tl.dot(g, tl.trans(v), input_precision=DOT)
            weight = exp_difference(score, lse[:, None], EXACT)
            change = weight * (along - dlt[:, None])
            sum_ += tl.sum(weight, 1)
            excess += tl.sum(change, 1)
            acc = tl.dot((change * slope).to(k.dtype), k, acc, input_precision=DOT)
    # Weights sum to 1, or to less where a sink takes part; sum_ also has the rounding of the log-sum-exp.
    exact = excess + dlt * sum_ if call.sinks is not None else dlt + excess / tl.where(sum_ > 0.0, sum_, 1.0)
    tl.store(at(exact_delta, b, h) + rows, exact, mask=rows < call.rows)
    store_tile(at(query_gradient, b, h), query_gradient.token, start, call.rows, acc * call.scale, ROWS, WIDTH)


@triton.jit
def key_kernel(
    call, relation, gradient, logsum, delta, key_gradient, value_gradient, column_gradient,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """key_gradient = scale * dS^T q, value_gradient = weights^T dO, and column_gradient = dS^T 1 per query head."""
    block, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    col = block * BLOCK
    cols = col + tl.arange(0, BLOCK)
    k = load_tile(at(call.key, b, kv), call.key.token, col, call.cols, BLOCK, WIDTH, True)
    v = load_tile(at(call.value, b, kv), call.value.token, col, call.cols, BLOCK, VALUE, True)
    key_acc = tl.zeros([BLOCK, padded(WIDTH)], tl.float32)
    value_acc = tl.zeros([BLOCK, padded(VALUE)], tl.float32)
    for part in range(call.per_kv):
        h = kv * call.per_kv + part
        column_acc = tl.zeros([BLOCK], tl.float32)
        if call.pairs is not None:
            pairs = at(call.pairs, b, h // call.per_pairs)
        if call.columns is not None:
            column = tl.load(at(call.columns, b, h // call.per_columns) + cols, mask=cols < call.cols, other=0.0)
        query, upstream, line, shift = at(call.query, b, h), at(gradient, b, h), at(logsum, b, h), at(delta, b, h)
        bits = at(relation.words, b, h) + block.to(tl.int64) * relation.words.token
        middle, last = tl.load(at(relation.full, b, h) + block), tl.load(at(relation.total, b, h) + block)
        list_ = at(relation.others, b, h) + block * relation.others.token
        for MASKED in tl.static_range(2):
            for entry in range(middle if MASKED else 0, last if MASKED else middle):
                row = tl.load(list_ + entry) * BLOCK
                rows = row + tl.arange(0, BLOCK)
                q = load_tile(query, call.query.token, row, call.rows, BLOCK, WIDTH, MASKED)
                g = load_tile(upstream, gradient.token, row, call.rows, BLOCK, VALUE, MASKED)
                lse = tl.load(line + rows, mask=rows < call.rows, other=0.0)
                dlt = tl.load(shift + rows, mask=rows < call.rows, other=0.0)
                score, slope = scored(tl.dot(k, tl.trans(q), input_precision=DOT), call)
                if call.pairs is not None:
                    score += load_pairs(
                        pairs, call.pairs.token, row, col, call.rows, call.cols, BLOCK, BLOCK, True, MASKED
                    )
                if call.columns is not None:
                    score += column[:, None]
                if MASKED:
                    score = tl.where(allowed_tile(bits, rows, True), score, float("-inf"))
                weight = exp_difference(score, lse[None, :], EXACT)
                value_acc = tl.dot(weight.to(g.dtype), g, value_acc, input_precision=DOT)
                along = tl.dot(v, tl.trans(g), input_precision=DOT)
                change = weight * (along - dlt[None, :])
                if call.columns is not None:
                    column_acc += tl.sum(change, 1)
                key_acc = tl.dot((change * slope).to(q.dtype), q, key_acc, input_precision=DOT)
        if call.columns is not None:
            tl.store(at(column_gradient, b, h) + cols, column_acc, mask=cols < call.cols)
    where = at(key_gradient, b, kv)
    store_tile(where, key_gradient.token, col, call.cols, key_acc * call.scale, BLOCK, WIDTH)
    store_tile(at(value_gradient, b, kv), value_gradient.token, col, call.cols, value_acc, BLOCK, VALUE)
