"""Experts that are stored together: where a model has them, what their parameters are, and which functions they are.

Nothing of a family is written down here. Two parameters with a leading dimension of experts, whose shapes fit a map
into neurons and one out of them, may be read in several ways; the one that computes what the module does is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow.models.evaluation import evaluating

_BIAS: Final = "_bias"
_JOINT: Final = "_apply_gate"  # transformers' name for a function of gate and up scores, as they lie in the module
_ACTIVATIONS: Final = ("act_fn", "act", "activation_fn")
_TOKENS: Final = 5


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One module of E experts, with parameters `first` [E, parts * n, d] and `last` [E, d, n], each or both transposed.

    An expert writes act(h W_first^T + b) W_last^T + b2, times the weight that the router gives it.
    """

    name: str  # path in a model
    first: str  # the parameter into the neurons
    last: str  # and out of them
    num_experts: int
    neurons: int  # n, of each expert
    width: int  # d
    gated: bool  # whether a neuron has two keys: gate and up
    transposed: bool  # stored as [E, in, out]
    interleaved: bool = False  # gate and up of a neuron lie side by side, not all gates before all ups
    joint: bool = False  # the module has a function of gate and up scores; else act(gate) * up
    sorted: bool = False  # called with the tokens of each expert one after another, and no weights; else as (h, i, w)

    @property
    def parts(self) -> int:
        """Keys of a neuron."""
        return 1 + self.gated

    def keys(self, module: nn.Module) -> Tensor:
        """[E, parts, n, d], a view."""
        weight = cast(Tensor, getattr(module, self.first))
        return self._by_part(weight.transpose(1, 2) if self.transposed else weight)

    def thresholds(self, module: nn.Module) -> Tensor | None:
        """[E, parts, n], a view; None without."""
        bias = cast("Tensor | None", getattr(module, self.first + _BIAS, None))
        return None if bias is None else self._by_part(bias)

    def values(self, module: nn.Module) -> Tensor:
        """[E, n, d], a view."""
        weight = cast(Tensor, getattr(module, self.last))
        return weight if self.transposed else weight.transpose(1, 2)

    def output_bias(self, module: nn.Module) -> Tensor | None:
        """[E, d], or None."""
        return cast("Tensor | None", getattr(module, self.last + _BIAS, None))

    def parameters(self, module: nn.Module) -> list[Tensor]:
        """What `entries` accounts for, and the biases of the outputs."""
        stored = (getattr(module, name + end, None) for name in (self.first, self.last) for end in ("", _BIAS))
        return [one for one in stored if isinstance(one, Tensor)]

    def stored(self, keys: Tensor, values: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`first`, `last` and the bias of `first` as the module stores them: the inverse of the views."""
        weight, bias = (self._side_by_side(one) for one in (keys, thresholds))
        return (weight.transpose(1, 2), values, bias) if self.transposed else (weight, values.transpose(1, 2), bias)

    def weigh(self, module: nn.Module, scores: Sequence[Tensor]) -> Tensor:
        """Weights [..., n] of neurons with scores [..., n] of each part, by the module's own functions."""
        if self.joint:
            return cast("Callable[[Tensor], Tensor]", getattr(module, _JOINT))(
                torch.stack(list(scores), dim=-1).flatten(-2) if self.interleaved else torch.cat(list(scores), dim=-1)
            )
        activation = cast(
            "Callable[[Tensor], Tensor]", next(getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name))
        )
        return activation(scores[0]) * scores[1] if self.gated else activation(scores[0])

    def _by_part(self, rows: Tensor) -> Tensor:
        if self.interleaved:
            return rows.unflatten(1, (self.neurons, self.parts)).transpose(1, 2)
        return rows.unflatten(1, (self.parts, self.neurons))

    def _side_by_side(self, rows: Tensor) -> Tensor:
        return (rows.transpose(1, 2) if self.interleaved else rows).flatten(1, 2)


def packed_experts(module: nn.Module, name: str = "") -> PackedExperts | None:
    """How a module of experts is read, or None: it has none, or computes something else.

    Readings that its shapes allow are compared with the module itself, on a few random tokens and experts. On the meta
    device, where nothing can be computed, the first of them is taken.
    """
    readings = list(_readings(module, name))
    if readings and any(parameter.is_meta for parameter in module.parameters()):
        return readings[0]
    return next((one for one in readings if _agrees(module, one)), None)


def by_expert(index: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, tokens, places) that a router chose, of index [tokens, places]; other numbers are skipped."""
    for expert in cast("list[int]", index.unique().tolist()):
        if 0 <= expert < num_experts:
            tokens, places = torch.where(index == expert)
            yield expert, tokens, places


def _readings(module: nn.Module, name: str) -> Iterator[PackedExperts]:
    """What shapes allow."""
    own = [(key, p) for key, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.is_floating_point()]
    if len(own) != 2 or len({len(p) for _, p in own}) > 1:
        return
    taken = len(inspect.signature(module.forward).parameters)
    if taken == 2:
        return
    (first, into), (last, out) = own
    count = len(into)
    for transposed in (False, True):
        rows, width = tuple(into.shape[1:])[:: -1 if transposed else 1]
        there, neurons = tuple(out.shape[1:])[:: -1 if transposed else 1]
        if there == width and rows in (neurons, 2 * neurons):
            gated = rows != neurons
            for joint, interleaved in product((True, False), (False, True)) if gated else ((False, False),):
                form = (gated, transposed, interleaved, joint, taken == 1)
                yield PackedExperts(name, first, last, count, neurons, width, *form)


@torch.no_grad()
def _agrees(module: nn.Module, experts: PackedExperts) -> bool:
    """Whether a reading computes what the module does, and each weight from its own neuron's scores alone."""
    example = getattr(module, experts.first)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(example)

    scores = drawn(experts.parts, _TOKENS, experts.neurons)
    other = scores.clone()
    other[..., ::2] = drawn(experts.parts, _TOKENS, len(range(0, experts.neurons, 2)))
    index = torch.stack([torch.arange(_TOKENS), torch.arange(1, _TOKENS + 1)], dim=1) % experts.num_experts
    index, routing = index.to(example.device), drawn(_TOKENS, 2).sigmoid()
    with evaluating(module):
        try:
            weights, beside = experts.weigh(module, list(scores)), experts.weigh(module, list(other))
            rolled = experts.weigh(module, list(scores.roll(1, dims=-1)))
            if weights.shape != scores.shape[1:] or not _close(rolled, weights.roll(1, dims=-1)):
                return False
            if experts.neurons > 1 and not _close(beside[:, 1::2], weights[:, 1::2]):
                return False
            if experts.sorted:
                hidden = drawn(experts.num_experts, 2, experts.width)
                ours = torch.stack([_written(module, experts, number, one) for number, one in enumerate(hidden)])
                return _close(cast(Any, module)(hidden.flatten(0, 1)), ours.flatten(0, 1))
            hidden = drawn(_TOKENS, experts.width)
            ours = torch.zeros_like(hidden)
            for number, tokens, places in by_expert(index, experts.num_experts):
                written = _written(module, experts, number, hidden[tokens])
                ours.index_add_(0, tokens, (written * routing[tokens, places, None]).to(ours.dtype))
            return _close(cast(Any, module)(hidden, index, routing), ours)
        except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError, ValueError):
            return False  # a reading of the shapes that the module's code is not of


def _written(module: nn.Module, experts: PackedExperts, number: int, hidden: Tensor) -> Tensor:
    """What one expert makes of its tokens, before the weight of the router."""
    thresholds, bias = experts.thresholds(module), experts.output_bias(module)
    scores = [
        functional.linear(hidden, key, None if thresholds is None else thresholds[number, part])
        for part, key in enumerate(experts.keys(module)[number])
    ]
    weights = experts.weigh(module, scores)
    return functional.linear(weights, experts.values(module)[number].T, None if bias is None else bias[number])


def _close(ours: object, theirs: Tensor) -> bool:
    """Equal to half of the digits, of the largest number."""
    if not isinstance(ours, Tensor) or ours.shape != theirs.shape:
        return False
    rounding = max(torch.finfo(theirs.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    return bool((ours - theirs).abs().amax() <= rounding * theirs.abs().amax())
