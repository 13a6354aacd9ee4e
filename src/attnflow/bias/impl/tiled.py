"""Attention with a bias in memory proportional to the number of tokens, in plain PyTorch: the path for CPUs.

Computed by blocks of queries (`_row_tiles`), whose bias is computed by blocks of pairs (`_term_tiles`,
`_guidance_tile`), forward and again backward; the results are deterministic. Everything runs on other devices too.

Under a compiler the same code is one operator, `attnflow::tiled_attention`, whose arguments are tensors and numbers:
there a mask is held as booleans, and terms of other kinds than ours are left to `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.bias.allow import Allow
from attnflow.bias.call import Call
from attnflow.bias.impl._row_tiles import RowTiles
from attnflow.bias.impl._term_tiles import TensorTerm
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term

_KINDS: Final = (Guidance, Product, Additive, Offset, Dense)


def refuses(call: Call) -> str | None:
    """Why this implementation cannot compute the call, or None."""
    for term in call.terms:
        name = type(term).__name__
        if not (hasattr(term, "tensors") and hasattr(term, "with_tensors")):
            return f"{name} has no `tensors` and `with_tensors`, so its gradients cannot be recomputed by tiles"
        if torch.compiler.is_compiling() and type(term) not in _KINDS:
            return f"under torch.compile only terms of {', '.join(kind.__name__ for kind in _KINDS)} run, got {name}"
    return None


def run(call: Call) -> tuple[Tensor, None]:
    """(output [batch, heads, queries, value_dim] in the type of the values, None). Time: that of the allowed pairs."""
    seed = torch.randint(1 << 31, ()) if call.dropout else None
    tensors = _tensors(call)
    if not torch.compiler.is_compiling():
        return cast(Tensor, _Tiled.apply(call, seed, *tensors)), None
    spec = [number for term in call.terms for number in _describe(term)]
    first = 3 if call.sinks is None else 4
    output = torch.ops.attnflow.tiled_attention(
        *tensors[:3],
        call.sinks,
        call.allow.dense(),
        tensors[first:],
        spec,
        call.scale,
        call.softcap,
        call.dropout,
        seed,
    )
    return output, None


def _tensors(call: Call) -> list[Tensor]:
    """Everything that may have a gradient, and the integer tensors of terms."""
    sinks = [] if call.sinks is None else [call.sinks]
    terms = [tensor for term in call.terms for tensor in cast(TensorTerm, term).tensors().values()]
    return [call.query, call.key, call.value, *sinks, *terms]


def _with_tensors(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The same call on other tensors, in the order of `_tensors`."""
    query, key, value, *rest = tensors
    sinks = None if call.sinks is None else rest.pop(0)
    terms: list[Term] = []
    for term in cast(tuple[TensorTerm, ...], call.terms):
        count = len(term.tensors())
        terms.append(term.with_tensors(rest[:count]))
        rest = rest[count:]
    return replace(call, query=query, key=key, value=value, sinks=sinks, terms=tuple(terms))


def _forward(call: Call, seed: Tensor | None) -> Tensor:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        return RowTiles(call, None if seed is None else int(seed)).forward()


def _backward(call: Call, seed: Tensor | None, gradient: Tensor, needs_terms: bool) -> list[Tensor | None]:
    """One gradient for each of `_tensors(call)`; None for integers, and for terms where nobody needs them."""
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        gradients = RowTiles(call, None if seed is None else int(seed)).backward(gradient, needs_terms)
    tensors = _tensors(call)
    gradients += [None] * (len(tensors) - len(gradients))
    return [None if part is None else part.to(tensor.dtype) for part, tensor in zip(gradients, tensors, strict=True)]


class _Tiled(torch.autograd.Function):
    """Keeps its inputs only, and those as saved tensors, so that checkpointing and offloading work."""

    @staticmethod
    def forward(ctx: Any, call: Call, seed: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.seed = seed
        ctx.empty_call = _with_tensors(call, [torch.empty_like(tensor, device="meta") for tensor in tensors])
        ctx.first_of_terms = 3 if call.sinks is None else 4
        return _forward(_with_tensors(call, tensors), seed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        call = _with_tensors(ctx.empty_call, ctx.saved_tensors)
        gradients = _backward(call, ctx.seed, grad_outputs[0], any(needed[ctx.first_of_terms :]))
        return None, None, *(part if wanted else None for part, wanted in zip(gradients, needed, strict=True))


def _describe(term: Term) -> tuple[int, int, int]:
    """(kind, number of tensors, origin of an `Offset`): what makes a term besides its tensors."""
    origin = term.origin if isinstance(term, Offset) else 0
    return _KINDS.index(cast(Any, type(term))), len(cast(TensorTerm, term).tensors()), origin


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    allow: Tensor | None,
    tensors: Sequence[Tensor],
    spec: Sequence[int],
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Call:
    """The call behind the operator's arguments."""
    terms: list[Term] = []
    rest = list(tensors)
    for kind, count, origin in zip(spec[::3], spec[1::3], spec[2::3], strict=True):
        parts, rest = rest[:count], rest[count:]
        terms.append(cast(Any, _KINDS[kind])(*parts, *([origin] if _KINDS[kind] is Offset else [])))
    relation = Allow(None, query.shape[2], key.shape[2]) if allow is None else Allow.from_dense(allow)
    return Call(query, key, value, tuple(terms), relation, scale, softcap, sinks, dropout)


# Written out, because type checkers at run time wrap functions, and torch could not read the annotations.
_ARGUMENTS: Final = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? allow, Tensor[] tensors, int[] spec, "
    "float scale, float? softcap, float dropout, Tensor? seed"
)


@torch.library.custom_op("attnflow::tiled_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _operator(*arguments: Any) -> Tensor:
    return _forward(_call(*arguments[:-1]), arguments[-1])


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return value.new_empty((*query.shape[:3], value.shape[3]))


@torch.library.custom_op(
    "attnflow::tiled_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, bool needs_terms, {_ARGUMENTS}) -> Tensor[]",
)
def _operator_backward(gradient: Tensor, needs_terms: bool, *arguments: Any) -> list[Tensor]:
    gradients = _backward(_call(*arguments[:-1]), arguments[-1], gradient, needs_terms)
    return [gradient.new_empty(0) if part is None else part.contiguous() for part in gradients]


@_operator_backward.register_fake
def _(gradient: Tensor, needs_terms: bool, *arguments: Any) -> list[Tensor]:
    call = _call(*arguments[:-1])
    count = 3 if call.sinks is None else 4
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if index < count or (needs_terms and tensor.is_floating_point())
        else gradient.new_empty(0)
        for index, tensor in enumerate(_tensors(call))
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, sinks, allow, tensors, *ctx.numbers, seed = inputs
    ctx.save_for_backward(query, key, value, sinks, allow, seed, *tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    query, key, value, sinks, allow, seed, *tensors = ctx.saved_tensors
    needs_terms = any(tensor.requires_grad for tensor in tensors)
    arguments = query, key, value, sinks, allow, tensors, *ctx.numbers, seed
    gradients = torch.ops.attnflow.tiled_attention_backward(gradient, needs_terms, *arguments)
    to_query, to_key, to_value, *rest = gradients
    to_sinks = None if sinks is None else rest.pop(0)
    usable = [part if needs_terms and t.is_floating_point() else None for part, t in zip(rest, tensors, strict=True)]
    no_spec = None if tensors else []  # an empty list counts as one of tensors
    return to_query, to_key, to_value, to_sinks, None, usable, no_spec, None, None, None, None


_operator.register_autograd(_gradients, setup_context=_setup_context)
