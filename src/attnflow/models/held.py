"""Norms held at their scale: the linear map that a norm is for a token once its statistics stay what they were.

A norm is known by what it computes, never by its name: y = gain * (x - mean(x) or x) * s + bias, with one number s for
each vector. Three probes show bias, gain and mean; the scale follows from an input and its output, and the formula
must then give that output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor, nn

_CLOSE: Final = 1e-4  # of the largest output; the caller checks its result far more strictly
_NEVER: Final = (nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList)


@dataclass(frozen=True, eq=False)
class HeldNorm:
    """gain * (x - mean(x) if `centred` else x) * scale + bias."""

    gain: Tensor
    bias: Tensor
    centred: bool
    scale: Tensor  # [..., 1], one number for each vector of the pass

    def __call__(self, x: Tensor) -> Tensor:
        return self.gain * self.reduced(x) * self.scale + self.bias

    def reduced(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def fitted(self, x: Tensor, y: Tensor) -> HeldNorm | None:
        """Fit the scale to an input and its output; None if no scale fits."""
        direction = self.gain * self.reduced(x)
        size = (direction * direction).sum(-1, keepdim=True)
        scale = ((y - self.bias) * direction).sum(-1, keepdim=True) / size.where(size > 0, 1.0)
        held = replace(self, scale=scale)
        difference = (held(x) - y).abs().amax()
        return held if bool(difference <= _CLOSE * y.abs().amax()) else None  # False of NaN, too


def may_be_norm(module: nn.Module) -> bool:
    return not isinstance(module, _NEVER) and not module._modules


@torch.no_grad()
def hold(module: nn.Module, x: Tensor, y: Tensor) -> HeldNorm | None:
    """Find the linear map that a norm was for the input x with the output y; None for a module that is no norm.

    Costs six calls of the module.
    """
    if y.shape != x.shape or not x.is_floating_point() or x.shape[-1] < 2 or y is x:
        return None
    call = cast("Callable[[Tensor], Tensor]", module.forward)
    signs = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    signs[1::2] = -1
    if x.shape[-1] % 2:
        signs[-1] = 0
    probe = signs.expand_as(x)
    bias = call(torch.zeros_like(x))
    bias = bias.where(bias.isfinite(), 0.0)
    first, second = call(probe) - bias, call(probe.roll(1, -1)) - bias
    gain = torch.where(probe != 0, first * probe, second * probe.roll(1, -1))
    ones = call(torch.ones_like(x)) - bias
    centred = bool(ones.abs().amax() <= 1e-3 * gain.abs().amax())
    large = call(1e4 * x)  # a norm forgets the length, and its epsilon does not count here
    if not bool((call(3e4 * x) - large).abs().amax() <= 1e-2 * (large - bias).abs().amax()):
        return None
    return HeldNorm(_shared(gain), _shared(bias), centred, torch.ones_like(x[..., :1])).fitted(x, y)


def _shared(values: Tensor) -> Tensor:
    for axis in range(values.ndim - 1):
        first = values.narrow(axis, 0, 1)
        values = first if torch.equal(first.expand_as(values), values) else values
    return values
