"""Gradient of the bias of pairs: dB of a tile is summed over its heads in registers, and used up at once.

`pairs_gradient_kernel` (query blocks * key blocks, maps, batch): the program that owns tile (i, j) loops over the
heads of its map, sums dS, and then
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
    LOG2E,
    LOG_ROOT_TWO_PI,
    allowed_tile,
    bucket_tile,
    exp_difference,
    load_pairs,
    load_tile,
    scored,
    tail,
)
from attnflow.bias.impl.triton.pairs import inverse_deviation, unit_tile


@triton.jit
def _guidance_gradient(
    change, rows_centred, columns_centred, gain, shift, weight, row_part, column_part, sums, row_block, block,
    padded_rows, padded_cols,
    EPS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Parts of one tile, with `change` = dB; row_part is [2, hidden, 64]: R, and what the norm subtracts."""
    place = tl.arange(0, BLOCK)
    unit = tl.arange(0, HIDDEN_PADDED)
    r = inverse_deviation(
        rows_centred, columns_centred, row_block * BLOCK, block * BLOCK, padded_rows, padded_cols,
        EPS, HIDDEN, HIDDEN_PADDED, EXACT,
    )  # fmt: skip
    scaled = change * r
    moment = tl.zeros([BLOCK, BLOCK], tl.float32)
    a_base = rows_centred + row_block * BLOCK + place
    c_base = columns_centred + block * BLOCK + place
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
        a_base += padded_rows
        c_base += padded_cols
    q = r * r * moment / HIDDEN
    a_tile = unit_tile(
        rows_centred, row_block * BLOCK, padded_rows, HIDDEN, HIDDEN_PADDED
    )  # again: no register held it
    c_tile = unit_tile(columns_centred, block * BLOCK, padded_cols, HIDDEN, HIDDEN_PADDED)
    inside = unit[:, None] < HIDDEN
    where = (HIDDEN + unit)[:, None] * BLOCK + place[None, :]
    part = tl.dot(c_tile, tl.trans(q), a_tile * tl.sum(q, 1)[None, :], input_precision=DOT)
    tl.store(row_part + where, part, mask=inside)
    part = tl.dot(a_tile, q, c_tile * tl.sum(q, 0)[None, :], input_precision=DOT)
    tl.store(column_part + where, part, mask=inside)


@triton.jit
def pairs_gradient_kernel(
    query, key, value, pairs, columns, words, count, index, gradient, logsum, delta,
    rows_centred, columns_centred, gain, shift, weight, row_parts, column_parts,
    bucket_of, row_positions, column_positions, bucket_parts, dense_gradient,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, pairs_b, pairs_g, pairs_m,
    columns_b, columns_g, gradient_b, gradient_h, gradient_m, row_positions_b, column_positions_b,
    dense_b, dense_g, dense_m, mask_b, words_b, words_h, first_block, part_blocks,
    num_heads, num_groups, num_rows, num_cols, num_words, num_row_blocks, num_blocks,
    per_kv, per_group, per_columns, distances, buckets, origin, scale, softcap,
    EPS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PADDED: tl.constexpr, EXACT: tl.constexpr,
    GUIDANCE: tl.constexpr, OFFSET: tl.constexpr, STORE: tl.constexpr, ADD: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, MASK_PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """Everything that one tile of pairs gives to the gradients of the terms."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    local, slot = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    row_block = first_block + local
    entry = b * mask_b * num_row_blocks + row_block
    if slot < tl.load(count + entry):
        block = tl.load(index + entry * num_blocks + slot)
        row, col = row_block * BLOCK, block * BLOCK
        rows, cols = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK)
        inside = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
        map_ = g.to(tl.int64)
        pairs += b * pairs_b + map_ * pairs_g
        bias = load_pairs(pairs, pairs_m, row, col, num_rows, num_cols, BLOCK, BLOCK, False, True)
        bits = words + b * words_b + block.to(tl.int64) * num_words
        allowed = inside
        if not MASK_PER_HEAD:
            allowed = allowed_tile(bits, rows, False)
        change = tl.zeros([BLOCK, BLOCK], tl.float32)
        for part in range(per_group):
            h = g * per_group + part
            wide, kv = h.to(tl.int64), (h // per_kv).to(tl.int64)
            q = load_tile(query + b * query_b + wide * query_h, query_m, row, num_rows, BLOCK, WIDTH, PADDED, True, UP)
            k = load_tile(key + b * key_b + kv * key_h, key_n, col, num_cols, BLOCK, WIDTH, PADDED, True, UP)
            score, _ = scored(tl.dot(q, tl.trans(k), input_precision=DOT), scale, softcap, SOFTCAP)
            score += bias
            if HAS_COLUMNS:
                where = columns + b * columns_b + (h // per_columns).to(tl.int64) * columns_g + cols
                score += tl.load(where, mask=cols < num_cols, other=0.0)[None, :]
            line = (b * num_heads + wide) * num_rows + rows
            lse = tl.load(logsum + line, mask=rows < num_rows, other=0.0)
            dlt = tl.load(delta + line, mask=rows < num_rows, other=0.0)
            if MASK_PER_HEAD:
                allowed = allowed_tile(bits + wide * words_h, rows, False)
            score = tl.where(allowed, score, float("-inf"))
            weight_ = exp_difference(score, lse[:, None], EXACT)
            where = gradient + b * gradient_b + wide * gradient_h
            up = load_tile(where, gradient_m, row, num_rows, BLOCK, VALUE, VALUE_PADDED, True, UP)
            v = load_tile(
                value + b * value_b + kv * value_h, value_n, col, num_cols, BLOCK, VALUE, VALUE_PADDED, True, UP
            )
            change += weight_ * (tl.dot(up, tl.trans(v), input_precision=DOT) - dlt[:, None])
        if STORE:
            where = dense_gradient + b * dense_b + map_ * dense_g + rows[:, None].to(tl.int64) * dense_m + cols[None, :]
            if ADD:
                tl.store(where, change + tl.load(where, mask=inside, other=0.0), mask=inside)
            else:
                tl.store(where, change, mask=inside)
        map_of_batch = b * num_groups + map_
        tile = (map_of_batch * part_blocks + local) * num_blocks + block
        if GUIDANCE:
            padded_rows, padded_cols = num_row_blocks * BLOCK, num_blocks * BLOCK
            size = 2 * HIDDEN * BLOCK
            _guidance_gradient(
                change,
                rows_centred + map_of_batch * HIDDEN * padded_rows,
                columns_centred + map_of_batch * HIDDEN * padded_cols,
                gain + map_ * HIDDEN, shift + map_ * HIDDEN, weight + map_ * HIDDEN,
                row_parts + tile * (size + 2 * HIDDEN), column_parts + tile * size,
                row_parts + tile * (size + 2 * HIDDEN) + size,
                row_block, block, padded_rows, padded_cols, EPS, HIDDEN, HIDDEN_PADDED, EXACT,
            )  # fmt: skip
        if OFFSET:
            bucket = bucket_tile(
                bucket_of, row_positions + b * row_positions_b, column_positions + b * column_positions_b,
                rows, cols, num_rows, num_cols, distances, origin,
            )  # fmt: skip
            low, high = tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0)
            for one in range(low, high + 1):
                bucket_total = tl.sum(tl.sum(tl.where(bucket == one, change, 0.0), 1), 0)
                tl.store(bucket_parts + tile * buckets + one, bucket_total)


@triton.jit
def gather_kernel(
    parts, result, count, index, mask_b, list_b, length, near, far, part_b, offset, first, last, num_groups, size,
    ADD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """result[block] (+)= sum of the parts on its list that lie in first .. last - 1, in the order of the list.

    Grid (blocks from `offset` on, pieces of a part, batch * maps); `near` steps over blocks, `far` over list entries.
    """
    block, piece, map_of_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b = map_of_batch // num_groups
    place = piece * CHUNK + tl.arange(0, CHUNK)
    inside = place < size
    entry = b * mask_b + block + offset
    base = parts + map_of_batch * part_b + block.to(tl.int64) * near + place
    acc = tl.zeros([CHUNK], tl.float32)
    for slot in range(tl.load(count + entry)):
        other = tl.load(index + entry * length + slot)
        if (other >= first) & (other < last):
            acc += tl.load(base + (other - first).to(tl.int64) * far, mask=inside, other=0.0)
    where = result + (map_of_batch * list_b + block + offset) * size + place
    if ADD:
        acc += tl.load(where, mask=inside, other=0.0)
    tl.store(where, acc, mask=inside)
