"""Attention forward, for many queries and for few.

`forward_kernel` (heads, query blocks, batch): one block of queries, online softmax over key blocks. Heads vary fastest,
so that those which share a bias read its tiles from the L2 cache; blocks are taken from the last one on, because those
have most keys under a causal mask. Each program walks the list of its key blocks: first the full ones, without a mask,
then the partial ones, with a word of bits per row. Shared memory: one tile of queries and `num_stages` tiles of keys,
values and biases; 16-bit, head_dim 128, 128 x 64: 32 + 2 * (16 + 16 + 16) = 128 KiB.
`decode_kernel` (splits, key-value heads, batch): without a gradient, a few query rows against a cache, split over the
keys. The rows of all query heads of a key-value head form one tile (16 rows or more, what a tensor core takes); each
split leaves its sum, maximum and output. Key blocks that nobody may attend to, such as the unwritten end of a static
cache, are not read.
`combine_kernel` (rows, batch * heads): adds the splits.
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
    LOG2E,
    UP,
    at,
    biased,
    exp_difference,
    load_tile,
    padded,
    scored,
    store_tile,
)


@triton.jit
def forward_kernel(
    call, relation, output, logsum, WIDTH: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr
):
    """output and log-sum-exp (natural, 0 for a row with nothing allowed)."""
    h, b, row_block = tl.program_id(0), tl.program_id(2), tl.num_programs(1) - 1 - tl.program_id(1)
    start, kv = row_block * ROWS, h // call.per_kv
    rows = start + tl.arange(0, ROWS)
    key, value, words = at(call.key, b, kv), at(call.value, b, kv), at(relation.words, b, h)
    pairs = at(call.pairs, b, h // call.per_pairs) if call.pairs is not None else None
    columns = at(call.columns, b, h // call.per_columns) if call.columns is not None else None
    query = load_tile(at(call.query, b, h), call.query.token, start, call.rows, ROWS, WIDTH, True)
    acc = tl.zeros([ROWS, padded(VALUE)], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    middle, last = tl.load(at(relation.full, b, h) + row_block), tl.load(at(relation.total, b, h) + row_block)
    list_ = at(relation.others, b, h) + row_block * relation.others.token
    for MASKED in tl.static_range(2):
        for entry in range(middle if MASKED else 0, last if MASKED else middle):
            block = tl.load(list_ + entry)
            col = block * BLOCK
            k = load_tile(key, call.key.token, col, call.cols, BLOCK, WIDTH, MASKED)
            score, _ = scored(tl.dot(query, tl.trans(k), input_precision=DOT), call)
            bits = words + block.to(tl.int64) * relation.words.token
            score = biased(score, call, pairs, columns, bits, start, col, ROWS, MASKED)
            new = tl.maximum(top, tl.max(score, 1))
            finite = tl.where(new == float("-inf"), 0.0, new)  # nothing was allowed so far: exp2(-inf - 0) = 0, not NaN
            weight = exp_difference(score, finite[:, None], EXACT)
            shrink = tl.exp2((top - finite) * LOG2E)
            total = total * shrink + tl.sum(weight, 1)
            v = load_tile(value, call.value.token, col, call.cols, BLOCK, VALUE, MASKED)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=DOT)
            top = new
    empty = total == 0.0
    if call.sinks is not None:
        sink = tl.load(at(call.sinks, b, h) + rows * call.sinks.token, mask=rows < call.rows, other=0.0)
        new = tl.where(empty, 0.0, tl.maximum(top, sink))
        shrink = tl.exp2(tl.where(empty, 0.0, top - new) * LOG2E)
        total = total * shrink + tl.where(empty, 0.0, tl.exp2((sink - new) * LOG2E))
        acc *= shrink[:, None]
        top = new
    acc /= tl.where(empty, 1.0, total)[:, None]
    store_tile(at(output, b, h), output.token, start, call.rows, acc, ROWS, VALUE)
    log_total = tl.where(empty, 0.0, top + tl.log(tl.where(empty, 1.0, total)))
    tl.store(at(logsum, b, h) + rows, log_total, mask=rows < call.rows)


@triton.jit
def decode_kernel(
    call, mask, output, total, top, num_heads, blocks_per_split,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Unnormalised output, sum and maximum of one split of the keys; line `part * queries + row` of the tile."""
    split, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, ROWS)
    h, row = kv * call.per_kv + line // call.rows, line % call.rows
    real = line < call.per_kv * call.rows
    d, dv = tl.arange(0, padded(WIDTH)), tl.arange(0, padded(VALUE))
    where = at(call.query, b, h[:, None]) + row[:, None] * call.query.token + d[None, :]
    q = tl.load(where, mask=real[:, None] & (d[None, :] < WIDTH), other=0.0)
    if UP:
        q = q.to(tl.float32)
    key, value = at(call.key, b, kv), at(call.value, b, kv)
    acc = tl.zeros([ROWS, padded(VALUE)], tl.float32)
    sum_ = tl.zeros([ROWS], tl.float32)
    max_ = tl.full([ROWS], float("-inf"), tl.float32)
    for step in range(blocks_per_split):
        start = (split * blocks_per_split + step) * BLOCK
        cols = start + tl.arange(0, BLOCK)
        allowed = real[:, None] & (cols[None, :] < call.cols)
        if mask is not None:
            bits = at(mask, b, h[:, None]) + row[:, None] * mask.token + cols[None, :]
            allowed = tl.load(bits, mask=allowed, other=0) != 0
        if tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0:
            k = load_tile(key, call.key.token, start, call.cols, BLOCK, WIDTH, True)
            score, _ = scored(tl.dot(q, tl.trans(k), input_precision=DOT), call)
            if call.pairs is not None:
                lines = at(call.pairs, b, (h // call.per_pairs)[:, None]) + row[:, None] * call.pairs.token
                score += tl.load(lines + cols[None, :], mask=allowed, other=0.0).to(tl.float32)
            if call.columns is not None:
                lines = at(call.columns, b, (h // call.per_columns)[:, None])
                score += tl.load(lines + cols[None, :], mask=allowed, other=0.0)
            score = tl.where(allowed, score, float("-inf"))
            new = tl.maximum(max_, tl.max(score, 1))
            finite = tl.where(new == float("-inf"), 0.0, new)
            weight = tl.exp2((score - finite[:, None]) * LOG2E)
            shrink = tl.exp2((max_ - finite) * LOG2E)
            sum_ = sum_ * shrink + tl.sum(weight, 1)
            v = load_tile(value, call.value.token, start, call.cols, BLOCK, VALUE, True)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=DOT)
            max_ = new
    place = ((b.to(tl.int64) * num_heads + h) * call.rows + row) * tl.num_programs(0) + split
    tl.store(total + place, sum_, mask=real)
    tl.store(top + place, max_, mask=real)
    where = output + place[:, None] * VALUE + dv[None, :]
    tl.store(where, acc, mask=real[:, None] & (dv[None, :] < VALUE))


@triton.jit
def combine_kernel(parts, total, top, sinks, output, num_heads, num_splits, VALUE: tl.constexpr, SPLITS: tl.constexpr):
    """output[row] from its splits; 0 where nothing was allowed."""
    row, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = line // num_heads, line % num_heads
    split, dv = tl.arange(0, SPLITS), tl.arange(0, padded(VALUE))
    place = (line * tl.num_programs(0) + row) * num_splits + split
    top_ = tl.load(top + place, mask=split < num_splits, other=float("-inf"))
    total_ = tl.load(total + place, mask=split < num_splits, other=0.0)
    largest = tl.max(top_, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    share = tl.exp2((top_ - finite) * LOG2E)
    sum_ = tl.sum(total_ * share, 0)
    where = parts + place[:, None] * VALUE + dv[None, :]
    partial = tl.load(where, mask=(split[:, None] < num_splits) & (dv[None, :] < VALUE), other=0.0)
    acc = tl.sum(partial * share[:, None], 0)
    if sinks is not None:
        sink = tl.load(at(sinks, b, h) + row * sinks.token)
        sum_ += tl.where(sum_ > 0.0, tl.exp2((sink - finite) * LOG2E), 0.0)
    acc /= tl.where(sum_ > 0.0, sum_, 1.0)
    where = at(output, b, h) + row * output.token + dv
    tl.store(where, acc.to(output.base.dtype.element_ty), mask=dv < VALUE)
