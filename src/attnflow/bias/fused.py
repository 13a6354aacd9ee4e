"""Attention with a bias through torch's fused operators: the bias is columns of queries and keys (`columns`).

An operator returns the output o and the logarithm l of each query's sum of exponentials, and its backward pass reads
no more than these. So a sink s costs nothing: o' = o sigmoid(l - s) and l' = log(exp l + exp s), handed to the stock
backward, give exact gradients. That of s is -exp(s - l') (dO . o'), summed over its queries.

A causal mask is the operator's flag; on CUDA, windows and packed documents are its arguments. Where an operator has no
form of the mask, it is called for blocks of 128 queries, cut to the keys that they see, with a table of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.bias.call import Allow, BiasedCall
from attnflow.bias.columns import Widened, count, widen, width_with
from attnflow.bias.terms import wide

_ROWS: Final = 128  # queries of a block
_LEAST_COLUMNS: Final = 16  # that are worth it on heads of any width
_FLASH: Final = (8, 0)
_aten: Final = torch.ops.aten
Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Part:
    """One call of an operator: queries `rows` attend to keys `columns`.

    Attributes:
        table: whether the mask of these pairs must be given as a table.
        causal: whether query i sees keys 0 .. i.
        window: with `causal`, how many keys a query sees at most; 0 for all.
        starts: with `causal`, where documents start among `tokens` tokens of one sequence or all, int32[documents].
        longest: tokens of the longest document.
    """

    rows: slice
    columns: slice
    table: bool = False
    causal: bool = False
    window: int = 0
    starts: Tensor | None = None
    tokens: int = 0
    longest: int = 0


@dataclass(frozen=True)
class Operators:
    """The fused operators of a kind of device, and what they take.

    Attributes:
        forward: (query, key and value, part, table, scale) -> (output, log-sum-exp in float32 or wider, what backward
            needs besides).
        backward: (gradient, query, key and value, output and log-sum-exp, rest, part, table, scale) -> three gradients.
        parts: makes the parts of a mask, or says why it has none.
        widest: the widest head.
        share: columns that cost less than tiles, over the width of a head.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensors]]
    backward: Callable[..., Tensors]
    parts: Callable[[Allow], list[Part] | str]
    dtypes: tuple[torch.dtype, ...]
    widest: int
    share: float


def refusal(call: BiasedCall) -> str | None:
    """Why fused attention cannot compute a call, or None."""
    query, operators = call.query, OPERATORS.get(call.query.device.type)
    if operators is None:
        return f"no fused attention takes a bias on {query.device.type}"
    if query.is_cuda and torch.cuda.is_available() and torch.cuda.get_device_capability(query.device) < _FLASH:
        return f"flash attention needs a GPU of compute capability {_FLASH[0]}.{_FLASH[1]}"
    if call.dropout:
        return f"fused attention with columns drops no weights, but dropout is {call.dropout}"
    if call.softcap is not None:
        return "a soft cap would bend the bias with the scores"
    if call.scale == 0:
        return "the scale is 0, and columns are divided by it"
    if 0 in (*query.shape, *call.key.shape, *call.value.shape):
        return "fused attention needs at least one query, key and channel"
    if not query.dtype == call.key.dtype == call.value.dtype or query.dtype not in operators.dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in operators.dtypes)
        return f"query, key and value must share one of {names} on {query.device.type}, got {query.dtype}"
    columns = count(call)
    if isinstance(columns, str):
        return columns
    limit, width = max(int(query.shape[3] * operators.share), _LEAST_COLUMNS), width_with(columns, call)
    if columns > limit:
        return f"the bias takes {columns} columns, but beyond {limit} on heads of {query.shape[3]} they cost too much"
    if width > operators.widest:
        return f"heads with {columns} columns of bias are {width} wide, and the operator takes {operators.widest}"
    if torch.compiler.is_compiling():
        return None if call.sinks is None else "a compiled graph holds no sinks beside fused attention"
    parts = _parts(call, operators)
    return parts if isinstance(parts, str) else None


def run(call: BiasedCall) -> Tensor:
    """The output, [batch, heads, queries, value_dim]. Memory: O(tokens), and a table of 128 queries at a time."""
    with torch.autocast(call.query.device.type, enabled=False):
        wider = widen(call)
        if torch.compiler.is_compiling():
            return _traced(call, wider)[..., : call.value.shape[3]]
        operators = OPERATORS[call.query.device.type]
        parts = cast("list[Part]", _parts(call, operators))
        sinks = None if wider.sinks is None else wider.sinks.expand(call.query.shape[0], -1, call.query.shape[2])
        arguments = wider.query, wider.key, wider.value, sinks, *wider.unseen
        output = cast(Tensor, _Fused.apply(call.allow, parts, call.scale, *arguments))
        return output[..., : call.value.shape[3]]


def _traced(call: BiasedCall, wider: Widened) -> Tensor:
    """Within a compiled graph, which cannot follow the values of a mask: torch's own choice of an operator."""
    square = call.allow.causal and call.allow.num_queries == call.allow.num_keys
    return functional.scaled_dot_product_attention(
        *(wider.query, wider.key, wider.value),
        attn_mask=None if square else call.allow.dense(),
        is_causal=square,
        scale=call.scale,
        enable_gqa=call.heads_per_kv > 1,
    )


def _parts(call: BiasedCall, operators: Operators) -> list[Part] | str:
    key = "fused", operators.widest, operators.parts
    return cast("list[Part] | str", call.allow.derived(key, lambda: operators.parts(call.allow)))


class _Fused(torch.autograd.Function):
    """Keeps its inputs and its output as saved tensors, so that checkpointing and offloading work."""

    @staticmethod
    def forward(ctx: Any, allow: Allow, parts: list[Part], scale: float, *tensors: Tensor | None) -> Tensor:
        query, key, value, sinks, *unseen = cast("tuple[Any, ...]", tensors)  # without sinks they are None
        operators, rest = OPERATORS[query.device.type], ()
        if _is_whole(parts, query, key):
            output, sums, rest = operators.forward((query, key, value), parts[0], None, scale)
        else:
            output = query.new_zeros(query.shape)
            sums = query.new_zeros(query.shape[:3], dtype=wide(query).dtype)
            for part in parts:
                i, j = part.rows, part.columns
                block = query[:, :, i], key[:, :, j], value[:, :, j]
                output[:, :, i], sums[:, :, i], _ = operators.forward(block, part, _table(allow, part, query), scale)
        if sinks is not None:
            output = (wide(output) * torch.sigmoid(sums - sinks)[..., None]).to(output.dtype)
            sums = torch.logaddexp(sums, sinks.to(sums.dtype))
        ctx.save_for_backward(query, key, value, sinks, output, sums, *rest)
        ctx.allow, ctx.parts, ctx.scale = allow, parts, scale
        ctx.unseen = [torch.empty_like(tensor, device="meta") for tensor in unseen]
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, sums, *rest = ctx.saved_tensors
        (gradient,), operators, to_sinks = grad_outputs, OPERATORS[query.device.type], None
        if sinks is not None:
            to_sinks = -torch.exp(sinks - sums) * (wide(gradient) * wide(output)).sum(dim=-1)
        if _is_whole(ctx.parts, query, key):
            given = gradient, (query, key, value), (output, sums), rest, ctx.parts[0], None, ctx.scale
            to_query, to_key, to_value = operators.backward(*given)
        else:
            to_query, to_key, to_value = (
                torch.zeros_like(query),
                torch.zeros_like(wide(key)),
                torch.zeros_like(wide(value)),
            )
            for part in ctx.parts:
                i, j = part.rows, part.columns
                block = (query[:, :, i], key[:, :, j], value[:, :, j]), (output[:, :, i], sums[:, :, i])
                given = gradient[:, :, i], *block, (), part, _table(ctx.allow, part, query), ctx.scale
                to_query[:, :, i], keys, values = operators.backward(*given)
                to_key[:, :, j] += keys
                to_value[:, :, j] += values
        unseen = [torch.zeros_like(tensor, device=query.device) for tensor in ctx.unseen]
        gradients = (to_query, to_key.to(key.dtype), to_value.to(value.dtype), to_sinks, *unseen)
        return None, None, None, *gradients


def _is_whole(parts: list[Part], query: Tensor, key: Tensor) -> bool:
    every = slice(0, query.shape[2]), slice(0, key.shape[2])
    return len(parts) == 1 and not parts[0].table and (parts[0].rows, parts[0].columns) == every


def _table(allow: Allow, part: Part, query: Tensor) -> Tensor | None:
    """0 where a pair exists and -inf elsewhere, [batch or 1, heads or 1, rows, columns]."""
    allowed = allow.rows(part.rows) if part.table else None
    if allowed is None:
        return None
    allowed = allowed[..., part.columns]
    return query.new_zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)


def _blocks(allow: Allow) -> list[Part]:
    """The parts of any mask: all of it if it is causal or allows everything, else blocks of queries."""
    size = allow.num_queries, allow.num_keys
    whole = Part(slice(0, size[0]), slice(0, size[1]))
    causal, parts = size[0] == size[1], list[Part]()
    if causal and allow.causal:
        return [replace(whole, causal=True)]
    for start in range(0, size[0], _ROWS):
        rows = slice(start, min(start + _ROWS, size[0]))
        allowed = allow.rows(rows)
        if allowed is None:
            return [whole]
        causal = causal and bool((allowed == torch.ones_like(allowed[:1, :1]).tril(start)).all())
        seen = allowed.flatten(0, 2).any(dim=0).nonzero()
        if len(seen):
            columns = slice(int(seen[0]), int(seen[-1]) + 1)
            parts.append(Part(rows, columns, not bool(allowed[..., columns].all())))
    if causal:
        return [replace(whole, causal=True)]
    everything = len(parts) == -(-size[0] // _ROWS) and not any(p.table or p.columns != whole.columns for p in parts)
    return [whole] if everything else parts


def _on_cpu(inputs: Tensors, part: Part, table: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensors]:
    operator = _aten._scaled_dot_product_flash_attention_for_cpu
    return *operator(*inputs, 0.0, part.causal, attn_mask=table, scale=scale), ()


def _back_on_cpu(
    gradient: Tensor, inputs: Tensors, outputs: Tensors, rest: Tensors, part: Part, table: Tensor | None, scale: float
) -> Tensors:
    given = gradient.contiguous(), *inputs, *(tensor.contiguous() for tensor in outputs), 0.0, part.causal
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, attn_mask=table, scale=scale)


def _forms(allow: Allow) -> list[Part] | str:
    """The one part of a mask that flash attention has a form of: everything, causal, a window, packed documents."""
    none = "flash attention knows no form of this mask, only everything, causal masks, windows and packed documents"
    n = allow.num_queries
    whole, causal = Part(slice(0, n), slice(0, allow.num_keys)), n == allow.num_keys
    if causal and allow.causal:
        return [replace(whole, causal=True)]
    if allow.rows(slice(0, 1)) is None:
        return [whole]
    first = _first_keys(allow) if causal else None
    if first is None:
        return none
    where = torch.arange(n, device=first.device)
    window = int((where - first).max()) + 1
    if torch.equal(first, (where - window + 1).clamp(min=0).expand_as(first)):
        return [replace(whole, causal=True, window=window if window < n else 0)]
    begins = first == where
    if not torch.equal(first, torch.where(begins, where, 0).cummax(dim=1).values):
        return none
    return [
        replace(whole, causal=True, starts=begins.flatten().nonzero()[:, 0].int(), tokens=first.numel(), longest=window)
    ]


def _first_keys(allow: Allow) -> Tensor | None:
    """The first key of each query, int64[batch or 1, queries], if it sees those from there to itself and no other."""
    firsts: list[Tensor] = []
    for start in range(0, allow.num_queries, _ROWS):
        allowed = allow.rows(slice(start, min(start + _ROWS, allow.num_queries)))
        if allowed is None or allowed.shape[1] > 1:
            return None
        allowed = allowed[:, 0]
        first = allowed.int().argmax(dim=-1)
        band = torch.ones_like(allowed[0]).tril(start) & (
            torch.arange(allowed.shape[-1], device=first.device) >= first[..., None]
        )
        if not torch.equal(allowed, band):
            return None
        firsts.append(first)
    return torch.cat(firsts, dim=1)


_flash_attention: Final = _aten._flash_attention_forward, _aten._flash_attention_backward


def _on_cuda(inputs: Tensors, part: Part, table: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensors]:
    mask, options = _flash_arguments(part, inputs[0].shape, inputs[1].shape, scale)
    output, sums, *rest = _flash_attention[0](*(_laid(side, part) for side in inputs), *mask, False, **options)
    if part.starts is not None:  # tokens of the batch end to end: [tokens, heads, width] and [heads, tokens]
        batch = len(inputs[0]), -1
        output, sums = output.unflatten(0, batch), sums.unflatten(1, batch).transpose(0, 1)
    return output.transpose(1, 2), sums, rest[:2]


def _back_on_cuda(
    gradient: Tensor, inputs: Tensors, outputs: Tensors, rest: Tensors, part: Part, table: Tensor | None, scale: float
) -> Tensors:
    (output, sums), (mask, options) = outputs, _flash_arguments(part, inputs[0].shape, inputs[1].shape, scale)
    laid = [_laid(side, part) for side in (gradient, *inputs, output)]
    sums = sums.contiguous() if part.starts is None else sums.transpose(0, 1).flatten(1)
    gradients = _flash_attention[1](*laid, sums, *mask, *rest, **options)
    if part.starts is not None:
        gradients = [side.unflatten(0, (len(gradient), -1)) for side in gradients]
    return [side.transpose(1, 2) for side in gradients]


def _laid(side: Tensor, part: Part) -> Tensor:
    """[batch, tokens, heads, width], or for documents [tokens of the batch, heads, width]."""
    return side.transpose(1, 2) if part.starts is None else side.transpose(1, 2).flatten(0, 1)


def _flash_arguments(
    part: Part, query: torch.Size, key: torch.Size, scale: float
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """(starts and lengths of both sides, no dropout, causal), and the options."""
    options: dict[str, Any] = {"scale": scale}
    if part.window:
        options |= {"window_size_left": part.window - 1, "window_size_right": 0}
    if part.starts is None:
        return (None, None, query[2], key[2], 0.0, part.causal), options
    total = query[0] * query[2]  # the documents of one sequence may serve the whole batch
    again = torch.arange(0, total, part.tokens, device=part.starts.device, dtype=torch.int32)
    starts = functional.pad((again[:, None] + part.starts).flatten(), (0, 1), value=total)
    return (starts, starts, part.longest, part.longest, 0.0, part.causal), options


_WIDE: Final = (torch.float32, torch.float64)
_HALF: Final = (torch.bfloat16, torch.float16)
OPERATORS: Final[dict[str, Operators]] = {
    "cpu": Operators(_on_cpu, _back_on_cpu, _blocks, (*_WIDE, *_HALF), widest=1 << 16, share=0.5),
    "cuda": Operators(_on_cuda, _back_on_cuda, _forms, _HALF, widest=256, share=1.0),
}
