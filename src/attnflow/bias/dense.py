"""Attention on CUDA with its bias held as one number a pair, in the type of the query: guidance, tables, given tensors.

The guidance network comes from two kernels (`attnflow.bias.pairs`), other terms from `Term.tile`. Their sum less its
maximum over each row, which softmax cannot see, loses no more in 16 bits than queries and keys do; the pairs that the
mask leaves out are -inf in it. PyTorch's memory-efficient operator computes the rest, and the flag for causal masks
lets it skip half of the pairs. Its gradient of the bias has one map for each head, so it is taken by blocks of queries.

A sink takes weight and has no value: out' = out sigmoid(lse - sink), lse' = log(exp(lse) + exp(sink)), and the
operator's own backward pass is exact if it is handed out' and lse'.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.bias.call import Allow, BiasedCall
from attnflow.bias.terms import Dense, Guidance, bias_of, wide

_TRITON: Final = find_spec("triton") is not None
_MOST: Final = 1 << 27  # numbers of a bias that "auto" holds: 256 MB a layer in 16 bits
_MAPS: Final = 1 << 27  # numbers of the gradient of the bias, before it is summed over heads: 256 MB in 16 bits
_ROWS: Final = 128  # a block of queries holds a multiple of these
_ALIGNED: Final = 16  # bytes that each row of a head or of the bias must be a multiple of

_forward: Final = torch.ops.aten._scaled_dot_product_efficient_attention
_backward: Final = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def refusal(call: BiasedCall) -> str | None:
    """Why this path cannot compute a call, or None."""
    query, value = call.query, call.value
    if query.device.type != "cuda":
        return f"the memory-efficient operator exists for CUDA, but the tensors are on {query.device.type}"
    if call.dropout or call.softcap is not None:
        return "the memory-efficient operator repeats no dropout here, and has no soft cap"
    if len({query.dtype, call.key.dtype, value.dtype}) > 1 or query.dtype == torch.float64:
        return f"query, key and value must share one of float16, bfloat16, float32, got {query.dtype}, {value.dtype}"
    if query.shape[3] * query.itemsize % _ALIGNED or value.shape[3] * value.itemsize % _ALIGNED:
        return f"the rows of a head must be multiples of {_ALIGNED} bytes, got {query.shape[3]}, {value.shape[3]} wide"
    if not call.terms or 0 in query.shape or 0 in value.shape:
        return "the memory-efficient operator needs at least one term, query, key and channel"
    if any(type(term) is Guidance for term in call.terms) and not _TRITON:
        return "the guidance network on CUDA needs Triton, which is not installed"
    return None


def fits(call: BiasedCall) -> bool:
    """Whether one number a pair is little enough to be held without being asked for."""
    maps = max([1, *[term.groups for term in call.terms]])  # a list, which a compiler can trace
    return call.query.shape[0] * maps * call.query.shape[2] * call.key.shape[2] <= _MOST


@dataclass(frozen=True)
class DenseForm:
    """A relation as this path reads it, made once for all layers that share the relation."""

    allowed: Tensor | None  # [batch or 1, heads or 1, queries, keys]; a query that may attend to nothing has every key
    empty: Tensor | None  # queries that may attend to nothing, [batch or 1, heads or 1, queries, 1]
    causal: bool  # whether it is k <= q
    needed: Tensor  # the blocks that hold a pair, as `pairs` wants them; empty without Triton


def run(call: BiasedCall) -> Tensor:
    """The output, [batch, heads, queries, value_dim]. Memory: a few numbers a pair for each map."""
    form = form_of(call.allow, call.query.device)
    every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
    with torch.autocast(call.query.device.type, enabled=False):
        terms = tuple(_guidance(term, form.needed) if type(term) is Guidance else term for term in call.terms)
        key, value = (t.repeat_interleave(call.heads_per_kv, dim=1) for t in (call.key, call.value))
        bias = bias_of(terms, call.num_heads, *every)
        assert bias is not None  # `refusal` wants a term
        output = _Dense.apply(call.query, key, value, bias, call.sinks, form.allowed, form.causal, call.scale)
    return cast(Tensor, output) if form.empty is None else cast(Tensor, output).masked_fill(form.empty, 0.0)


def form_of(allow: Allow, device: torch.device) -> DenseForm:
    return cast(DenseForm, allow.derived(("dense", str(device)), lambda: _form(allow, device)))


def _form(allow: Allow, device: torch.device) -> DenseForm:
    shape, allowed, empty, causal = (allow.num_queries, allow.num_keys), allow.dense(), None, False
    if allowed is not None:
        allowed = allowed.to(device)
        empty = ~allowed.any(dim=-1, keepdim=True)
        if not torch.compiler.is_compiling():  # it cannot trace what follows the values of a tensor
            causal = shape[0] == shape[1] and torch.equal(allowed, torch.ones_like(allowed).tril())
            empty = empty if bool(empty.any()) else None
    needed = torch.empty(0)
    if _TRITON:
        from attnflow.bias.pairs import blocks

        needed = blocks(None if allowed is None else allowed.flatten(0, 1).any(dim=0), *shape).to(device)
    allowed = allowed if empty is None or allowed is None else allowed | empty
    return DenseForm(allowed, empty, causal, needed)


def _guidance(term: Guidance, needed: Tensor) -> Dense:
    from attnflow.bias.pairs import pairs

    return Dense(pairs(*term.tensors().values(), needed))


class _Dense(torch.autograd.Function):
    """softmax(scale * q k^T + bias) v; bias: [batch or 1, heads or 1, queries, keys] in float32, as is its gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor | None,
        allowed: Tensor | None, causal: bool, scale: float,
    ) -> Tensor:  # fmt: skip
        ctx.bias_shape, ctx.causal, ctx.scale = bias.shape, causal, scale
        ctx.sink_dtype = None if sinks is None else sinks.dtype
        if allowed is not None:
            bias = torch.where(allowed, bias, -torch.inf)
        top = bias.amax(dim=-1, keepdim=True)
        bias = (bias - top).to(query.dtype)
        width = _ALIGNED // bias.itemsize
        bias = functional.pad(bias, (0, -bias.shape[-1] % width))[..., : bias.shape[-1]]
        heads = bias.expand(*query.shape[:3], -1)
        learns, on_sink = any(ctx.needs_input_grad), None
        output, lse, *seeds = _forward(query, key, value, heads, learns or sinks is not None, 0.0, causal, scale=scale)
        if sinks is not None:
            beyond = lse[..., : query.shape[2]] + top.squeeze(-1) - wide(sinks)[:, None]
            output, on_sink = (output * beyond.sigmoid()[..., None]).to(output.dtype), (-beyond).sigmoid()
            lse[..., : query.shape[2]] += functional.softplus(-beyond)
        ctx.save_for_backward(query, key, value, bias, output, lse, on_sink, *seeds)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, bias, output, lse, on_sink, *seeds = ctx.saved_tensors
        (batch, heads, queries, _), keys, learns = query.shape, key.shape[2], ctx.needs_input_grad[3]
        upstream, shared = grad_outputs[0], [dim for dim in (0, 1) if ctx.bias_shape[dim] == 1]
        step = max(_ROWS, _MAPS // (batch * heads * keys) // _ROWS * _ROWS) if learns else queries
        to_query, to_key, to_value = torch.empty_like(query), *(torch.zeros_like(wide(t)) for t in (key, value))
        to_bias = bias.new_zeros(ctx.bias_shape, dtype=torch.float32) if learns else None
        for start in range(0, queries, step):
            rows = slice(start, min(start + step, queries))
            seen = slice(0, rows.stop if ctx.causal else keys)
            parts = _backward(
                *(upstream[:, :, rows], query[:, :, rows], key[:, :, seen], value[:, :, seen]),
                *(bias[:, :, rows, seen].expand(batch, heads, -1, -1), output[:, :, rows]),
                *(lse[:, :, start : rows.stop + -rows.stop % 32], *seeds, 0.0, [True, True, True, learns]),
                *(ctx.causal and start == 0,),
                scale=ctx.scale,
            )
            to_query[:, :, rows] = parts[0]
            to_key[:, :, seen] += parts[1]
            to_value[:, :, seen] += parts[2]
            if to_bias is not None:
                total = parts[3].sum(shared, keepdim=True, dtype=torch.float32) if shared else parts[3]
                if ctx.causal:  # what the flag skips, the operator did not write
                    total = total.masked_fill(bias[:, :, rows, seen] == -torch.inf, 0.0)
                to_bias[:, :, rows, seen] = total
        to_sinks = None
        if on_sink is not None:
            to_sinks = -(on_sink * (wide(upstream) * output).sum(dim=-1)).sum(dim=(0, 2)).to(ctx.sink_dtype)
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), to_bias, to_sinks, None, None, None
