"""Compiled FlexAttention with a captured bias: the path for GPUs.

Terms over pairs are materialised by `term.tile` and captured, one number per pair; `Additive` and `Offset` are captured
as vectors and looked up in the score function. The gradient of a captured tensor goes through atomic additions, so that
two runs may differ in the last bits. On the CPU, FlexAttention has no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast, no_type_check

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.bias.call import Allow, Call
from attnflow.bias.terms import Additive, Offset, Term, wide
from attnflow.masks.flex import block_mask_of_counts, mask_mod_of_bits, packed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK: Final = 128
_LEAST: Final = 16  # width of a head below which FlexAttention does not compile for a GPU

# torch reads the signature and closure of these functions: `no_type_check` keeps run-time type checkers away.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Lookup = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def refuses(call: Call) -> str | None:
    """Why FlexAttention cannot compute a call, or None."""
    query, value = call.query, call.value
    if query.device.type not in ("cpu", "cuda"):
        return f"FlexAttention compiles for CPU and CUDA, the tensors are on {query.device.type}"
    if query.device.type == "cpu" and call.needs_grad():
        return "FlexAttention has no backward pass on the CPU, and gradients are needed; use torch.no_grad()"
    if call.dropout:
        return f"weights cannot be dropped inside FlexAttention, and dropout is {call.dropout}"
    if call.sinks is not None:
        return "sinks take part in the softmax, which a score function cannot change"
    if 0 in query.shape or 0 in value.shape:
        return "a call without queries, keys or channels has nothing to compute"
    if query.dtype != value.dtype or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"query and value must share one of float16, bfloat16, float32, got {query.dtype} and {value.dtype}"
    if query.device.type == "cuda" and min(query.shape[3], value.shape[3]) < _LEAST:
        return f"heads are at least {_LEAST} wide on a GPU, got {query.shape[3]} and {value.shape[3]}"
    return None


def run(call: Call) -> Tensor:
    """The output, [batch, heads, queries, value_dim] in the type of the values."""
    device = call.query.device
    blocks, empty = form_of(call.allow, device)
    output: Tensor = _compiled(device.type)(
        *(call.query, call.key, call.value),
        score_mod=score_mod(call),
        block_mask=blocks,
        scale=call.scale,
        enable_gqa=call.heads_per_kv > 1,
    )
    output = output if empty is None else output.masked_fill(empty, 0.0)
    return output.to(call.value.dtype)


def score_mod(call: Call) -> ScoreMod:
    """The score function of a call: softcap, then one lookup for each term."""
    lookups = [_lookup(term, call) for term in call.terms]
    softcap = call.softcap

    @no_type_check
    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for lookup in lookups:
            score = score + lookup(b, h, q, k)
        return score

    return modify


def form_of(allow: Allow, device: torch.device) -> tuple[BlockMask | None, Tensor | None]:
    """(block mask, queries that may attend to nothing) of a relation; kept with it for the layers to come."""
    form = allow.derived(("flex", str(device)), lambda: _form(allow, device))
    return cast("tuple[BlockMask | None, Tensor | None]", form)


def _lookup(term: Term, call: Call) -> Lookup:
    """B[b, h, q, k] of one term, from tensors that are captured."""
    per_map = call.num_heads // term.groups
    if isinstance(term, Additive):
        columns, rows = wide(term.columns), None if term.rows is None else wide(term.rows)

        @no_type_check
        def additive(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            result = columns[_element(columns, b), h // per_map, k]
            return result if rows is None else result - rows[_element(rows, b), h // per_map, q]

        return additive
    if isinstance(term, Offset):
        # One number for each distance: the bucket is looked up once, not for every pair.
        by_distance = wide(term.table)[:, term.bucket_of.long()]
        row_positions, column_positions, origin = term.row_positions, term.column_positions, term.origin

        @no_type_check
        def offset(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            column = column_positions[_element(column_positions, b), k]
            distance = column - row_positions[_element(row_positions, b), q] + origin
            return by_distance[h // per_map, distance.clamp(0, by_distance.shape[1] - 1)]

        return offset
    pairs = term.tile(slice(0, call.query.shape[2]), slice(0, call.key.shape[2])).contiguous()

    @no_type_check
    def dense(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return pairs[_element(pairs, b), h // per_map, q, k]

    return dense


@no_type_check
def _element(tensor: Tensor, index: Tensor) -> Tensor:
    """The index along the first dimension, which may be shared; always a tensor, which torch can trace."""
    return index * 0 if tensor.shape[0] == 1 else index


def _form(allow: Allow, device: torch.device) -> tuple[BlockMask | None, Tensor | None]:
    """`form_of`, made by rows of blocks; it holds a bit a pair, and nothing where every pair is allowed."""
    rows = allow.rows(slice(0, min(_BLOCK, allow.num_queries)))
    if rows is None:
        return None, None
    across, down = -(-allow.num_keys // _BLOCK), -(-allow.num_queries // _BLOCK)
    # Made at once: pieces that stay among temporaries a hundred times their size would keep the allocator from
    # giving those back.
    counts = torch.empty(*rows.shape[:2], down, across, dtype=torch.int64, device=device)
    bits = torch.empty(*rows.shape[:2], allow.num_queries, across * _BLOCK // 8, dtype=torch.uint8, device=device)
    empty = torch.empty(*rows.shape[:2], allow.num_queries, 1, dtype=torch.bool, device=device)
    for row in range(down):
        block = slice(row * _BLOCK, min((row + 1) * _BLOCK, allow.num_queries))
        rows = functional.pad(cast("Tensor", allow.rows(block)).to(device), (0, -allow.num_keys % _BLOCK))
        counts[:, :, row] = rows.unflatten(-1, (-1, _BLOCK)).sum(dim=(2, 4))
        bits[:, :, block] = packed(rows)
        empty[:, :, block] = ~rows.any(dim=-1, keepdim=True)
    shape, mask_mod = (allow.num_queries, allow.num_keys), mask_mod_of_bits(bits)
    return block_mask_of_counts(counts, (_BLOCK, _BLOCK), mask_mod, shape), empty


@cache
def _compiled(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # For symbolic sizes, which a second shape would bring, torch writes C++ that does not compile.
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)
