"""The oracle of the registry: the bilinear form of each head, from what a model multiplies when it attends.

The input of an attention module is replaced by the basis vectors, one a sample, and by zero in the last one; the first
product of two batched tensors inside the module is that of queries and keys. Both are taken at the first position,
rotations are switched off where they are handed in and cancel where they are not, and biases are what the zero sample
gives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SCALED = F.scaled_dot_product_attention
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, _SCALED}
_ADDED = {torch.baddbmm, Tensor.baddbmm}
_NORMS = (
    "q_norm",
    "k_norm",
    "qk_norm",
    "q_a_layernorm",
    "kv_a_layernorm",
    "q_layernorm",
    "k_layernorm",
    "query_layernorm",
    "key_layernorm",
)
_POSITIONS = ("position_embeddings", "object_queries", "spatial_position_embeddings", "attention_mask", "alibi")


def used_form(model: nn.Module, name: str, run: Callable[[int], object], width: int, skip: int = 0) -> Tensor:
    """[heads, d_query, d_key] up to one positive factor, of the module called `name`; `run(batch)` calls the model.

    `skip` products that come before that of queries and keys.
    """
    module = model.get_submodule(name)
    batch = samples(width)
    catch = _Catch(skip)

    def enter(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        catch.inside = True
        changed = {k: v if k in _POSITIONS else _basis(v, batch) for k, v in kwargs.items()}
        if isinstance(rotation := kwargs.get("position_embeddings"), tuple):
            changed["position_embeddings"] = (torch.ones_like(rotation[0]), torch.zeros_like(rotation[1]))
        return tuple(_basis(value, batch) for value in args), changed

    def leave(*_: object) -> None:
        catch.inside = False

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        with torch.no_grad(), catch:
            run(batch)
    finally:
        for handle in handles:
            handle.remove()
    assert catch.query is not None, f"{name} multiplied nothing"
    assert catch.key is not None
    query, key = _at_first_position(catch.query, batch), _at_first_position(catch.key, batch)
    return torch.einsum("ihc,jhc->hij", query[:width], key[:width])


def samples(width: int) -> int:
    """How many samples make a basis and a zero: a multiple of 4, so that the tokens of an image can be samples."""
    return -(-(width + 1) // 4) * 4


def bypass_norms(model: nn.Module) -> None:
    """Norms of queries and keys are no linear maps: the scores are of the weights, so they are taken out."""
    for module in model.modules():
        for word in _NORMS:
            if isinstance(getattr(module, word, None), nn.Module):
                setattr(module, word, nn.Identity())


class _Catch(TorchFunctionMode):
    def __init__(self, skip: int) -> None:
        super().__init__()
        self.skip = skip
        self.inside = False
        self.query: Tensor | None = None
        self.key: Tensor | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self.inside and self.query is None and (func in _PRODUCTS or func in _ADDED):
            self._take(func, args, kwargs or {})
        if self.inside and self.query is None and func is torch.einsum:
            self._take_einsum(args)
        if self.inside and func is F.multi_head_attention_forward:  # what it calls is not seen from outside
            seen = {torch: ("bmm", "baddbmm"), F: ("scaled_dot_product_attention",)}
            with ExitStack() as stack:
                for module, name in ((module, name) for module, names in seen.items() for name in names):
                    stack.enter_context(patch.object(module, name, self._seen(getattr(module, name))))
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _seen(self, func: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(*args: object, **kwargs: object) -> Tensor:
            if self.query is None:
                self._take(func, args, kwargs)
            return func(*args, **kwargs)

        return product

    def _take_einsum(self, args: tuple[object, ...]) -> None:
        equation, *operands = args
        inputs, _, out = str(equation).replace(" ", "").partition("->")
        parts = inputs.split(",")
        values = [v for value in operands for v in (value if isinstance(value, tuple | list) else [value])]
        if len(parts) != 2 or len(out) != 4 or not all(set(out[:2]) <= set(part) for part in parts):
            return  # a projection, not a product of two that have a batch and heads
        inner = (set(parts[0]) & set(parts[1])) - set(out)
        own = [(set(part) - set(other)) & set(out) for part, other in zip(parts, reversed(parts), strict=True)]
        if len(inner) != 1 or any(len(one) != 1 for one in own):
            return
        self.query, self.key = (
            value.detach().permute([part.index(letter) for letter in (*out[:2], *one, *inner)])
            for value, part, one in zip(values, parts, own, strict=True)
        )

    def _take(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        first, second = values[1:3] if func in _ADDED else values[:2]
        if min(first.ndim, second.ndim) < 3:
            return
        self.skip -= 1
        if self.skip >= 0:
            return
        self.query = first.detach()
        self.key = second.detach() if func is _SCALED else second.detach().mT


def _basis(value: object, batch: int) -> object:
    """The basis vectors in place of a tensor [batch * windows, ..., width] of activations.

    Or of one sample's [tokens, width], if it has that many tokens.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return value
    if value.ndim == 2 and value.shape[0] != batch:
        return value
    width = value.shape[-1]
    if value.ndim == 3 and value.shape[:2] == (1, batch):  # [tokens, samples, width]
        return torch.eye(batch, width, dtype=value.dtype)[None]
    if value.shape[0] % batch or width >= batch:
        return value
    rows = torch.eye(batch, width, dtype=value.dtype).repeat_interleave(value.shape[0] // batch, 0)
    return rows.view(-1, *[1] * (value.ndim - 2), width).expand(value.shape).contiguous()


def _at_first_position(value: Tensor, batch: int) -> Tensor:
    """[width, heads, head_dim] of [batch * windows, heads, tokens, head_dim] or [batch * heads, tokens, head_dim]."""
    if value.ndim == 4 and value.shape[0] == 1 and value.shape[2] == batch:  # samples are tokens
        value = value.transpose(0, 2)
    if value.ndim == 3:
        value = value.unflatten(0, (batch, -1))
    first = value[:: value.shape[0] // batch, ..., 0, :]
    return first[:-1] - first[-1]
