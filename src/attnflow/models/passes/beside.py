"""One attention call for several values: attention is linear in its values, whatever its mask, biases and sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.passes.interception import AttentionCall, Interceptor, Output, Proceed, in_force

_CLOSE: Final = 1e-4  # of the largest output, for what the weights must give


def beside(call: AttentionCall, proceed: Proceed, more: Sequence[Tensor]) -> list[Tensor]:
    """Compute a call, and what it gives for `more` values [1, heads, keys, any], as [1, queries, heads, width] each.

    It is one call, since a biased one cannot be made twice. What pools values in between sees those of the call alone.
    """
    widths = [call.value.shape[-1], *(value.shape[-1] for value in more)]

    def apart(interceptor: Interceptor) -> Interceptor:
        def attend(wide: AttentionCall, following: Proceed) -> Output:
            rest = wide.value[..., widths[0] :]

            def again(narrow: AttentionCall, _: Proceed) -> Output:
                return following(narrow.replace(value=torch.cat([narrow.value, rest], -1)))

            return interceptor(wide.replace(value=wide.value[..., : widths[0]]), Proceed((again,), following.kernels))

        return attend

    pools = in_force(call.module, "pool")
    chain = tuple(apart(member) if member in pools else member for member in proceed.following)
    output = replace(proceed, following=chain)(call.replace(value=torch.cat([call.value, *more], -1)))[0]
    if output.ndim == 3:  # some kernels join the heads
        output = output.unflatten(-1, (call.query.shape[1], -1))
    if len(output) != 1:
        kind = type(call.module).__name__
        raise UnsupportedArchitecture(f"{kind} attends in {len(output)} sequences at once: expected one")
    return list(output.split(widths, -1))


def weighed(call: AttentionCall, proceed: Proceed) -> tuple[Tensor, Tensor]:
    """The output of a call, and its weights [heads, queries, keys]: those of its softmax, where they give the output.

    Elsewhere (sinks, biases, kernels of a model's own) they are what the call gives for the rows of an identity.
    """
    if not in_force(call.module, "pool", "bias"):
        with _Softmax() as seen:
            output, *tables = *beside(call, proceed, []), *seen.weights
        if len(tables) == 1 and _gives(tables[0][0], call, output):
            return output, tables[0][0]
    value, (heads, keys) = call.value, call.value.shape[1:3]
    identity = torch.eye(keys, dtype=value.dtype, device=value.device).expand(1, heads, keys, keys)
    output, table = beside(call, proceed, [identity])
    weights = table.detach()[0].transpose(0, 1)
    if not _gives(weights, call, output):
        raise UnsupportedArchitecture(
            f"{type(call.module).__name__} is not linear in its values, so that its weights are not known"
        )
    return output, weights


def _gives(weights: Tensor, call: AttentionCall, output: Tensor) -> bool:
    wanted, value = output.detach()[0].transpose(0, 1), call.value.detach()[0]
    given = weights @ value.repeat_interleave(len(weights) // len(value), 0)
    return bool((given - wanted).abs().amax() <= _CLOSE * wanted.abs().amax())


class _Softmax(TorchFunctionMode):
    """Computes the weights of each fused attention inside, [batch, heads, queries, keys], and keeps nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.weights.append(_softmax(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _softmax(
    query: Tensor, key: Tensor, _: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scaled @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    if is_causal:
        attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores.masked_fill_(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores += attn_mask
    return scores.softmax(-1)
