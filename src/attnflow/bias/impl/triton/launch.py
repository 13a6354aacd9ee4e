"""Launches: which kernels, on what grids. Python between kernels never waits for the device."""

# A launch takes its grid, warps and stages beside the kernel's own arguments.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from attnflow.bias.impl.blocks import BLOCK, Lists
from attnflow.bias.impl.triton import backward, forward, pairs, tuning
from attnflow.bias.impl.triton.device import Attention, Relation, Terms, View
from attnflow.bias.impl.triton.inputs import Inputs

_LARGEST: Final = {torch.float16: 65504.0, torch.float32: 3e38}


class Centred(NamedTuple):
    """Both sides of the guidance network, as the kernels of pairs read them."""

    rows: Tensor
    cols: Tensor


class Upstream(NamedTuple):
    """What the backward kernels know of the output: its gradient, and per query log-sum-exp and sum of output * it.

    Both numbers are float32 [batch, heads, queries].
    """

    gradient: Tensor
    logsum: Tensor
    delta: Tensor


def view(tensor: Tensor | None) -> View | None:
    """With strides of batch, heads or maps, and tokens: 0 for a dimension of one, which nobody steps over."""
    if tensor is None:
        return None
    steps = (0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return View(tensor, *(*steps, 0)[:3])


def attention(inputs: Inputs, table: Tensor | None) -> Attention:
    """What the kernels of attention take; `table` is the bias of pairs."""
    heads, rows, cols = *inputs["query"].shape[1:3], inputs["key"].shape[2]
    names = ("query", "key", "value", None, "columns", "sinks")
    views = (view(table if name is None else inputs.get(name)) for name in names)
    shared = (inputs["key"].shape[1], max(1, inputs.groups), 1 if (c := inputs.get("columns")) is None else c.shape[1])
    return Attention(*views, rows, cols, *(heads // count for count in shared), inputs.scale, inputs.softcap or None)


def terms(inputs: Inputs, network: tuple[Tensor | None, Tensor | None] | None) -> Terms:
    """What the kernels of pairs take; `network` are the vectors of the guidance network as a kernel wants them."""
    left, bucket_of = inputs.get("left"), inputs.get("bucket_of")
    rank, distances = 0 if left is None else left.shape[3], 0 if bucket_of is None else len(bucket_of)
    a, c = map(view, network or (None, None))
    views = {name: view(inputs.get(name)) for name in ("left", "right", "dense")}
    views |= {name: view(_row(inputs.get(name))) for name in ("gain", "shift", "weight", "table")}
    views |= {name: view(_row(inputs.get(name), 1)) for name in ("row_positions", "column_positions")}
    return Terms(a=a, c=c, rank=rank, bucket_of=bucket_of, distances=distances, origin=inputs.origin, **views)


def _row(tensor: Tensor | None, dim: int = 0) -> Tensor | None:
    return None if tensor is None else tensor.unsqueeze(dim)


def relation(inputs: Inputs, lists: Lists) -> Relation:
    """The mask, and the lists of blocks that a kernel walks."""
    return Relation(*map(view, (inputs.relation.words, *lists)))


def widths(inputs: Inputs) -> dict[str, Any]:
    """Widths of heads, and how products are computed."""
    query = inputs["query"]
    return {"WIDTH": query.shape[3], "VALUE": inputs["value"].shape[3], "EXACT": query.dtype == torch.float32}


def network(inputs: Inputs) -> dict[str, Any]:
    """Width of the guidance network, and how products are computed."""
    return {"HIDDEN": inputs.hidden, "EXACT": inputs["query"].dtype == torch.float32}


def _centred(vectors: Tensor, num_blocks: int) -> Tensor:
    batch, groups, tokens, hidden = vectors.shape
    result = vectors.new_empty((batch, groups, hidden, num_blocks * BLOCK), dtype=torch.float32)
    pairs.centre_kernel[(num_blocks, groups, batch)](view(vectors), view(result), tokens, HIDDEN=hidden, num_warps=4)
    return result


def centred(inputs: Inputs) -> Centred | None:
    """Guidance vectors, centred over hidden units, float32 [batch, groups, hidden, padded tokens]; None without any."""
    if "rows" not in inputs.tensors:
        return None
    return Centred(*map(_centred, (inputs["rows"], inputs["cols"]), inputs.relation.pair_rows.others.shape[2:]))


def build_pairs(inputs: Inputs, both: Centred | None, result: Tensor | None = None) -> Tensor:
    """The bias of pairs, [batch, groups, padded queries, padded keys], of which only allowed blocks are written."""
    batch, groups, lists = inputs["query"].shape[0], inputs.groups, inputs.relation.pair_rows
    rows, cols = lists.others.shape[2:]
    if result is None:
        result = inputs["query"].new_empty((batch, groups, rows * BLOCK, cols * BLOCK), dtype=inputs.pair_type)
    pairs.pairs_kernel[(rows * cols, groups, batch)](
        terms(inputs, both), view(lists.total), view(lists.others), view(result),
        inputs["query"].shape[2], inputs["key"].shape[2], cols, _LARGEST[inputs.pair_type],
        **network(inputs), num_warps=4,
    )  # fmt: skip
    return result


def attend(inputs: Inputs, table: Tensor | None, output: Tensor, logsum: Tensor) -> None:
    """Fill `output` and `logsum` [batch, heads, queries]."""
    lists, sizes = inputs.relation.rows, inputs.tiles
    (batch, heads), blocks = inputs["query"].shape[:2], lists.total.shape[2]
    forward.forward_kernel[(heads, blocks, batch)](
        attention(inputs, table), relation(inputs, lists), view(output), view(logsum),
        **widths(inputs), ROWS=_rows_of(inputs), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


def _rows_of(inputs: Inputs) -> int:
    """Queries of a tile: those that the lists were made for."""
    return inputs.relation.words.shape[3] // inputs.relation.rows.total.shape[2]


def query_gradient(
    inputs: Inputs, table: Tensor | None, output: Tensor, gradient: Tensor, logsum: Tensor, result: Tensor
) -> Upstream:
    """Fill the gradient of queries; returns sums that do not suffer from the rounding of the output."""
    (batch, heads, queries, width), lists, sizes = output.shape, inputs.relation.rows, inputs.tiles
    delta, exact = (logsum.new_empty((batch, heads, queries)) for _ in range(2))
    backward.delta_kernel[(-(-queries // BLOCK), heads, batch)](
        view(output), view(gradient), view(delta), queries, VALUE=width, num_warps=4
    )
    backward.query_kernel[(heads, lists.total.shape[2], batch)](
        attention(inputs, table), relation(inputs, lists), *map(view, (gradient, logsum, delta, exact, result)),
        **widths(inputs), ROWS=_rows_of(inputs), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return Upstream(gradient, logsum, exact)


def key_gradients(inputs: Inputs, table: Tensor | None, up: Upstream, key: Tensor, value: Tensor) -> Tensor | None:
    """Fill the gradients of keys and values; returns that of columns by query head, [batch, heads, keys]."""
    batch, kv, keys, _ = inputs["key"].shape
    lists, sizes = inputs.relation.columns, inputs.tiles
    columns = inputs["columns"].new_empty((*up.delta.shape[:2], keys)) if "columns" in inputs.tensors else None
    backward.key_kernel[(lists.total.shape[2], kv, batch)](
        attention(inputs, table), relation(inputs, lists), *map(view, (*up, key, value, columns)),
        **widths(inputs), num_warps=sizes.key_warps, num_stages=sizes.key_stages,
    )  # fmt: skip
    return columns


def gather(parts: Tensor, result: Tensor, lists: Lists, block: int, other: int, add: bool) -> None:
    """result[batch, groups, block + i] (+)= sum of parts[batch * groups, i, j] over all other + j on its list."""
    (_, blocks, others, size), groups = parts.shape, result.shape[1]
    pairs.gather_kernel[(blocks, -(-size // tuning.GATHER), len(parts))](
        parts, view(result), view(lists.total), view(lists.others), *parts.stride()[:3],
        block, other, other + others, groups, size, ADD=add, CHUNK=tuning.GATHER, num_warps=4,
    )  # fmt: skip


def decode(inputs: Inputs, mask: Tensor | None, output: Tensor) -> None:
    """Fill `output` of a few queries; `mask` is uint8 [batch or 1, heads or 1, queries, keys]."""
    (batch, heads, queries, value), (_, kv, keys, _) = output.shape, inputs["key"].shape
    blocks, table = -(-keys // BLOCK), inputs.get("dense")
    if inputs.must_build:
        table = output.new_empty((batch, inputs.groups, queries, keys), dtype=torch.float32)
        pairs.row_pairs_kernel[(blocks, inputs.groups, batch)](
            terms(inputs, (inputs.get("rows"), inputs.get("cols"))),
            view(mask if mask is not None and mask.shape[1] == 1 else None),
            view(table), queries, keys, **network(inputs), num_warps=4,
        )  # fmt: skip
    per_split = -(-blocks // max(1, min(blocks, tuning.PROGRAMS // (kv * batch), 64)))
    splits = -(-blocks // per_split)
    parts = output.new_empty((batch, heads, queries, splits, value), dtype=torch.float32)
    total, top = (parts.new_empty((batch, heads, queries, splits)) for _ in range(2))
    forward.decode_kernel[(splits, kv, batch)](
        attention(inputs, table), view(mask), parts, total, top, heads, per_split,
        WIDTH=inputs["query"].shape[3], VALUE=value, ROWS=tuning.padded(heads // kv * queries),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    forward.combine_kernel[(queries, batch * heads)](
        parts, total, top, view(inputs.get("sinks")), view(output), heads, splits,
        VALUE=value, SPLITS=tuning.padded(splits, 1), num_warps=4,
    )  # fmt: skip
