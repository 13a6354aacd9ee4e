"""Attention with a bias in memory proportional to the number of tokens, in plain PyTorch: the path for CPUs.

Computed by blocks of queries (`row_tiles`), whose bias is computed by blocks of pairs (`term_tiles`), forward and again
backward; the results are deterministic. Everything runs on other devices too.

Under a compiler the same code is one operator, `attnflow::tiled_attention`, whose arguments are tensors and numbers:
there a mask is held as booleans, and terms of other kinds than ours are left to `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.bias.allow import Allow
from attnflow.bias.call import Call
from attnflow.bias.impl.row_tiles import RowTiles
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, TensorTerm, Term

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
    if not torch.compiler.is_compiling():
        return cast(Tensor, _Tiled.apply(call, seed, *call.tensors())), None
    return torch.ops.attnflow.tiled_attention(*_arguments(call, seed)), None


def _forward(call: Call, seed: Tensor | None) -> Tensor:
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        return RowTiles(call, None if seed is None else int(seed)).forward()


def _backward(call: Call, seed: Tensor | None, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """One gradient for each of `call.tensors()`; None for integers, and for terms where nobody needs them."""
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        tiles = RowTiles(call, None if seed is None else int(seed), any(needs[_first_of_terms(call) :]))
        gradients = tiles.backward(gradient)
    tensors = call.tensors()
    gradients += [None] * (len(tensors) - len(gradients))
    return [None if part is None else part.to(tensor.dtype) for part, tensor in zip(gradients, tensors, strict=True)]


def _first_of_terms(call: Call) -> int:
    return 3 if call.sinks is None else 4


class _Tiled(torch.autograd.Function):
    """Keeps its inputs only, and those as saved tensors, so that checkpointing and offloading work."""

    @staticmethod
    def forward(ctx: Any, call: Call, seed: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.seed = seed
        ctx.empty_call = call.with_tensors([torch.empty_like(tensor, device="meta") for tensor in tensors])
        return _forward(call.with_tensors(tensors), seed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        gradients = _backward(ctx.empty_call.with_tensors(ctx.saved_tensors), ctx.seed, grad_outputs[0], needs)
        return None, None, *(part if need else None for part, need in zip(gradients, needs, strict=True))


# Written out, because type checkers at run time wrap functions, and torch could not read the annotations.
_CALL: Final = "Tensor[] tensors, Tensor? allow, Tensor? seed, int[] spec, float scale, float? softcap, float dropout"


def _arguments(call: Call, seed: Tensor | None) -> tuple[Any, ...]:
    """Of the operators; `spec` is where the terms' tensors begin, then kind, number of tensors, and origin of each."""
    spec = [_first_of_terms(call)]
    for term in call.terms:
        origin = term.origin if isinstance(term, Offset) else 0
        spec += [_KINDS.index(cast(Any, type(term))), len(cast(TensorTerm, term).tensors()), origin]
    return call.tensors(), call.allow.dense(), seed, spec, call.scale, call.softcap, call.dropout


def _call(tensors: Sequence[Tensor], allow: Tensor | None, _: object, spec: Sequence[int], *numbers: Any) -> Call:
    """The call behind the operator's arguments."""
    query, key, value, *sinks = tensors[: spec[0]]
    terms, rest = list[Term](), tensors[spec[0] :]
    for kind, count, origin in zip(spec[1::3], spec[2::3], spec[3::3], strict=True):
        parts, rest = rest[:count], rest[count:]
        terms.append(cast(Any, _KINDS[kind])(*parts, *([origin] if _KINDS[kind] is Offset else [])))
    relation = Allow(None, query.shape[2], key.shape[2]) if allow is None else Allow.from_dense(allow)
    scale, softcap, dropout = numbers
    return Call(query, key, value, tuple(terms), relation, scale, softcap, sinks[0] if sinks else None, dropout)


@torch.library.custom_op("attnflow::tiled_attention", mutates_args=(), schema=f"({_CALL}) -> Tensor")
def _operator(*arguments: Any) -> Tensor:
    return _forward(_call(*arguments), arguments[2])


@_operator.register_fake
def _(tensors: Sequence[Tensor], *_: object) -> Tensor:
    return tensors[2].new_empty((*tensors[0].shape[:3], tensors[2].shape[3]))


@torch.library.custom_op(
    "attnflow::tiled_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, bool[] needs, {_CALL}) -> Tensor[]",
)
def _operator_backward(gradient: Tensor, needs: Sequence[bool], *arguments: Any) -> list[Tensor]:
    gradients = _backward(_call(*arguments), arguments[2], gradient, needs)
    return [gradient.new_empty(0) if part is None else part.contiguous() for part in gradients]


@_operator_backward.register_fake
def _(gradient: Tensor, needs: Sequence[bool], *arguments: Any) -> list[Tensor]:
    call = _call(*arguments)
    first = _first_of_terms(call)
    learns = any(needs[first:])
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if place < first or (learns and tensor.is_floating_point())
        else gradient.new_empty(0)
        for place, tensor in enumerate(call.tensors())
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, allow, seed, *ctx.numbers = inputs
    ctx.save_for_backward(allow, seed, *tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    allow, seed, *tensors = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[0])
    gradients = torch.ops.attnflow.tiled_attention_backward(gradient, needs, tensors, allow, seed, *ctx.numbers)
    return [part if need else None for part, need in zip(gradients, needs, strict=True)], *[None] * 6


_operator.register_autograd(_gradients, setup_context=_setup_context)
