"""One row of attention: its scores as the model computed them, what was added to them, and the weights they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from attnflow.models.passes.interception import AttentionCall

_ADDED: Final = ("position_bias", "relative_position_bias", "alibi")
_CLOSE: Final = 2e-4  # of the largest value, for what attention put out


@dataclass(frozen=True, eq=False)
class ScoreRow:
    """softmax(cap(product) + added) over the allowed keys and a sink, for one head and query; float64, on the CPU."""

    allowed: Tensor  # bool[keys]
    product: Tensor  # [keys], scaling * q.k
    added: Mapping[str, Tensor]  # by name: [keys]
    softcap: float | None
    sink: Tensor | None
    scaling: float

    @property
    def weights(self) -> Tensor:
        """The weights of the keys; without the part of a sink."""
        scores = self.product if self.softcap is None else torch.tanh(self.product / self.softcap) * self.softcap
        scores = sum(self.added.values(), scores).masked_fill(~self.allowed, -torch.inf)
        everything = scores if self.sink is None else torch.cat([scores, self.sink[None]])
        return everything.softmax(0)[: len(scores)]

    def until(self, end: int) -> ScoreRow:
        """The row without the keys from `end` on, which must not be allowed."""
        added = {name: values[:end] for name, values in self.added.items()}
        return replace(self, allowed=self.allowed[:end], product=self.product[:end], added=added)

    @property
    def slope(self) -> Tensor:
        """The derivative of the score that softmax reads by the product: 1 without a softcap."""
        if self.softcap is None:
            return torch.ones_like(self.product)
        return 1 - torch.tanh(self.product / self.softcap) ** 2


def row_of(call: AttentionCall, output: Tensor, head: int, query: int, bias: Tensor | None = None) -> ScoreRow:
    module, kwargs = call.module, call.kwargs
    if kwargs.get("head_mask") is not None:
        raise UnsupportedArchitecture(f"{type(module).__name__} passes head_mask to attention, which is not read")
    group = call.query.shape[1] // call.key.shape[1]
    keys = call.key[0, head // group]
    scaling = call.query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else float(kwargs["scaling"])
    product = scaling * (keys.double().cpu() @ call.query[0, head, query].double().cpu())
    allowed, added = _mask(call, head, query)
    for name in _ADDED:
        if isinstance(kwargs.get(name), Tensor):
            own = _at(kwargs[name], head, query, len(keys))
            allowed = allowed & (own > torch.finfo(kwargs[name].dtype).min / 2)
            added["positions"] = added.get("positions", 0.0) + own.masked_fill(~allowed, 0.0)
    if bias is not None:
        added["attached bias"] = _at(bias, head, query, len(keys)).masked_fill(~allowed, 0.0)
    sinks = cast("Tensor | None", kwargs.get("s_aux", kwargs.get("sinks")))
    if sinks is not None:  # [heads], or one for each query: [batch, heads, queries, 1]
        sinks = sinks if sinks.ndim == 4 else sinks.reshape(1, *sinks.shape, *(1,) * (3 - sinks.ndim))
    sink = None if sinks is None else _at(sinks.detach(), head, query, 1)[0]
    if call.empty is not None:  # the mask lets such a query attend to all, and its output is set to zero afterwards
        allowed = allowed & ~_at(call.empty[..., None], head, query, 1).bool()
    if not bool(allowed.any()):
        raise ValueError(f"the mask lets query {query} attend to no key in head {head}: choose another query")
    row = ScoreRow(allowed, product, added, kwargs.get("softcap"), sink, scaling)
    _check(row, call, output, head, query)
    return row


def _mask(call: AttentionCall, head: int, query: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Which keys the row may attend to, and what the mask adds."""
    keys, mask = call.key.shape[2], cast("Tensor | None", call.mask)
    if mask is None:
        last = query if causal_without_mask(call) else keys
        return torch.arange(keys, device="cpu") <= last, {}
    row = _at(mask, head, query, keys)
    if mask.dtype == torch.bool:
        return row.bool(), {}
    allowed = row > torch.finfo(mask.dtype).min / 2
    finite = row.masked_fill(~allowed, 0.0)
    return allowed, {"positions": finite} if bool(finite.any()) else {}


def causal_without_mask(call: AttentionCall) -> bool:
    """Whether attention without a mask lets a query attend to nothing after it."""
    causal: Any = call.kwargs.get("is_causal")
    causal = getattr(call.module, "is_causal", True) if causal is None else causal
    return bool(causal) and call.query.shape[2] > 1 and call.implementation == "sdpa"


def _at(table: Tensor, head: int, query: int, keys: int) -> Tensor:
    """One row of a table [batch or 1, heads or 1, queries or 1, keys], in float64 on the CPU."""
    table = table.reshape(*(1,) * (4 - table.ndim), *table.shape)
    row = table[0, head if table.shape[1] > 1 else 0, query if table.shape[2] > 1 else 0, :keys]
    return row.detach().double().cpu().expand(keys)


def _check(row: ScoreRow, call: AttentionCall, output: Tensor, head: int, query: int) -> None:
    """Compare with the output: the row explains it only if nothing else was added to the scores."""
    value = call.value[0, head * call.value.shape[1] // call.query.shape[1]].double().cpu()
    if output.ndim == 3:
        output = output.unflatten(-1, (call.query.shape[1], -1))
    expected, found = row.weights @ value, output[0, query, head].double().cpu()
    if not bool(expected.isfinite().all() and found.isfinite().all()):
        raise UnsupportedArchitecture(
            f"{type(call.module).__name__} computes NaN or infinity for query {query} in head {head}: look for weights "
            "or inputs that are not finite"
        )
    if not bool((expected - found).abs().amax() <= _CLOSE * value.abs().amax()):
        raise UnsupportedArchitecture(
            f"{type(call.module).__name__} computes other weights than its scores, mask and sinks give (its output "
            f"differs by {float((expected - found).abs().amax()):.2g}), so that its scores are not known"
        )
