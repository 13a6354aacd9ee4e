"""Launches: which kernels, on what grids, with which strides. Python between kernels never waits for the device."""

# A launch takes its grid, warps and stages beside the kernel's own arguments.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from attnflow.bias.impl.triton import backward, decode, forward, pairs, pairs_backward, tuning
from attnflow.bias.impl.triton.blocks import BLOCK, Lists
from attnflow.bias.impl.triton.device import INTERPRETED
from attnflow.bias.impl.triton.inputs import Inputs
from attnflow.bias.terms import EPS

_LARGEST: Final = {torch.float16: 65504.0, torch.float32: 3e38}


def strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides of a tensor, 0 for a dimension of one that others share and for a tensor that is absent."""
    if tensor is None:
        return (0,) * count
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))[:count]


def line_strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Strides of batch, heads or groups, and tokens. A single token has stride 0, which no kernel steps over."""
    return strides(tensor, 3)


def list_strides(tensor: Tensor) -> tuple[int, int]:
    """(per batch element, per head) in relations, which are numbered in that order."""
    batch, heads = tensor.shape[:2]
    return (0 if batch == 1 else heads), (0 if heads == 1 else 1)


def widths(inputs: Inputs) -> dict[str, Any]:
    """Widths of heads, and how products are computed."""
    width, value = inputs.query.shape[3], inputs.value.shape[3]
    return {
        "SOFTCAP": inputs.softcap > 0,
        "WIDTH": width,
        "PADDED": tuning.padded(width),
        "VALUE": value,
        "VALUE_PADDED": tuning.padded(value),
        "UP": INTERPRETED,
        "EXACT": inputs.query.dtype == torch.float32,
    }


def network(inputs: Inputs) -> dict[str, Any]:
    """Sizes of the guidance network."""
    hidden = 1 if inputs.rows is None else inputs.rows.shape[3]
    return {
        "EPS": EPS,
        "HIDDEN": hidden,
        "HIDDEN_PADDED": tuning.padded(hidden),
        "EXACT": inputs.query.dtype == torch.float32,
    }


def kinds(inputs: Inputs) -> dict[str, Any]:
    """Which terms the bias of pairs has."""
    return {
        "GUIDANCE": inputs.rows is not None,
        "PRODUCT": inputs.left is not None,
        "OFFSET": inputs.table is not None,
        "DENSE": inputs.dense is not None,
        "RANKS": tuning.RANKS,
    }


def sharing(inputs: Inputs) -> tuple[int, int, int]:
    """Heads for each key-value head, each map of pairs and each column."""
    heads = inputs.query.shape[1]
    columns = 1 if inputs.columns is None else inputs.columns.shape[1]
    return heads // inputs.key.shape[1], heads // max(1, inputs.groups), heads // columns


def table_sizes(inputs: Inputs) -> tuple[int, int, int]:
    """(distances, buckets, origin) of a table by distance."""
    if inputs.table is None or inputs.bucket_of is None:
        return 1, 1, 0
    return inputs.bucket_of.shape[0], inputs.table.shape[1], inputs.origin


def centred(vectors: Tensor, num_blocks: int) -> Tensor:
    """Guidance vectors, centred over hidden units, float32 [batch, groups, hidden, padded tokens]."""
    batch, groups, tokens, hidden = vectors.shape
    result = vectors.new_empty((batch, groups, hidden, num_blocks * BLOCK), dtype=torch.float32)
    pairs.centre_kernel[(num_blocks, groups, batch)](
        vectors, result, *line_strides(vectors), groups, tokens, num_blocks * BLOCK,
        HIDDEN=hidden, HIDDEN_PADDED=tuning.padded(hidden), num_warps=4,
    )  # fmt: skip
    return result


@dataclass(frozen=True, eq=False)
class Centred:
    """Both sides of the guidance network, as the kernels read them."""

    rows: Tensor
    cols: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Centred | None:
        """None without a network."""
        if inputs.rows is None or inputs.cols is None:
            return None
        lists = inputs.relation.pair_rows
        return cls(centred(inputs.rows, lists.total.shape[2]), centred(inputs.cols, lists.others.shape[3]))


def build_pairs(inputs: Inputs, both: Centred | None, whole: bool = False) -> Tensor:
    """The bias of pairs, [batch, groups, padded queries, padded keys].

    Only allowed blocks are written; with `whole` the others are 0, because results of operators are compared.
    """
    batch, groups = inputs.query.shape[0], inputs.groups
    lists = inputs.relation.pair_rows
    rows, cols = lists.total.shape[2], lists.others.shape[3]
    make = inputs.query.new_zeros if whole else inputs.query.new_empty
    result = make((batch, groups, rows * BLOCK, cols * BLOCK), dtype=inputs.pair_type)
    pairs.pairs_kernel[(rows * cols, groups, batch)](
        None if both is None else both.rows, None if both is None else both.cols,
        inputs.gain, inputs.shift, inputs.weight, inputs.left, inputs.right, inputs.table, inputs.bucket_of,
        inputs.row_positions, inputs.column_positions, inputs.dense, lists.total, lists.others, result,
        *line_strides(inputs.left), *line_strides(inputs.right),
        *strides(inputs.row_positions, 1), *strides(inputs.column_positions, 1),
        *line_strides(inputs.dense), *line_strides(result), list_strides(lists.total)[0],
        groups, inputs.query.shape[2], inputs.key.shape[2], rows, cols, *table_sizes(inputs),
        1 if inputs.left is None else inputs.left.shape[3], _LARGEST[inputs.pair_type],
        **network(inputs), **kinds(inputs), UP=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return result


def _common(inputs: Inputs, table: Tensor | None) -> tuple[Tensor | None, ...]:
    return inputs.query, inputs.key, inputs.value, table, inputs.columns


def _call_strides(inputs: Inputs, table: Tensor | None) -> tuple[int, ...]:
    sides = (inputs.query, inputs.key, inputs.value, table)
    return (*(step for side in sides for step in line_strides(side)), *strides(inputs.columns, 2))


def _sizes(inputs: Inputs, lists: Lists, transposed: bool = False) -> tuple[int, ...]:
    words = inputs.blocks[0]
    rows, cols = (lists.others.shape[3], lists.others.shape[2]) if transposed else lists.others.shape[2:]
    heads, queries = inputs.query.shape[1:3]
    return heads, queries, inputs.key.shape[2], words.shape[3], rows, cols


def has(inputs: Inputs, table: Tensor | None) -> dict[str, Any]:
    """Which biases the attention kernels add."""
    return {"HAS_PAIRS": table is not None, "HAS_COLUMNS": inputs.columns is not None}


def attend(inputs: Inputs, table: Tensor | None, output: Tensor, logsum: Tensor) -> None:
    """Fill `output` and `logsum` [batch, heads, queries], which is contiguous."""
    batch, heads = inputs.query.shape[:2]
    lists, words, sizes = inputs.relation.rows, inputs.blocks[0], inputs.tiles
    forward.forward_kernel[(heads, lists.total.shape[2], batch)](
        *_common(inputs, table), inputs.sinks, words, *lists, output, logsum,
        *_call_strides(inputs, table), *line_strides(inputs.sinks), *line_strides(output), *list_strides(words),
        *_sizes(inputs, lists), *sharing(inputs), inputs.scale, inputs.softcap,
        **has(inputs, table), HAS_SINKS=inputs.sinks is not None, **widths(inputs),
        ROWS=_rows_of(inputs), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


def _rows_of(inputs: Inputs) -> int:
    """Queries of a tile: those that the lists were made for."""
    words, lists = inputs.blocks[0], inputs.relation.rows
    return words.shape[3] // lists.total.shape[2]


@dataclass(frozen=True, eq=False)
class Upstream:
    """What the backward kernels know of the output: its gradient, and per query log-sum-exp and sum of output * it."""

    gradient: Tensor
    logsum: Tensor
    delta: Tensor

    @classmethod
    def of(cls, gradient: Tensor, output: Tensor, logsum: Tensor) -> Upstream:
        """Both numbers are float32 [batch, heads, queries], contiguous."""
        batch, heads, queries, width = output.shape
        delta = logsum.new_empty((batch, heads, queries))
        backward.delta_kernel[(-(-queries // BLOCK), heads, batch)](
            output, gradient, delta, *line_strides(output), *line_strides(gradient), heads, queries,
            VALUE=width, VALUE_PADDED=tuning.padded(width), ROWS=BLOCK, num_warps=4,
        )  # fmt: skip
        return cls(gradient, logsum, delta)


def query_gradient(inputs: Inputs, table: Tensor | None, up: Upstream, result: Tensor) -> Upstream:
    """Fill the gradient of queries; returns `up` with sums that do not suffer from the rounding of the output."""
    batch, heads = inputs.query.shape[:2]
    lists, words, sizes = inputs.relation.rows, inputs.blocks[0], inputs.tiles
    exact = torch.empty_like(up.delta)
    backward.query_kernel[(heads, lists.total.shape[2], batch)](
        *_common(inputs, table), words, *lists, up.gradient, up.logsum, up.delta, exact, result,
        *_call_strides(inputs, table), *line_strides(up.gradient), *line_strides(result), *list_strides(words),
        *_sizes(inputs, lists), *sharing(inputs), inputs.scale, inputs.softcap,
        **has(inputs, table), HAS_SINKS=inputs.sinks is not None, **widths(inputs),
        ROWS=_rows_of(inputs), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return Upstream(up.gradient, up.logsum, exact)


def key_gradients(inputs: Inputs, table: Tensor | None, up: Upstream, key: Tensor, value: Tensor) -> Tensor | None:
    """Fill the gradients of keys and values; returns that of columns by query head, [batch, heads, keys]."""
    batch, heads = inputs.query.shape[:2]
    kv, keys = inputs.key.shape[1:3]
    lists, words, sizes = inputs.relation.columns, inputs.blocks[0], inputs.tiles
    columns = None if inputs.columns is None else inputs.columns.new_empty((batch, heads, keys))
    backward.key_kernel[(lists.total.shape[2], kv, batch)](
        *_common(inputs, table), words, *lists, up.gradient, up.logsum, up.delta, key, value, columns,
        *_call_strides(inputs, table), *line_strides(up.gradient), *line_strides(key), *line_strides(value),
        *list_strides(words), *_sizes(inputs, lists, transposed=True), *sharing(inputs), inputs.scale, inputs.softcap,
        **has(inputs, table), **widths(inputs), num_warps=sizes.key_warps, num_stages=sizes.key_stages,
    )  # fmt: skip
    return columns


@dataclass(frozen=True, eq=False)
class PairParts:
    """Partial gradients of some blocks of queries, one set for each tile; None where no term needs them."""

    rows: Tensor | None
    cols: Tensor | None
    buckets: Tensor | None


def pairs_gradient(
    inputs: Inputs, table: Tensor, up: Upstream, both: Centred | None, parts: PairParts, dense: Tensor | None,
    first: int, count: int, add: bool,
) -> None:  # fmt: skip
    """Fill the parts of query blocks first .. first + count - 1, and `dense` with dB (or add to it)."""
    batch, heads, queries, _ = inputs.query.shape
    groups, words, lists = inputs.groups, inputs.blocks[0], inputs.relation.pair_rows
    rows, cols = lists.total.shape[2], lists.others.shape[3]
    per_kv, per_group, per_columns = sharing(inputs)
    guided = both if parts.rows is not None else None
    pairs_backward.pairs_gradient_kernel[(count * cols, groups, batch)](
        *_common(inputs, table), words, lists.total, lists.others, up.gradient, up.logsum, up.delta,
        None if guided is None else guided.rows, None if guided is None else guided.cols,
        inputs.gain, inputs.shift, inputs.weight,
        parts.rows, parts.cols, inputs.bucket_of, inputs.row_positions, inputs.column_positions, parts.buckets, dense,
        *_call_strides(inputs, table), *line_strides(up.gradient),
        *strides(inputs.row_positions, 1), *strides(inputs.column_positions, 1), *line_strides(dense),
        list_strides(lists.total)[0], *strides(words, 2), first, count,
        heads, groups, queries, inputs.key.shape[2], words.shape[3], rows, cols,
        per_kv, per_group, per_columns, *table_sizes(inputs), inputs.scale, inputs.softcap,
        **(network(inputs) | widths(inputs)),
        GUIDANCE=guided is not None, OFFSET=parts.buckets is not None, STORE=dense is not None,
        ADD=add, HAS_COLUMNS=inputs.columns is not None, MASK_PER_HEAD=words.shape[1] > 1,
        num_warps=inputs.tiles.pair_warps, num_stages=1,
    )  # fmt: skip


def gather_rows(parts: Tensor, result: Tensor, lists: Lists, first: int, count: int) -> None:
    """result[batch, groups, block] = sum over key blocks of parts[batch * groups, block - first, key block]."""
    _gather(parts, result, lists, count, parts.stride(1), parts.stride(2), first, (0, lists.others.shape[3]), False)


def gather_columns(parts: Tensor, result: Tensor, lists: Lists, first: int, count: int) -> None:
    """result[batch, groups, key block] (+)= sum over blocks first .. of parts[batch * groups, block, key block]."""
    blocks = lists.total.shape[2]
    _gather(parts, result, lists, blocks, parts.stride(2), parts.stride(1), 0, (first, first + count), first > 0)


def _gather(
    parts: Tensor, result: Tensor, lists: Lists, blocks: int, near: int, far: int, offset: int,
    others: tuple[int, int], add: bool,
) -> None:  # fmt: skip
    batch, groups, length, size = result.shape
    pairs_backward.gather_kernel[(blocks, -(-size // tuning.GATHER), batch * groups)](
        parts, result, lists.total, lists.others, 0 if lists.total.shape[0] == 1 else length, length,
        lists.others.shape[3], near, far, parts.stride(0), offset, *others, groups, size,
        ADD=add, CHUNK=tuning.GATHER, num_warps=4,
    )  # fmt: skip


def decode_call(inputs: Inputs, mask: Tensor | None, output: Tensor) -> None:
    """Fill `output`; `mask` is uint8 [batch or 1, heads or 1, queries, keys]."""
    batch, heads, queries, _ = inputs.query.shape
    kv, keys, value = inputs.key.shape[1], inputs.key.shape[2], inputs.value.shape[3]
    per_kv, per_pairs, per_columns = sharing(inputs)
    blocks = -(-keys // BLOCK)
    table = inputs.dense if inputs.only_dense else None
    if inputs.must_build:
        table = _row_pairs(inputs, mask, blocks)
    per_split = -(-blocks // max(1, min(blocks, tuning.PROGRAMS // (kv * batch), 64)))
    splits = -(-blocks // per_split)
    parts = output.new_empty((batch, heads, queries, splits, value), dtype=torch.float32)
    total, top = (parts.new_empty((batch, heads, queries, splits)) for _ in range(2))
    decode.decode_kernel[(splits, kv, batch)](
        *_common(inputs, table), mask, parts, total, top, *_call_strides(inputs, table), *line_strides(mask),
        heads, queries, keys, per_kv, per_pairs, per_columns, per_split, splits, inputs.scale, inputs.softcap,
        **has(inputs, table), MASK=mask is not None, **widths(inputs),
        ROWS=tuning.padded(per_kv * queries), num_warps=4, num_stages=2,
    )  # fmt: skip
    decode.combine_kernel[(queries, batch * heads)](
        parts, total, top, inputs.sinks, output, *line_strides(output), *line_strides(inputs.sinks),
        heads, queries, splits, HAS_SINKS=inputs.sinks is not None, VALUE=value, VALUE_PADDED=tuning.padded(value),
        SPLITS=tuning.padded(splits, 1), num_warps=4,
    )  # fmt: skip


def _row_pairs(inputs: Inputs, mask: Tensor | None, blocks: int) -> Tensor:
    batch, _, queries, _ = inputs.query.shape
    groups, keys = inputs.groups, inputs.key.shape[2]
    shared = mask if mask is not None and mask.shape[1] == 1 else None
    table = inputs.query.new_empty((batch, groups, queries, keys), dtype=torch.float32)
    mask_strides = line_strides(shared)
    decode.row_pairs_kernel[(blocks, groups, batch)](
        inputs.rows, inputs.cols, inputs.gain, inputs.shift, inputs.weight, inputs.left, inputs.right, inputs.table,
        inputs.bucket_of, inputs.row_positions, inputs.column_positions, inputs.dense, shared, table,
        *line_strides(inputs.rows), *line_strides(inputs.cols), *line_strides(inputs.left), *line_strides(inputs.right),
        *strides(inputs.row_positions, 1), *strides(inputs.column_positions, 1), *line_strides(inputs.dense),
        mask_strides[0], mask_strides[2], groups, queries, keys, *table_sizes(inputs),
        1 if inputs.left is None else inputs.left.shape[3],
        **network(inputs), **kinds(inputs), MASK=shared is not None, num_warps=4,
    )  # fmt: skip
    return table
