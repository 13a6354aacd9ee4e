"""The bias of pairs, materialised (guidance + product + offset + dense), and its gradient, in allowed blocks only.

`centre_kernel` (blocks, maps, batch): guidance vectors, centred over the hidden units and transposed to
[hidden, tokens], so that the loop over hidden units reads them in order.
`pairs_kernel` (query blocks * key blocks, maps, batch): one 64 x 64 tile; programs beyond the length of their query
block's list leave at once. Per pair and hidden unit: 9 or 12 operations and one special function; the variance of the
sum comes from one matrix product. Memory: the buffer; nothing has both n * n and hidden.
`row_pairs_kernel` (key blocks, maps, batch): the same for the few rows of decoding, once for all heads that share them,
in float32. For one row the tile is [64 keys, hidden units]: no centring or transposing beforehand, so that one kernel
reads the cached columns once.
`pairs_gradient_kernel` (query blocks * key blocks, maps, batch): the program that owns tile (i, j) loops over the
heads of its map, sums dS in registers, which is dB, uses it up at once, and then
- guidance: walks the hidden units once. With e = w GELU'(z) G, R[i, h] = sum_j r e and C[j, h] = sum_i r e, layer
  norm's backward separates like its forward:
      da_i = centre(gamma R_i) - sum_j q_ij (a_i + c_j),   q = r^2 / d * sum_h gamma_h e_h u_h,
  and likewise dc_j with C; d gamma = sum_i a R + sum_j c C; d beta = sum e; dw = sum GELU(z) G. Each tile writes its
  R, C and q-weighted parts beside each other, 2 * hidden * 64 numbers a side, and 2 * hidden sums;
- offset: walks the buckets that occur in the tile, and writes one sum each;
- product, dense: writes the tile, for a matrix product with the other side.
`gather_kernel` then adds the parts along the lists of blocks, in their order. Nothing is atomic: bit-identical runs.
Memory: the parts, 16 * hidden bytes a row of each tile; the caller bounds it by taking some query blocks at a time.
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
    EPS,
    LOG2E,
    LOG_ROOT_TWO_PI,
    RANKS,
    UP,
    allowed_tile,
    at,
    bucket_tile,
    exp_difference,
    load_pairs,
    load_tile,
    padded,
    scored,
    tail,
)


@triton.jit
def centre_kernel(source, result, num_rows, HIDDEN: tl.constexpr):
    """result[unit, row] = source[row, unit] - its mean over units; zero in padded rows."""
    g, b = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    unit = tl.arange(0, padded(HIDDEN))
    x = load_tile(at(source, b, g), source.token, start, num_rows, BLOCK, HIDDEN, True).to(tl.float32)
    x -= (tl.sum(x, 1) / HIDDEN)[:, None]
    where = at(result, b, g) + unit[:, None].to(tl.int64) * result.token + rows[None, :]
    tl.store(where, tl.where(rows[None, :] < num_rows, tl.trans(x), 0.0), mask=unit[:, None] < HIDDEN)


@triton.jit
def unit_tile(source, stride, start, HIDDEN: tl.constexpr):
    """[hidden, tokens] of one block from what `centre_kernel` wrote."""
    unit = tl.arange(0, padded(HIDDEN))
    where = source + unit[:, None].to(tl.int64) * stride + (start + tl.arange(0, BLOCK))[None, :]
    return tl.load(where, mask=unit[:, None] < HIDDEN, other=0.0)


@triton.jit
def inverse_deviation(terms, b, g, row, col, HIDDEN: tl.constexpr, EXACT: tl.constexpr):
    """1 / sqrt(var(a_i + c_j) + eps) of centred vectors, without a vector per pair.

    |a|^2 + |c|^2 + 2 a.c is one matrix product, but cancels where a is close to -c; EXACT adds up squares instead.
    """
    if EXACT:
        square = tl.zeros([BLOCK, BLOCK], tl.float32)
        a_base = at(terms.a, b, g) + row + tl.arange(0, BLOCK)
        c_base = at(terms.c, b, g) + col + tl.arange(0, BLOCK)
        for _ in range(HIDDEN):
            x = tl.load(a_base)[:, None] + tl.load(c_base)[None, :]
            square += x * x
            a_base += terms.a.token
            c_base += terms.c.token
    else:
        a = unit_tile(at(terms.a, b, g), terms.a.token, row, HIDDEN)
        c = unit_tile(at(terms.c, b, g), terms.c.token, col, HIDDEN)
        cross = tl.dot(tl.trans(a), c, input_precision=DOT)
        square = tl.sum(a * a, 0)[:, None] + tl.sum(c * c, 0)[None, :] + 2.0 * cross
    return tl.rsqrt(tl.maximum(square, 0.0) / HIDDEN + EPS)


@triton.jit
def pairs_kernel(
    terms, total, others, pairs, num_rows, num_cols, num_blocks, largest, HIDDEN: tl.constexpr, EXACT: tl.constexpr
):
    """pairs[row, column] for one allowed tile; clipped to what its type can hold."""
    g, b = tl.program_id(1), tl.program_id(2)
    row_block, slot = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    if slot < tl.load(at(total, b, b) + row_block):
        block = tl.load(at(others, b, b) + row_block * others.token + slot)
        row, col = row_block * BLOCK, block * BLOCK
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        bias = tl.zeros([BLOCK, BLOCK], tl.float32)
        if terms.a is not None:
            r = inverse_deviation(terms, b, g, row, col, HIDDEN, EXACT)
            a_base, c_base = at(terms.a, b, g) + rows, at(terms.c, b, g) + cols
            gain, shift, weight = at(terms.gain, b, g), at(terms.shift, b, g), at(terms.weight, b, g)
            for unit in range(HIDDEN):
                gamma = tl.load(gain + unit)
                a = tl.load(a_base) * gamma
                c = tl.load(c_base) * gamma
                z = (a[:, None] + c[None, :]) * r + tl.load(shift + unit)
                size = tl.abs(z)
                bias += (tl.maximum(z, 0.0) - size * tail(size, EXACT)) * tl.load(weight + unit)
                a_base += terms.a.token
                c_base += terms.c.token
        if terms.left is not None:
            for start in range(0, terms.rank, RANKS):
                d = start + tl.arange(0, RANKS)
                where = at(terms.left, b, g) + rows[:, None].to(tl.int64) * terms.left.token + d[None, :]
                u = tl.load(where, mask=(rows[:, None] < num_rows) & (d[None, :] < terms.rank), other=0.0)
                where = at(terms.right, b, g) + cols[:, None].to(tl.int64) * terms.right.token + d[None, :]
                v = tl.load(where, mask=(cols[:, None] < num_cols) & (d[None, :] < terms.rank), other=0.0)
                if UP:
                    u, v = u.to(tl.float32), v.to(tl.float32)
                bias = tl.dot(u, tl.trans(v), bias, input_precision=DOT)
        if terms.table is not None:
            bias += tl.load(at(terms.table, b, g) + bucket_tile(terms, b, rows, cols, num_rows, num_cols))
        if terms.dense is not None:
            dense = at(terms.dense, b, g)
            bias += load_pairs(dense, terms.dense.token, row, col, num_rows, num_cols, BLOCK, BLOCK, False, True)
        bias = tl.minimum(tl.maximum(bias, -largest), largest)
        where = at(pairs, b, g) + rows[:, None].to(tl.int64) * pairs.token + cols[None, :]
        tl.store(where, bias.to(pairs.base.dtype.element_ty))


@triton.jit
def row_pairs_kernel(terms, mask, pairs, num_rows, num_cols, HIDDEN: tl.constexpr, EXACT: tl.constexpr):
    """pairs[row, key] for one block of keys, where any head may attend."""
    g, b = tl.program_id(1), tl.program_id(2)
    col = tl.program_id(0) * BLOCK
    cols = col + tl.arange(0, BLOCK)
    unit = tl.arange(0, padded(HIDDEN))
    for row in range(num_rows):
        needed = 1
        if mask is not None:
            seen = tl.load(at(mask, b, g) + row * mask.token + cols, mask=cols < num_cols, other=0)
            needed = tl.max(seen.to(tl.int32), 0)
        if needed > 0:
            bias = tl.zeros([BLOCK], tl.float32)
            if terms.a is not None:
                c = load_tile(at(terms.c, b, g), terms.c.token, col, num_cols, BLOCK, HIDDEN, True).to(tl.float32)
                line = at(terms.a, b, g) + row * terms.a.token + unit
                x = c + tl.load(line, mask=unit < HIDDEN, other=0.0).to(tl.float32)[None, :]
                x -= (tl.sum(x, 1) / HIDDEN)[:, None]
                x = tl.where(unit[None, :] < HIDDEN, x, 0.0)
                r = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + EPS)
                gamma = tl.load(at(terms.gain, b, g) + unit, mask=unit < HIDDEN, other=0.0)
                beta = tl.load(at(terms.shift, b, g) + unit, mask=unit < HIDDEN, other=0.0)
                w = tl.load(at(terms.weight, b, g) + unit, mask=unit < HIDDEN, other=0.0)
                z = x * r[:, None] * gamma[None, :] + beta[None, :]
                size = tl.abs(z)
                bias += tl.sum((tl.maximum(z, 0.0) - size * tail(size, EXACT)) * w[None, :], 1)
            if terms.left is not None:
                for start in range(0, terms.rank, RANKS):
                    d = start + tl.arange(0, RANKS)
                    u = tl.load(at(terms.left, b, g) + row * terms.left.token + d, mask=d < terms.rank, other=0.0)
                    other = at(terms.right, b, g) + cols[:, None].to(tl.int64) * terms.right.token + d[None, :]
                    v = tl.load(other, mask=(cols[:, None] < num_cols) & (d[None, :] < terms.rank), other=0.0)
                    bias += tl.sum(u.to(tl.float32)[None, :] * v.to(tl.float32), 1)
            if terms.table is not None:
                bucket = bucket_tile(terms, b, row + tl.arange(0, 1), cols, num_rows, num_cols)
                bias += tl.sum(tl.load(at(terms.table, b, g) + bucket), 0)
            if terms.dense is not None:
                dense_at = at(terms.dense, b, g) + row * terms.dense.token + cols
                bias += tl.load(dense_at, mask=cols < num_cols, other=0.0).to(tl.float32)
            tl.store(at(pairs, b, g) + row * pairs.token + cols, bias, mask=cols < num_cols)


@triton.jit
def _guidance_gradient(
    change, terms, b, g, row_part, column_part, sums, row, col, HIDDEN: tl.constexpr, EXACT: tl.constexpr
):
    """Parts of one tile, with `change` = dB; row_part is [2, hidden, 64]: R, and what the norm subtracts."""
    place = tl.arange(0, BLOCK)
    unit = tl.arange(0, padded(HIDDEN))
    r = inverse_deviation(terms, b, g, row, col, HIDDEN, EXACT)
    scaled = change * r
    moment = tl.zeros([BLOCK, BLOCK], tl.float32)
    a_base, c_base = at(terms.a, b, g) + row + place, at(terms.c, b, g) + col + place
    gain, shift, weight = at(terms.gain, b, g), at(terms.shift, b, g), at(terms.weight, b, g)
    for h in range(HIDDEN):
        gamma, w = tl.load(gain + h), tl.load(weight + h)
        a = tl.load(a_base) * gamma
        c = tl.load(c_base) * gamma
        x = a[:, None] + c[None, :]
        z = x * r + tl.load(shift + h)
        size = tl.abs(z)
        beyond = tail(size, EXACT)
        activated = tl.maximum(z, 0.0) - size * beyond
        slope = tl.where(z > 0, 1.0 - beyond, beyond) + z * tl.exp2(z * z * (-0.5 * LOG2E) - LOG_ROOT_TWO_PI)
        both = tl.join(tl.sum(activated * change, 1), w * tl.sum(slope * change, 1))  # one exchange between warps
        tl.store(sums + h + tl.arange(0, 2) * HIDDEN, tl.sum(both, 0))
        flow = slope * scaled
        moment += x * flow * w
        tl.store(row_part + h * BLOCK + place, w * tl.sum(flow, 1))
        tl.store(column_part + h * BLOCK + place, w * tl.sum(flow, 0))
        a_base += terms.a.token
        c_base += terms.c.token
    q = r * r * moment / HIDDEN
    a_tile = unit_tile(at(terms.a, b, g), terms.a.token, row, HIDDEN)  # again: no register held it
    c_tile = unit_tile(at(terms.c, b, g), terms.c.token, col, HIDDEN)
    inside = unit[:, None] < HIDDEN
    where = (HIDDEN + unit)[:, None] * BLOCK + place[None, :]
    part = tl.dot(c_tile, tl.trans(q), a_tile * tl.sum(q, 1)[None, :], input_precision=DOT)
    tl.store(row_part + where, part, mask=inside)
    part = tl.dot(a_tile, q, c_tile * tl.sum(q, 0)[None, :], input_precision=DOT)
    tl.store(column_part + where, part, mask=inside)


@triton.jit
def pairs_gradient_kernel(
    call, terms, relation, gradient, logsum, delta,
    row_parts, column_parts, bucket_parts, dense_gradient, first_block, part_blocks, num_blocks, buckets,
    ADD: tl.constexpr, MASK_PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, HIDDEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Everything that one tile of pairs gives to the gradients of the terms."""
    g, b = tl.program_id(1), tl.program_id(2)
    local, slot = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    row_block = first_block + local
    words = relation.words
    if slot < tl.load(at(relation.total, b, b) + row_block):
        block = tl.load(at(relation.others, b, b) + row_block * relation.others.token + slot)
        row, col = row_block * BLOCK, block * BLOCK
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        inside = (rows[:, None] < call.rows) & (cols[None, :] < call.cols)
        pairs = at(call.pairs, b, g)
        bias = load_pairs(pairs, call.pairs.token, row, col, call.rows, call.cols, BLOCK, BLOCK, False, True)
        allowed = inside
        if not MASK_PER_HEAD:
            allowed = allowed_tile(at(words, b, g) + block.to(tl.int64) * words.token, rows, False)
        change = tl.zeros([BLOCK, BLOCK], tl.float32)
        for part in range(call.per_pairs):
            h = g * call.per_pairs + part
            kv = h // call.per_kv
            q = load_tile(at(call.query, b, h), call.query.token, row, call.rows, BLOCK, WIDTH, True)
            k = load_tile(at(call.key, b, kv), call.key.token, col, call.cols, BLOCK, WIDTH, True)
            score, _ = scored(tl.dot(q, tl.trans(k), input_precision=DOT), call)
            score += bias
            if call.columns is not None:
                where = at(call.columns, b, h // call.per_columns) + cols
                score += tl.load(where, mask=cols < call.cols, other=0.0)[None, :]
            lse = tl.load(at(logsum, b, h) + rows, mask=rows < call.rows, other=0.0)
            dlt = tl.load(at(delta, b, h) + rows, mask=rows < call.rows, other=0.0)
            if MASK_PER_HEAD:
                allowed = allowed_tile(at(words, b, h) + block.to(tl.int64) * words.token, rows, False)
            score = tl.where(allowed, score, float("-inf"))
            weight = exp_difference(score, lse[:, None], EXACT)
            up = load_tile(at(gradient, b, h), gradient.token, row, call.rows, BLOCK, VALUE, True)
            v = load_tile(at(call.value, b, kv), call.value.token, col, call.cols, BLOCK, VALUE, True)
            change += weight * (tl.dot(up, tl.trans(v), input_precision=DOT) - dlt[:, None])
        if dense_gradient is not None:
            where = at(dense_gradient, b, g) + rows[:, None].to(tl.int64) * dense_gradient.token + cols[None, :]
            if ADD:
                tl.store(where, change + tl.load(where, mask=inside, other=0.0), mask=inside)
            else:
                tl.store(where, change, mask=inside)
        map_of_batch = b.to(tl.int64) * tl.num_programs(1) + g
        tile = (map_of_batch * part_blocks + local) * num_blocks + block
        if row_parts is not None:
            size = 2 * HIDDEN * BLOCK
            row_part = row_parts + tile * (size + 2 * HIDDEN)
            column_part = column_parts + tile * size
            _guidance_gradient(change, terms, b, g, row_part, column_part, row_part + size, row, col, HIDDEN, EXACT)
        if bucket_parts is not None:
            bucket = bucket_tile(terms, b, rows, cols, call.rows, call.cols)
            low, high = tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0)
            for one in range(low, high + 1):
                bucket_total = tl.sum(tl.sum(tl.where(bucket == one, change, 0.0), 1), 0)
                tl.store(bucket_parts + tile * buckets + one, bucket_total)


@triton.jit
def gather_kernel(
    parts, result, total, others, part_b, near, far, offset, first, last, num_groups, size,
    ADD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """result[block] (+)= sum of the parts on its list that lie in first .. last - 1, in the order of the list.

    Grid (blocks from `offset` on, pieces of a part, batch * maps); `near` steps over blocks, `far` over list entries.
    """
    block, piece, map_of_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, g = map_of_batch // num_groups, map_of_batch % num_groups
    place = piece * CHUNK + tl.arange(0, CHUNK)
    inside = place < size
    base = parts + map_of_batch.to(tl.int64) * part_b + block.to(tl.int64) * near + place
    list_ = at(others, b, b) + (block + offset) * others.token
    acc = tl.zeros([CHUNK], tl.float32)
    for slot in range(tl.load(at(total, b, b) + block + offset)):
        other = tl.load(list_ + slot)
        if (other >= first) & (other < last):
            acc += tl.load(base + (other - first).to(tl.int64) * far, mask=inside, other=0.0)
    where = at(result, b, g) + (block + offset).to(tl.int64) * result.token + place
    if ADD:
        acc += tl.load(where, mask=inside, other=0.0)
    tl.store(where, acc, mask=inside)
