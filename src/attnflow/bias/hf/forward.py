"""One attention call of a layer that has a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow.bias.attention import backend, choose
from attnflow.bias.call import Call, make_call
from attnflow.bias.hf.allowed import relation_of
from attnflow.bias.hf.cache import extend, first_position, new_slots
from attnflow.bias.hf.hooks import Slot, enter_of
from attnflow.bias.layer import LayerBias
from attnflow.bias.shape import Vectors
from attnflow.bias.terms import Dense, Term
from attnflow.masks.hf.placement import Placement
from attnflow.masks.hf.tables import MaskTables

Base = Callable[[], tuple[Tensor, Tensor | None]]

# What else transformers adds to scores, [batch or 1, heads, queries, keys]: T5's buckets. The rest is refused.
_ADDED: Final = "position_bias"
_REFUSED: Final = ("alibi", "relative_position_bias", "head_mask")


def biased(
    module: nn.Module,
    bias: LayerBias,
    base: Base,
    eager: bool,
    mask: object,
    tables: MaskTables | None,
    crop: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention with the layer's bias, in the form that transformers expects: ([batch, queries, heads, dim], weights).

    While the bias is exactly zero the output is the base model's, bit for bit, and gradients reach the bias all the
    same.

    Args:
        module: the attention module.
        bias: its bias.
        base: computes what the model would compute without it.
        eager: whether the model runs eager attention, which returns weights.
        mask: what transformers handed to the module.
        tables: the mask of `masks.attach`, if one rules here.
        crop: as in `masks.attach`.
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: likewise.
        kwargs: of the attention function.
    """
    slot = cast(Any, enter_of(module)).slot
    left = mask.left if isinstance(mask, Placement) else None
    terms = _terms(module, bias, slot, query, key, left) if bias.enabled else ()  # disabled, and yet observed
    slot.clear()
    zero = not bias.enabled or bias.is_zero()
    learns = (
        bias.enabled and torch.is_grad_enabled() and any(parameter.requires_grad for parameter in bias.parameters())
    )
    if zero and not learns and bias.observer is None:
        return base()
    call = _call(module, terms, mask, tables, crop, query, key, value, kwargs)
    if bias.observer is not None:
        bias.observer(call)
    if zero and not learns:
        return base()
    output, weights = _attend(call, bias.impl, eager)
    output = output.transpose(1, 2).contiguous()
    weights = None if weights is None else weights.to(query.dtype)
    if zero and not call.dropout:
        plain, plain_weights = base()  # with gradients enabled: without, SDPA may choose another kernel
        output = cast(Tensor, _SameAs.apply(output, plain.detach()))
        weights = None if weights is None or plain_weights is None else plain_weights.detach()
    return output, weights


def _call(
    module: nn.Module,
    terms: tuple[Term, ...],
    mask: object,
    tables: MaskTables | None,
    crop: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
) -> Call:
    """The call with everything that transformers adds to its scores."""
    lost = [name for name in _REFUSED if kwargs.get(name) is not None]
    if lost:
        raise ValueError(f"{type(module).__name__} adds {' and '.join(lost)} to its scores, which a bias cannot join")
    allow, additive = relation_of(module, mask, tables, crop, query, key.shape[2], kwargs)
    added = kwargs.get(_ADDED)
    own = [additive, None if added is None else Dense(added)]
    query, key, value = map(_autocast, (query, key, value))
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


def _attend(call: Call, impl: str, eager: bool) -> tuple[Tensor, Tensor | None]:
    """By the implementation asked for; eager attention also returns weights, which only the reference holds."""
    need_weights = eager and impl in ("auto", "reference")
    with torch.autocast(call.query.device.type, enabled=False):  # scores are summed in float32 whatever surrounds them
        output, weights = backend(choose(call, impl, need_weights)).run(call)
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


def _terms(
    module: nn.Module, bias: LayerBias, slot: Slot, query: Tensor, key: Tensor, left: Tensor | None
) -> tuple[Term, ...]:
    """The terms of this call; what the cache must keep of the new tokens is added to it.

    Models that keep position ids to themselves get positions by the count of tokens after `left` leading pads.
    """
    if not slot.mine():
        raise RuntimeError("two threads run one model with a bias at the same time; give each a copy, or take turns")
    layer = cast(int, getattr(module, "layer_idx", 0) or 0)
    new, num_keys, device = query.shape[2], key.shape[2], query.device
    where = new_slots(slot.cache, layer, new, num_keys, device)
    positions = slot.positions
    if positions is None or positions.shape[1] != new:
        positions = (torch.arange(new, device=device) + first_position(slot.cache, layer, new))[None]
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
