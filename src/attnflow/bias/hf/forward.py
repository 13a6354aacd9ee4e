"""One attention call of a layer that has a bias: its terms, which pairs exist, and what computes it."""

from __future__ import annotations

from typing import Any, Final, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.bias.attention import bias_of, choose, compute_by, labelled
from attnflow.bias.call import Allow, BiasedCall, make_call
from attnflow.bias.config import Vectors
from attnflow.bias.hf.cache import extend, new_slots
from attnflow.bias.hf.layers import CHILD, Hooks
from attnflow.bias.kind import LayerBias
from attnflow.bias.terms import Dense, Term
from attnflow.models.loading.addons import check_loaded, split_heads
from attnflow.models.passes.interception import AttentionCall, Output, Proceed

# What else transformers adds to scores, [batch or 1, heads, queries, keys]: T5's buckets. The rest is refused.
_ADDED: Final = "position_bias"
_REFUSED: Final = ("alibi", "relative_position_bias", "head_mask")

_causal: Final[WeakValueDictionary[tuple[int, int, str], Allow]] = WeakValueDictionary()


def biased(call: AttentionCall, proceed: Proceed) -> Output:
    """The interceptor of a module with a bias; a bias of zero gives the base model's output, and its own gradients."""
    bias = getattr(call.module, CHILD, None)
    if not isinstance(bias, LayerBias) or not (bias.enabled or bias.observer is not None):
        return proceed(call)
    check_loaded(bias, "bias", call.query)
    if call.query.shape[1] != bias.shape.num_heads:
        raise split_heads("bias")
    terms: tuple[Term, ...] = ()
    if bias.enabled:  # else it is only observed
        terms = _terms(call, bias, bias.hooks)
        bias.hooks.shown.clear()
    zero = not bias.enabled or bias.is_zero()
    learns = bias.enabled and torch.is_grad_enabled() and any(p.requires_grad for p in bias.parameters())
    if zero and not learns and bias.observer is None:
        return proceed(call)
    if not zero and bias.observer is None and bias.backend == "auto" and (row := _row(call, terms)) is not None:
        _note(bias, "sdpa")
        return proceed(call.replace(mask=row))
    biased_call = _call(call, terms)
    if bias.observer is not None:
        bias.observer(biased_call)
    if zero and not learns:
        return proceed(call)
    # Eager attention also returns weights, which only the reference holds.
    need_weights = call.implementation == "eager" and bias.backend in ("auto", "reference")
    with torch.autocast(call.query.device.type, enabled=False):  # scores are summed in float32 whatever surrounds them
        name = choose(biased_call, bias.backend, need_weights)
        _note(bias, labelled(biased_call, name))
        output, weights = compute_by(name, biased_call, need_weights)
    output = output.transpose(1, 2).contiguous()
    weights = weights.to(call.query.dtype) if need_weights and weights is not None else None
    if zero and not biased_call.dropout:
        plain, plain_weights = proceed(call)  # with gradients enabled: without, SDPA may choose another kernel
        output = cast(Tensor, _SameAs.apply(output, plain.detach()))
        weights = None if weights is None or plain_weights is None else plain_weights.detach()
    return output, weights


def _note(bias: LayerBias, ran: str) -> None:
    if not torch.compiler.is_compiling():
        bias.ran = ran


def _added(call: AttentionCall) -> Tensor | None:
    """What the bias adds to the scores of a call that has not been computed yet; None without one in force."""
    bias = getattr(call.module, CHILD, None)
    if not isinstance(bias, LayerBias) or not bias.enabled:
        return None
    terms = _terms(call, bias, bias.hooks)
    return bias_of(terms, call.query.shape[1], slice(0, call.query.shape[2]), slice(0, call.key.shape[2]))


biased.added = _added  # pyright: ignore[reportFunctionMemberAccess]  # whoever explains a score asks for it


class _SameAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, differentiable: Tensor, exact: Tensor) -> Tensor:
        return exact.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _terms(call: AttentionCall, bias: LayerBias, hooks: Hooks) -> tuple[Term, ...]:
    """The terms of this call; without position ids, positions count the tokens after the leading pads."""
    query, key, shown, layer = call.query, call.key, hooks.shown, hooks.shown.layer
    new, num_keys, device = query.shape[2], key.shape[2], query.device
    where = new_slots(shown.cache, layer, new, num_keys, device)
    positions = shown.positions
    if positions is None or positions.shape[1] != new:
        before = 0 if shown.cache is None else cast(Any, shown.cache.layers[layer]).get_seq_length() - new
        positions = _positions(call, before)
    positions = positions.expand(query.shape[0], -1)
    rotated, batch = "rotated" in bias.references, query.shape[0]
    queries = Vectors(hooks.vectors("query", batch), _flat(query) if rotated else None, shown.hidden, positions)
    keys = Vectors(
        hooks.vectors("key", batch, where), _flat(key[:, :, where]) if rotated else None, shown.hidden, positions
    )
    columns = extend(shown.cache, layer, hooks.depth, bias.columns(keys), num_keys)
    return bias.terms(queries, columns, where)


def _positions(call: AttentionCall, before: int | Tensor) -> Tensor:
    """Positions of the new tokens after those before them and the leading pads, [batch or 1, new], once a request."""
    new, device, request = call.query.shape[2], call.query.device, call.request
    kept = {} if request is None or torch.compiler.is_compiling() or isinstance(before, Tensor) else request.derived
    key = "positions", before, new, device
    if key not in kept:
        positions = (torch.arange(new, device=device) + before)[None]
        left = None if request is None else request.pads()[1]
        kept[key] = positions if left is None else (positions - left.to(device)[:, None]).clamp(min=0)
    return kept[key]


def _row(call: AttentionCall, terms: tuple[Term, ...]) -> Tensor | None:
    """B of one new query, [batch or 1, heads or 1, 1, keys], for SDPA to add as its mask; None where that is not all.

    SDPA gives 0 where nothing is allowed. In 16 bits the row's maximum is taken off, which softmax cannot see: what
    remains is rounded where it weighs little.
    """
    query, mask, kwargs = call.query, call.mask, call.kwargs
    plain = call.implementation == "sdpa" and call.empty is None and not call.narrowed
    others = any(kwargs.get(name) is not None for name in (*_REFUSED, _ADDED, "softcap", "s_aux", "sinks"))
    made = mask is None or (call.request is not None and isinstance(mask, Tensor) and mask.dtype == torch.bool)
    if query.shape[2] != 1 or torch.is_grad_enabled() or not plain or others or not made:
        return None
    keys, dtype = call.key.shape[2], _autocast(query[:, :, :, :0]).dtype
    row = cast(Tensor, bias_of(terms, query.shape[1], slice(0, 1), slice(0, keys)))
    if isinstance(mask, Tensor):
        row = row + _hidden(call, mask[..., :keys], row.dtype)
    if dtype.itemsize < row.dtype.itemsize:
        row = row - row.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(row.dtype).min)
    return row.to(dtype)


def _hidden(call: AttentionCall, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a boolean mask lets a pair pass, -inf elsewhere; layers of one kind share it, as they do the mask."""
    derived = {} if call.request is None or torch.compiler.is_compiling() else call.request.derived
    key = "hidden", id(call.mask), dtype
    if key not in derived:
        derived[key] = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return derived[key]


def _flat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _call(call: AttentionCall, terms: tuple[Term, ...]) -> BiasedCall:
    kwargs = call.kwargs
    lost = [name for name in _REFUSED if kwargs.get(name) is not None]
    if lost:
        raise ValueError(f"{type(call.module).__name__} adds {' and '.join(lost)} to its scores, unsupported by a bias")
    sinks = kwargs.get("s_aux", kwargs.get("sinks"))
    if sinks is not None and sinks.ndim != 1:
        raise UnsupportedArchitecture(
            f"{type(call.module).__name__} has a sink for each query, {list(sinks.shape)}, but a bias supports one for "
            "each head: leave its layers out of layers=[...]"
        )
    allow, additive = _relation_of(call)
    added = kwargs.get(_ADDED)
    own = [term for term in (additive, None if added is None else Dense(added)) if term is not None]
    query, key, value = map(_autocast, (call.query, call.key, call.value))
    scale, softcap, dropout = kwargs.get("scaling"), kwargs.get("softcap"), float(kwargs.get("dropout") or 0.0)
    return make_call(query, key, value, (*terms, *own), allow, scale, softcap, sinks, dropout)


def _autocast(tensor: Tensor) -> Tensor:
    """What autocast would hand to attention: rotary embedding leaves queries and keys in float32 there."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _relation_of(call: AttentionCall) -> tuple[Allow, Dense | None]:
    """(the pairs that attention may use, an additive mask's finite part if it has one), shared by layers."""
    if call.mask is None:  # then transformers' sdpa goes by the flag `is_causal`, and the others see everything
        queries, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
        causal = call.kwargs.get("is_causal")
        causal = getattr(call.module, "is_causal", True) if causal is None else causal
        if not causal or queries == 1 or call.implementation != "sdpa":
            return Allow(None, queries, keys), None

        def rows(block: slice) -> Tensor:
            last = torch.arange(block.start, block.stop, device=device)[:, None]
            return (torch.arange(keys, device=device) <= last)[None, None]

        if torch.compiler.is_compiling():
            return Allow(rows, queries, keys, causal=True), None
        relation = Allow(rows, queries, keys, causal=True)
        return _causal.setdefault((queries, keys, str(device)), relation), None
    # Of the caller's making, who may change it in place; or of a compiler, which makes each once
    if call.request is None or call.narrowed or torch.compiler.is_compiling():
        return _masked(call)
    # Layers of one kind get one mask, which lives as long as the request.
    key = "relation", id(call.mask), str(call.query.device)
    if key not in call.request.derived:
        call.request.derived[key] = _masked(call)
    return call.request.derived[key]


def _masked(call: AttentionCall) -> tuple[Allow, Dense | None]:
    """`_relation_of` a mask; of a block mask rows are made when they are asked for, with no table of all pairs."""
    if isinstance(call.mask, BlockMask):
        (batch, heads, *_), mask_mod = call.mask.shape, call.mask.mask_mod
        keys, device = call.key.shape[2], call.query.device
        element = torch.arange(batch, device=device)[:, None, None, None]
        head = torch.arange(heads, device=device)[None, :, None, None]
        key = torch.arange(keys, device=device)[None, None, None]

        def rows(block: slice) -> Tensor:
            query = torch.arange(block.start, block.stop, device=device)[None, None, :, None]
            return mask_mod(element, head, query, key).expand(batch, heads, block.stop - block.start, keys)

        return Allow(rows, call.query.shape[2], keys), None
    assert call.mask is not None
    # Detached, since the mask holds its request: a cycle would keep tables of all pairs until they are collected.
    mask = call.mask.detach()[:, :, :, : call.key.shape[2]] if call.request else call.mask[..., : call.key.shape[2]]
    if mask.shape[-2] == 1:  # padding that a model says once for all queries
        mask = mask.expand(*mask.shape[:-2], call.query.shape[2], -1)
    added = None
    if mask.dtype != torch.bool:  # the smallest number of its type where nothing passes
        allowed = mask > torch.finfo(mask.dtype).min / 2
        added = None if call.request is not None else Dense(mask.masked_fill(~allowed, 0.0))
        mask = allowed
    if call.empty is not None:
        mask = mask & ~call.empty[..., None]
    return Allow.from_dense(mask), added
