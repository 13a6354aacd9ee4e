"""The operators `attnflow::biased_attention`, its backward and `attnflow::biased_attention_decode`, for torch.library.

A compiler sees three functions from tensors to tensors, with the shapes of their results; what they launch is theirs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from attnflow.bias.impl.triton import launch, tuning
from attnflow.bias.impl.triton.gradients import Needs, term_gradients
from attnflow.bias.impl.triton.inputs import NAMES, Inputs
from attnflow.bias.impl.triton.launch import Centred, Upstream

_ARGUMENTS: Final = (
    "Tensor query, Tensor key, Tensor value, Tensor? columns, Tensor? sinks, Tensor? dense, Tensor? rows, Tensor? cols,"
    " Tensor? gain, Tensor? shift, Tensor? weight, Tensor? left, Tensor? right, Tensor? table, Tensor? bucket_of,"
    " Tensor? row_positions, Tensor? column_positions, int origin, Tensor[] blocks, float scale, float softcap"
)
_DIFFERENTIABLE: Final = (
    *("query", "key", "value", "columns", "sinks", "dense", "rows", "cols"),
    *("gain", "shift", "weight", "left", "right", "table"),
)
_COUNT: Final = len(NAMES)


def _output_like(inputs: Inputs) -> Tensor:
    """Empty output, laid out so that the transpose which follows in a model is a view: [batch, queries, heads, ...]."""
    batch, heads, queries, _ = inputs.query.shape
    return inputs.value.new_empty((batch, queries, heads, inputs.value.shape[3])).transpose(1, 2)


def _pairs_shape(inputs: Inputs, keep: bool) -> tuple[int, ...]:
    """Of the materialised bias that is kept for the backward pass; (0,) if none is."""
    words = inputs.blocks[0]
    shape = (inputs.query.shape[0], inputs.groups, words.shape[3], words.shape[2] * 64)
    small = shape[0] * shape[1] * inputs.pair_bytes() <= tuning.KEPT_BYTES
    return shape if keep and inputs.must_build and small else (0,)


def _heads(inputs: Inputs, maps: slice) -> slice:
    """The heads that some maps serve."""
    per_map = inputs.query.shape[1] // max(1, inputs.groups)
    return slice(maps.start * per_map, maps.stop * per_map)


@torch.library.custom_op(
    "attnflow::biased_attention", mutates_args=(), schema=f"({_ARGUMENTS}, bool keep) -> (Tensor, Tensor, Tensor)"
)
def biased_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(output, log-sum-exp of each query, the bias of pairs if it is kept)."""
    inputs, keep = Inputs(*arguments[:_COUNT]), bool(arguments[_COUNT])
    with torch.cuda.device_of(inputs.query):  # Triton launches on the current device, which may be another one
        return _forward(inputs, keep)


def _forward(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    output = _output_like(inputs)
    logsum = inputs.query.new_empty(inputs.query.shape[:3], dtype=torch.float32)
    if _pairs_shape(inputs, keep) != (0,):
        pairs = launch.build_pairs(inputs, Centred.of(inputs), whole=True)
        launch.attend(inputs, pairs, output, logsum)
        return output, logsum, pairs
    for batch, maps in inputs.parts(tuning.PAIR_BYTES, inputs.pair_bytes() if inputs.must_build else 0):
        part, heads = inputs.part(batch, maps), _heads(inputs, maps)
        table = launch.build_pairs(part, Centred.of(part)) if part.must_build else part.dense
        launch.attend(part, table, output[batch, heads], logsum[batch, heads])
    return output, logsum, inputs.query.new_empty((0,), dtype=inputs.pair_type)


@biased_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, keep = Inputs(*arguments[:_COUNT]), bool(arguments[_COUNT])
    logsum = inputs.query.new_empty(inputs.query.shape[:3], dtype=torch.float32)
    pairs = inputs.query.new_empty(_pairs_shape(inputs, keep), dtype=inputs.pair_type)
    return _output_like(inputs), logsum, pairs


@torch.library.custom_op(
    "attnflow::biased_attention_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor output, Tensor logsum, Tensor pairs, Tensor gradient, bool[] needs) -> Tensor[]",
)
def biased_attention_backward(*arguments: Any) -> list[Tensor]:
    """Gradients by the order of `_DIFFERENTIABLE`; empty tensors for what is not asked for."""
    inputs = Inputs(*arguments[:_COUNT])
    output, logsum, pairs, gradient, asked = arguments[_COUNT:]
    with torch.cuda.device_of(inputs.query):
        return _gradients(inputs, output, logsum, pairs, gradient, Needs.of(inputs, asked))


def _gradients(
    inputs: Inputs, output: Tensor, logsum: Tensor, pairs: Tensor, gradient: Tensor, needs: Needs
) -> list[Tensor]:
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    results = _empty_gradients(inputs, needs)
    for name in _DIFFERENTIABLE[8:11] + _DIFFERENTIABLE[13:]:
        results[name].zero_()  # parameters, which every batch element adds to
    if needs.dense and inputs.dense is not None and inputs.dense.shape[0] == 1:
        results["dense"].zero_()
    limit, each = tuning.PAIR_BYTES, inputs.pair_bytes() if inputs.must_build and not pairs.numel() else 0
    for batch, maps in inputs.parts(limit, each):
        part, heads = inputs.part(batch, maps), _heads(inputs, maps)
        up = Upstream.of(gradient[batch, heads], output[batch, heads], logsum[batch, heads])
        both = Centred.of(part) if not pairs.numel() or needs.guidance else None
        table = pairs if pairs.numel() else launch.build_pairs(part, both) if part.must_build else part.dense
        per_kv = inputs.query.shape[1] // inputs.key.shape[1]
        kv = slice(heads.start // per_kv, heads.stop // per_kv)
        query = results["query"][batch, heads] if needs.attention else torch.empty_like(part.query)
        up = launch.query_gradient(part, table, up, query)
        if needs.attention:
            columns = launch.key_gradients(part, table, up, results["key"][batch, kv], results["value"][batch, kv])
            if columns is not None and part.columns is not None and inputs.columns is not None:
                shared = part.columns.shape[1]
                first = 0 if inputs.columns.shape[1] == 1 else heads.start * inputs.columns.shape[1] // output.shape[1]
                total = columns.unflatten(1, (shared, -1)).sum(dim=2)
                results["columns"][batch, first : first + shared] += total
        if inputs.sinks is not None:
            _sink_gradient(part, up, results["sinks"][batch, heads])
        if needs.pairs and table is not None:
            for name, tensor in term_gradients(part, table, up, both, needs).items():
                _add(results[name], tensor, name, batch, maps)
    return list(results.values())


def _add(total: Tensor, tensor: Tensor, name: str, batch: slice, maps: slice) -> None:
    """Put the gradient of one piece where it belongs; what batch elements share is summed."""
    if name in ("gain", "shift", "weight", "table"):
        total[maps] += tensor
    elif total.shape[0] == 1 and name == "dense":
        total[:, maps] += tensor
    else:
        total[batch, maps] = tensor


def _sink_gradient(inputs: Inputs, up: Upstream, result: Tensor) -> None:
    """A sink takes the weight exp(sink - log-sum-exp) and gives nothing: its gradient is -weight * delta."""
    assert inputs.sinks is not None
    result.copy_(-torch.exp(inputs.sinks - up.logsum) * up.delta)


def _empty_gradients(inputs: Inputs, needs: Needs) -> dict[str, Tensor]:
    asked = dict.fromkeys(_DIFFERENTIABLE, needs.attention)
    asked |= dict.fromkeys(("rows", "cols", "gain", "shift", "weight"), needs.guidance)
    asked |= dict.fromkeys(("left", "right"), needs.product)
    asked |= {"table": needs.offset, "dense": needs.dense, "sinks": inputs.sinks is not None}
    results: dict[str, Tensor] = {}
    for name, wanted in asked.items():
        tensor = getattr(inputs, name)
        if tensor is None or not wanted:
            results[name] = inputs.query.new_empty((0,))
        elif name == "columns":
            results[name] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        else:
            plain = name in ("query", "key", "value")
            results[name] = torch.empty_like(
                tensor, memory_format=torch.preserve_format if plain else torch.contiguous_format
            )
    return results


@biased_attention_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs = Inputs(*arguments[:_COUNT])
    return list(_empty_gradients(inputs, Needs.of(inputs, arguments[-1])).values())


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    packed = Inputs(*inputs[:_COUNT])
    tensors = [value for value in packed.arguments() if isinstance(value, Tensor)]
    ctx.present = [isinstance(value, Tensor) for value in packed.arguments()]
    ctx.numbers = [None if isinstance(v, (Tensor, list)) else v for v in packed.arguments()]
    ctx.save_for_backward(*tensors, *packed.blocks, *output)
    ctx.num_tensors = len(tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    tensors, blocks, output = saved[: ctx.num_tensors], saved[ctx.num_tensors : -3], saved[-3:]
    nothing: list[Any] = [None] * (_COUNT + 1)
    nothing[NAMES.index("blocks")] = [None] * len(blocks)
    if gradient is None:
        return tuple(nothing)
    rest = iter(tensors)
    arguments = [next(rest) if there else number for there, number in zip(ctx.present, ctx.numbers, strict=True)]
    arguments[NAMES.index("blocks")] = blocks
    asked = dict(zip(NAMES, ctx.needs_input_grad, strict=False))
    needs = [
        any(asked[name] for name in ("query", "key", "value", "columns")),
        any(asked[name] for name in ("rows", "cols", "gain", "shift", "weight")),
        asked["left"] or asked["right"],
        asked["table"],
        asked["dense"],
    ]
    results = torch.ops.attnflow.biased_attention_backward(*arguments, *output, gradient, needs)
    for name, tensor in zip(_DIFFERENTIABLE, results, strict=True):
        if asked[name]:
            nothing[NAMES.index(name)] = tensor
    return tuple(nothing)


biased_attention.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op(
    "attnflow::biased_attention_decode", mutates_args=(), schema=f"({_ARGUMENTS}, Tensor? mask) -> Tensor"
)
def biased_attention_decode(*arguments: Any) -> Tensor:
    """Output for a few queries, without a gradient; `mask` is uint8 [batch or 1, heads or 1, queries, keys]."""
    return _decode(Inputs(*arguments[:_COUNT]), arguments[_COUNT])


@biased_attention_decode.register_fake
def _(*arguments: Any) -> Tensor:
    return _output_like(Inputs(*arguments[:_COUNT]))


def decode(inputs: Inputs, mask: Tensor | None) -> Tensor:
    """The operator for a compiler; without one, what it does, and no dispatcher in between."""
    if torch.compiler.is_compiling():
        return biased_attention_decode(*inputs.arguments(), mask)
    return _decode(inputs, mask)


def _decode(inputs: Inputs, mask: Tensor | None) -> Tensor:
    output = _output_like(inputs)
    with torch.cuda.device_of(inputs.query):
        launch.decode_call(inputs, mask, output)
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
