"""One attention call for several values: attention is linear in its values, whatever its mask, biases and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

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
    """The output of a call, and its weights [heads, queries, keys]: what it gives for the rows of an identity."""
    value, (heads, keys) = call.value, call.value.shape[1:3]
    identity = torch.eye(keys, dtype=value.dtype, device=value.device).expand(1, heads, keys, keys)
    output, table = beside(call, proceed, [identity])
    weights = table.detach()[0].transpose(0, 1)
    wanted = output.detach()[0].transpose(0, 1)
    values = value.detach()[0].repeat_interleave(len(weights) // heads, 0)
    if not bool((weights @ values - wanted).abs().amax() <= _CLOSE * wanted.abs().amax()):
        raise UnsupportedArchitecture(
            f"{type(call.module).__name__} is not linear in its values, so that its weights are not known"
        )
    return output, weights
