"""Values whose derivative is chosen at each backward pass: that of the model, or one that is held.

A `Switch` says which. The values themselves are always the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_CURVED: Final = frozenset[Any](
    [
        *(functional.gelu, functional.relu, functional.silu, functional.tanh, functional.sigmoid, functional.softplus),
        *(torch.tanh, torch.relu, torch.sigmoid, Tensor.tanh, Tensor.relu, Tensor.sigmoid, functional.elu),
    ]
)  # activations of heads


class Constant(NamedTuple):
    """A bias in the pass, and the layer that it belongs to, by path; "" outside of layers."""

    value: Tensor
    edge: GradientEdge  # the flag of a parameter is the user's again after the pass
    place: str


@dataclass(eq=False)
class Switch:
    held: bool = True


class Either(torch.autograd.Function):
    """The real value; its derivative goes to `held` or to `real`, as the switch says."""

    @staticmethod
    def forward(ctx: FunctionCtx, switch: Switch, real: Tensor, held: Tensor) -> Tensor:
        cast(Any, ctx).switch = switch
        return real.clone()  # models write into what modules return

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        return (None, None, grads[0]) if ctx.switch.held else (None, grads[0], None)


class Stop(torch.autograd.Function):
    """The value itself; no held derivative passes."""

    @staticmethod
    def forward(ctx: FunctionCtx, switch: Switch, real: Tensor) -> Tensor:
        cast(Any, ctx).switch = switch
        return real.clone()  # models write into what modules return

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        return None, None if ctx.switch.held else grads[0]


class Routed(torch.autograd.Function):
    """The values of an attention; the held derivative goes past the cut around it, to what entered the module."""

    @staticmethod
    def forward(ctx: FunctionCtx, switch: Switch, value: Tensor, route: Route, *entered: Tensor) -> Tensor:
        cast(Any, ctx).switch, cast(Any, ctx).route = switch, route
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.switch.held:
            return None, grads[0], None, *[None] * len(ctx.route.cut)
        return None, None, None, *ctx.route.pulled(grads[0])


@dataclass(eq=False)
class Route:
    """How the values of one attention depend on what entered its module, and on the biases on that way."""

    value: Tensor
    cut: Sequence[Tensor]  # what entered, behind the cut
    biases: Sequence[Constant]
    place: str
    constant: float = 0.0  # what the biases carried in the last backward pass

    def pulled(self, grad: Tensor) -> list[Tensor | None]:
        leaves = [*self.cut, *(bias.edge for bias in self.biases)]
        grads = cast(Any, torch.autograd.grad)(self.value, leaves, grad, retain_graph=True, allow_unused=True)
        grads = cast("Sequence[Tensor | None]", grads)
        self.constant += sum(carried(self.biases, grads[len(self.cut) :]))
        return list(grads[: len(self.cut)])


def carried(constants: Sequence[Constant], grads: Sequence[Tensor | None]) -> list[float]:
    pairs = zip(constants, grads, strict=True)
    return [0.0 if grad is None else float((constant.value * grad).sum()) for constant, grad in pairs]


class Secants(TorchFunctionMode):
    """Holds the activations outside of layers: those of a head, and a softcap of the logits."""

    def __init__(self, secant: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self._secant = secant

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        real = func(*args, **(kwargs or {}))
        if func in _CURVED and isinstance(x := args[0], Tensor) and x.requires_grad:
            secant = self._secant(x, real)
            return real if secant is None else secant
        return real
