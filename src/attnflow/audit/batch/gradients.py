"""What the gradient of a cross-entropy by its logits, or by the hidden states before them, says that it trains.

That gradient is weight x (softmax - target), whatever code computes it. Label smoothing subtracts a constant, a penalty
on the log of the partition function adds to the multiple of softmax, and a temperature shows in the slope of the
gradient's logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

NOTHING, UNKNOWN = -1, -2  # in place of a token: the position is not trained; its gradient is none of one token
_NUMBERS: Final = 1 << 24  # that are worked on at once
_ZERO: Final = dict.fromkeys(("weight", "smoothing", "penalty", "value"), 0.0)
_UNTRAINED: Final = {"token": NOTHING, "certain": NOTHING, "temperature": 1.0, **_ZERO}  # in columns of `Targets`


@dataclass(frozen=True, eq=False)
class Targets:
    """What a loss trains, for each row of the logits; all tensors are [batch, positions] on the CPU."""

    token: Tensor  # int64: the token that the position is trained on, NOTHING or UNKNOWN
    weight: Tensor  # float64: its weight in the loss, negative where the loss drives the position away from the token
    smoothing: Tensor  # float64: share of the target that is spread over all tokens
    penalty: Tensor  # float64: c where the loss adds c x log(partition function)^2
    temperature: Tensor  # float64: logits are divided by it
    value: Tensor  # float64: what the position adds to the loss, if the loss is a weighted sum
    certain: Tensor  # int64: the token that has all the probability, which would hide it as a target; else NOTHING
    precision: float  # to which weights are known
    loss: float = torch.nan
    rest: float = torch.nan  # of the loss, beyond what the positions add up to; NaN if some of them are unknown
    shift: int | None = 0  # position i is trained on label i + shift of its batch; None if no shift fits
    calls: int = 1  # of the model, that have a part in the loss; only one was read
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])  # numbers that the model returned
    inputs: tuple[Tensor, ...] = ()  # integers that it was called with
    model: nn.Module | None = None  # the outermost module that was called
    owner: Tensor | None = None  # int64: the rank that has the position, -1 for none; None on one process

    @property
    def trained(self) -> Tensor:
        return self.token != NOTHING

    def changed(self, change: Callable[[Tensor, int | float], Tensor]) -> Targets:
        """All columns by `change`, which gets each with what fills it where nothing is trained."""
        columns = {name: change(getattr(self, name), empty) for name, empty in _UNTRAINED.items()}
        return replace(self, **cast(Any, columns))

    def joined(self, other: Targets) -> Targets:
        here = self.trained | (self.certain != NOTHING)
        columns = {name: getattr(self, name).where(here, getattr(other, name)) for name in _UNTRAINED}
        return replace(self, **cast(Any, columns), precision=max(self.precision, other.precision))


def of_logits(logits: Tensor, gradient: Tensor) -> Targets:
    eps = max(torch.finfo(gradient.dtype).eps, torch.finfo(logits.dtype).eps)
    return _rowwise(logits, gradient, eps, lambda z, g: _fit(z, g, eps))


def of_states(states: Tensor, gradient: Tensor, head: Tensor) -> Targets:
    """The same by the hidden states, which the head [vocabulary, width] makes logits of."""
    eps = max(torch.finfo(gradient.dtype).eps, torch.finfo(states.dtype).eps)
    table = head.detach().double()

    def fit(h: Tensor, g: Tensor) -> dict[str, Tensor]:
        """The target is the column of the head that the gradient w (softmax @ head - head[target]) points away from."""
        logits = h @ table.T
        mean = logits.softmax(-1) @ table
        along = (g * mean).sum(-1, keepdim=True) - g @ table.T
        size = mean.square().sum(-1, keepdim=True) - 2 * mean @ table.T + table.square().sum(-1)
        token = (along.square() / size.clamp(min=1e-300)).argmax(-1)
        weight, alike = along.gather(1, token[:, None])[:, 0], size.gather(1, token[:, None])[:, 0]
        cosine = weight.square() / (alike * g.square().sum(-1)).clamp(min=1e-300)
        weight = weight / alike.clamp(min=1e-300)
        nll = logits.logsumexp(-1) - logits.gather(1, token[:, None])[:, 0]
        token = torch.where(1 - cosine < max(1e-3, 8 * eps), token, UNKNOWN)
        return {"token": token, "weight": weight, "value": weight * nll}

    return _rowwise(states, gradient, eps, fit, table)


def _rowwise(
    logits: Tensor,
    gradient: Tensor,
    eps: float,
    fit: Callable[[Tensor, Tensor], dict[str, Tensor]],
    head: Tensor | None = None,
) -> Targets:
    shape, width = logits.shape[:-1], logits.shape[-1]
    z, g = logits.detach().reshape(-1, width), gradient.detach().reshape(-1, width)
    trained, most = (g != 0).any(-1), max(1, _NUMBERS // (width if head is None else len(head)))
    columns = {
        name: torch.full((len(z),), empty, dtype=torch.int64 if isinstance(empty, int) else torch.float64)
        for name, empty in _UNTRAINED.items()
    }
    for rows in trained.nonzero()[:, 0].split(most):
        for name, values in fit(z[rows].double(), g[rows].double()).items():
            columns[name][rows.cpu()] = values.cpu()
    for rows in (~trained).nonzero()[:, 0].split(most):
        numbers = z[rows].double() if head is None else z[rows].double() @ head.T
        share, token = numbers.softmax(-1).max(-1)
        columns["certain"][rows.cpu()] = token.where(share > 1 - 16 * eps, NOTHING).cpu()
    parts = {name: values.reshape(shape) for name, values in columns.items()}
    return Targets(**cast(Any, parts), precision=max(1e-3, 4 * eps))


def _fit(z: Tensor, g: Tensor, eps: float) -> dict[str, Tensor]:
    """Fit gradients g = a softmax(z / T) - b [target] - s, float64 [rows, vocabulary], by least squares."""
    limit = max(1e-3, 16 * eps)
    slope = torch.ones(len(z), 1, dtype=z.dtype, device=z.device)
    share, top = z.softmax(-1).max(-1)
    others = g.scatter(1, top[:, None], torch.nan)  # beside a token that has all the probability
    least, most = others.nan_to_num(torch.inf).amin(-1), others.nan_to_num(-torch.inf).amax(-1)
    sure = (share > 1 - 16 * eps) & (-least <= 0.5 * g.gather(1, top[:, None])[:, 0].abs().clamp(min=1e-300))
    parts = _linear(z, g, top.where(sure, g.argmin(-1)))
    even = sure & (most - least <= 0.5 * torch.maximum(most.abs(), least.abs()))  # smoothing alone is left of it
    parts["residual"] = torch.where(even, torch.inf, parts["residual"])
    spread = parts["s"] * z.shape[-1]  # a target is not spread negatively; a temperature looks like that
    parts["residual"] = torch.where(spread < -limit * (parts["b"] + spread).abs(), torch.inf, parts["residual"])
    first = parts["worst"]
    for other in ("penalty", "negative", "temperature"):  # what hides the target from the least entry
        if not (parts["residual"] > limit).any():
            break
        turned = _slope(z, g) if other == "temperature" else torch.ones_like(slope)
        token = first if other == "penalty" else g.argmax(-1) if other == "negative" else g.argmin(-1)
        again = _linear(z * turned, g, token)
        better = (again["residual"] < parts["residual"]) & (parts["residual"] > limit) & ~sure
        parts = {name: torch.where(better, again[name], values) for name, values in parts.items()}
        slope = torch.where(better[:, None], turned, slope)
    token, inverse = parts["token"], slope[:, 0]
    p = (z * slope).log_softmax(-1)
    nll, mean, log_sum = -p.gather(1, token[:, None])[:, 0], -p.mean(-1), (z * slope).logsumexp(-1)
    a, b, s = (parts[name] / inverse for name in ("a", "b", "s"))
    weight = b + s * z.shape[-1]
    floor = max(1e-3, 8 * eps)  # what is smaller than this share is not told from rounding
    smoothing = torch.where((s * z.shape[-1]).abs() > floor * weight.abs(), s * z.shape[-1] / weight, 0.0)
    excess = torch.where((a - weight).abs() > floor * weight.abs(), a - weight, 0.0)
    penalty = torch.where(log_sum.abs() > 1e-6, excess / (2 * log_sum), 0.0)
    smooth = weight * ((1 - smoothing) * nll + smoothing * mean)
    return {
        "token": torch.where((parts["residual"] <= limit) & ~even & (b.abs() > 0.02 * weight.abs()), token, UNKNOWN),
        "weight": weight,
        "smoothing": smoothing,
        "penalty": penalty,
        "temperature": 1 / inverse,
        "value": smooth + penalty * log_sum.square(),
    }


def _linear(z: Tensor, g: Tensor, token: Tensor) -> dict[str, Tensor]:
    """a and s of g = a softmax(z) - s away from the target, with errors relative to each number; then b at it."""
    p = z.softmax(-1)
    rest = torch.ones_like(p).scatter(1, token[:, None], 0.0)
    largest = g.abs().amax(-1, keepdim=True)
    weights = rest
    a = s = torch.zeros(len(p), 1, dtype=p.dtype, device=p.device)
    for _ in range(2):
        total = weights.sum(-1, keepdim=True).clamp(min=1e-300)
        mean_p, mean_g = ((weights * x).sum(-1, keepdim=True) / total for x in (p, g))
        spread = (weights * (p - mean_p).square()).sum(-1, keepdim=True) / total
        flat = spread <= 1e-8 * mean_p.square()  # softmax is even: the constant cannot be told from it
        joint = (weights * (p - mean_p) * (g - mean_g)).sum(-1, keepdim=True) / total
        a = torch.where(flat, mean_g / mean_p.clamp(min=1e-300), joint / spread.clamp(min=1e-300))
        s = torch.where(flat, 0.0, a * mean_p - mean_g)
        weights = rest / (a.abs() * p + s.abs() + 1e-4 * largest / p.shape[-1]).square().clamp(min=1e-300)
    residual, worst = ((rest * (g - a * p + s)).abs() / largest).max(-1, keepdim=True)
    at = token[:, None]
    b = a * p.gather(1, at) - s - g.gather(1, at)
    parts = {"a": a, "b": b, "s": s, "residual": residual, "worst": worst, "token": at}
    return {name: values[:, 0] for name, values in parts.items()}


def _slope(z: Tensor, g: Tensor) -> Tensor:
    """1 / temperature: the slope of log |g| over z, away from the target, [rows, 1]."""
    rest = torch.ones_like(g).scatter(1, g.argmin(-1)[:, None], 0.0)
    there = rest * (g.abs() > 1e-3 * (rest * g.abs()).amax(-1, keepdim=True))
    heights = torch.where(there > 0, g.abs().clamp(min=1e-300).log(), 0.0)
    total = there.sum(-1, keepdim=True).clamp(min=1)
    mean_z, mean_h = ((there * x).sum(-1, keepdim=True) / total for x in (z, heights))
    spread = (there * (z - mean_z).square()).sum(-1, keepdim=True)
    slope = (there * (z - mean_z) * (heights - mean_h)).sum(-1, keepdim=True) / spread.clamp(min=1e-300)
    return torch.where(slope > 0, slope, 1.0)
