"""One attention call of a layer that has a bias."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.bias.attention import choose, module_of
from attnflow.bias.call import Call, make_call
from attnflow.bias.hf.allowed import relation_of
from attnflow.bias.hf.cache import extend, first_position, new_slots
from attnflow.bias.hf.hooks import CHILD, Slot, enter_of
from attnflow.bias.layer import LayerBias
from attnflow.bias.shape import Vectors
from attnflow.bias.terms import Dense, Term
from attnflow.models.interception import AttentionCall, Output, Proceed

# What else transformers adds to scores, [batch or 1, heads, queries, keys]: T5's buckets. The rest is refused.
_ADDED: Final = "position_bias"
_REFUSED: Final = ("alibi", "relative_position_bias", "head_mask")


def biased(call: AttentionCall, proceed: Proceed) -> Output:
    """The interceptor of a module with a bias; without one, or while it is disabled, the call goes on as it is.

    While the bias is exactly zero the output is the base model's, bit for bit, and gradients reach the bias all the
    same.
    """
    bias = getattr(call.module, CHILD, None)
    if not isinstance(bias, LayerBias) or not (bias.enabled or bias.observer is not None):
        return proceed(call)
    slot = cast(Any, enter_of(call.module)).slot
    terms = _terms(call, bias, slot) if bias.enabled else ()  # disabled, and yet observed
    slot.clear()
    zero = not bias.enabled or bias.is_zero()
    learns = (
        bias.enabled and torch.is_grad_enabled() and any(parameter.requires_grad for parameter in bias.parameters())
    )
    if zero and not learns and bias.observer is None:
        return proceed(call)
    biased_call = _call(call, terms)
    if bias.observer is not None:
        bias.observer(biased_call)
    if zero and not learns:
        return proceed(call)
    output, weights = _attend(biased_call, bias.backend, call.implementation == "eager")
    output = output.transpose(1, 2).contiguous()
    weights = None if weights is None else weights.to(call.query.dtype)
    if zero and not biased_call.dropout:
        plain, plain_weights = proceed(call)  # with gradients enabled: without, SDPA may choose another kernel
        output = cast(Tensor, _SameAs.apply(output, plain.detach()))
        weights = None if weights is None or plain_weights is None else plain_weights.detach()
    return output, weights


def _call(call: AttentionCall, terms: tuple[Term, ...]) -> Call:
    """The call with everything that transformers adds to its scores."""
    kwargs = call.kwargs
    lost = [name for name in _REFUSED if kwargs.get(name) is not None]
    if lost:
        raise ValueError(
            f"{type(call.module).__name__} adds {' and '.join(lost)} to its scores, which a bias cannot join"
        )
    allow, additive = relation_of(call)
    added = kwargs.get(_ADDED)
    own = [additive, None if added is None else Dense(added)]
    query, key, value = map(_autocast, (call.query, call.key, call.value))
    return make_call(
        query,
        key,
        value,
        (*terms, *(term for term in own if term is not None)),
        allow,
        kwargs.get("scaling"),
        kwargs.get("softcap"),
        kwargs.get("s_aux", kwargs.get("sinks")),
        float(kwargs.get("dropout") or 0.0),
    )


def _attend(call: Call, backend: str, eager: bool) -> tuple[Tensor, Tensor | None]:
    """By the backend asked for; eager attention also returns weights, which only the reference holds."""
    need_weights = eager and backend in ("auto", "reference")
    with torch.autocast(call.query.device.type, enabled=False):  # scores are summed in float32 whatever surrounds them
        output, weights = module_of(choose(call, backend, need_weights)).run(call)
    return output, weights if need_weights else None


def _autocast(tensor: Tensor) -> Tensor:
    """What autocast would hand to attention: rotary embedding leaves queries and keys in float32 there."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


class _SameAs(torch.autograd.Function):
    """The value of one tensor with the gradient of another that equals it up to rounding."""

    @staticmethod
    def forward(ctx: object, differentiable: Tensor, exact: Tensor) -> Tensor:
        return exact.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _terms(call: AttentionCall, bias: LayerBias, slot: Slot) -> tuple[Term, ...]:
    """The terms of this call; what the cache must keep of the new tokens is added to it.

    Models that keep position ids to themselves get positions by the count of tokens after the leading pads.
    """
    module, query, key = call.module, call.query, call.key
    if not slot.mine():
        raise RuntimeError("two threads run one model with a bias at the same time; give each a copy, or take turns")
    layer = cast(int, getattr(module, "layer_idx", 0) or 0)
    new, num_keys, device = query.shape[2], key.shape[2], query.device
    where = new_slots(slot.cache, layer, new, num_keys, device)
    positions = slot.positions
    if positions is None or positions.shape[1] != new:
        positions = (torch.arange(new, device=device) + first_position(slot.cache, layer, new))[None]
        left = None if call.request is None else call.request.pads()[1]
        positions = positions if left is None else (positions - left.to(device)[:, None]).clamp(min=0)
    positions = positions.expand(query.shape[0], -1)
    rotated = "rotated" in bias.references
    queries = Vectors(slot.query, _flat(query) if rotated else None, slot.hidden, positions)
    keys = Vectors(slot.key, _flat(key[:, :, where]) if rotated else None, slot.hidden, positions)
    columns = bias.columns(keys)
    columns = extend(slot.cache, layer, slot.depth, columns, num_keys)
    return bias.terms(queries, columns, where)


def _flat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)
