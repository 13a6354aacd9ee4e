"""The operators `attnflow::biased_attention`, its backward and `attnflow::biased_attention_decode`, for torch.library.

A compiler sees three functions from tensors to tensors, with the shapes of their results; what they launch is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from attnflow.bias.impl.triton import launch, tuning
from attnflow.bias.impl.triton.gradients import Gradients
from attnflow.bias.impl.triton.inputs import Inputs

_CALL: Final = "Tensor[] operands, int[] present, Tensor[] blocks, int origin, float scale, float softcap"


def _output_like(inputs: Inputs) -> Tensor:
    """Empty output, laid out so that the transpose which follows in a model is a view: [batch, queries, heads, ...]."""
    batch, heads, queries, _ = inputs["query"].shape
    return inputs["value"].new_empty((batch, queries, heads, inputs["value"].shape[3])).transpose(1, 2)


def _results(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (output, log-sum-exp, materialised bias that is kept for the backward pass, or (0,) numbers)."""
    query, words = inputs["query"], inputs.blocks[0]
    shape = (query.shape[0], inputs.groups, words.shape[3], words.shape[2] * 64)
    small = shape[0] * shape[1] * inputs.pair_bytes() <= tuning.KEPT_BYTES
    pairs = query.new_empty(shape if keep and inputs.must_build and small else (0,), dtype=inputs.pair_type)
    return _output_like(inputs), query.new_empty(query.shape[:3], dtype=torch.float32), pairs


@torch.library.custom_op(
    "attnflow::biased_attention", mutates_args=(), schema=f"({_CALL}, bool keep) -> (Tensor, Tensor, Tensor)"
)
def biased_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(output, log-sum-exp of each query, the bias of pairs if it is kept)."""
    inputs = Inputs.of(*arguments[:-1])
    with torch.cuda.device_of(inputs["query"]):  # Triton launches on the current device, which may be another one
        output, logsum, pairs = _results(inputs, arguments[-1])
        if pairs.numel():
            pairs.zero_()  # what is not allowed, too: results of operators are compared
            launch.build_pairs(inputs, launch.centred(inputs), pairs)
            launch.attend(inputs, pairs, output, logsum)
            return output, logsum, pairs
        for piece in inputs.pieces(tuning.PAIR_BYTES, inputs.pair_bytes() if inputs.must_build else 0):
            part = inputs.part(piece)
            table = launch.build_pairs(part, launch.centred(part)) if part.must_build else part.get("dense")
            launch.attend(part, table, piece.cut(output), piece.cut(logsum))
        return output, logsum, pairs


@biased_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(Inputs.of(*arguments[:-1]), arguments[-1])


@torch.library.custom_op(
    "attnflow::biased_attention_backward",
    mutates_args=(),
    schema=f"({_CALL}, Tensor output, Tensor logsum, Tensor pairs, Tensor gradient, bool[] needs) -> Tensor[]",
)
def biased_attention_backward(*arguments: Any) -> list[Tensor]:
    """A gradient for each operand; empty for those that are not asked for, nor come with one that is."""
    *call, output, logsum, pairs, gradient, needs = arguments
    inputs = Inputs.of(*call)
    with torch.cuda.device_of(output):
        return Gradients(inputs, needs).compute(output, logsum, pairs, gradient)


@biased_attention_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    gradients = Gradients(Inputs.of(*arguments[:6]), arguments[-1])
    return gradients.results()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    operands, ctx.present, blocks, *ctx.numbers, _ = inputs
    ctx.save_for_backward(*output, *operands, *blocks)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    needs: Sequence[bool] = ctx.needs_input_grad[0]
    output, tensors = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    operands, blocks = list(tensors[: len(needs)]), list(tensors[len(needs) :])
    results: list[Tensor | None] = [None] * len(needs)
    if gradient is not None:
        call = operands, ctx.present, blocks, *ctx.numbers
        parts = torch.ops.attnflow.biased_attention_backward(*call, *output, gradient, list(needs))
        results = [part if need else None for part, need in zip(parts, needs, strict=True)]
    return results, None, [None] * len(blocks), None, None, None, None


biased_attention.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op(
    "attnflow::biased_attention_decode", mutates_args=(), schema=f"({_CALL}, Tensor? mask) -> Tensor"
)
def biased_attention_decode(*arguments: Any) -> Tensor:
    """Output for a few queries, without a gradient; `mask` is uint8 [batch or 1, heads or 1, queries, keys]."""
    return _decode(Inputs.of(*arguments[:-1]), arguments[-1])


@biased_attention_decode.register_fake
def _(*arguments: Any) -> Tensor:
    return _output_like(Inputs.of(*arguments[:-1]))


def decode(inputs: Inputs, mask: Tensor | None) -> Tensor:
    """The operator for a compiler; without one, what it does, and no dispatcher in between."""
    if torch.compiler.is_compiling():
        return biased_attention_decode(*inputs.arguments(), mask)
    return _decode(inputs, mask)


def _decode(inputs: Inputs, mask: Tensor | None) -> Tensor:
    with torch.cuda.device_of(inputs["query"]):
        output = _output_like(inputs)
        launch.decode(inputs, mask, output)
    return output


class Unseen(torch.autograd.Function):
    """The output itself; tensors that softmax cannot see get the gradient zero instead of none."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        """The output."""
        ctx.save_for_backward(*tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of the output as it is, and zeros."""
        return gradient, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
