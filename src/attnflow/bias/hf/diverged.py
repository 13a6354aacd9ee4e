"""Where a training run first met a number that is none: in a parameter, a gradient, or in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnflow._core.errors import AttnflowError
from attnflow.bias.packing import IGNORED


class Diverged(AttnflowError):
    """A loss, a gradient or a weight of a training run is NaN or infinite.

    Attributes:
        step: the optimiser step, from 1; 0 before the first.
        layer: path of the module where it came up first; "" if it was not traced.
    """

    def __init__(self, message: str, step: int, layer: str) -> None:
        super().__init__(message)
        self.step = step
        self.layer = layer


def origin(model: nn.Module, labels: object, run: Callable[[], object] | None) -> tuple[str, str]:
    """Where the NaN or infinity of a training step came from: in words, and as the path of a module ("": unknown).

    Looked for in the weights, then in a second forward pass of the same batch, then in the gradients.

    Args:
        model: after the backward pass.
        labels: of the batch.
        run: that forward pass; None where there can be none.
    """
    weights = nonfinite(model.named_parameters())
    if weights:
        return f"because {weights[0]} holds NaN or infinity", weights[0].rpartition(".")[0]
    if isinstance(labels, Tensor) and bool((labels[..., 1:] == IGNORED).all()):
        return "because no token of the batch has a label", ""
    trace = _Trace()
    if run is not None:
        trace.watch(model, run)
    if trace.first is not None:
        return f"first seen in the {trace.where} of {trace.first}", trace.first
    gradients = nonfinite((name, parameter.grad) for name, parameter in model.named_parameters())
    if gradients:
        name = trace.last(gradients)
        more = "" if len(gradients) == 1 else f", and through it in {len(gradients) - 1} more"
        return f"first seen in the gradient of {name}{more}", name.rpartition(".")[0]
    return "but not if the same batch is run again", ""


class _Trace:
    """One forward pass of a model, watched.

    Attributes:
        order: path of each module that ran -> its place in the order in which they ended.
        first: path of the module where NaN or infinity came up first; None if none did.
        where: "output" of that module, or "input": then it came up since the module before.
    """

    def __init__(self) -> None:
        self.order: dict[str, int] = {}
        self.first: str | None = None
        self.where = ""

    def watch(self, model: nn.Module, run: Callable[[], object]) -> None:
        hooks = [hook for name, module in model.named_modules() for hook in self._watch(name, module)]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._look(name, "input", (args, kwargs))

        def after(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
            self.order[name] = len(self.order)
            self._look(name, "output", output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _look(self, name: str, where: str, value: object) -> None:
        if self.first is None and any(map(_bad, _tensors(value))):
            self.first, self.where = name, where

    def last(self, parameters: Sequence[str]) -> str:
        """The parameter that is used last, which is where the gradients of the others came through."""

        def place(parameter: str) -> tuple[int, str]:
            path = parameter
            while path and path not in self.order:  # of a module that is not called: the one that it is in
                path = path.rpartition(".")[0]
            return self.order.get(path, -1), parameter

        return max(parameters, key=place)


def nonfinite(tensors: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """The names of those with NaN or infinity in them; of a sharded one, in the part that this process has."""
    names: list[str] = []
    for name, tensor in tensors:
        if tensor is None or tensor.is_meta:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            names.append(name)
    return names


def _bad(tensor: Tensor) -> bool:
    """Minus infinity is what masks are made of."""
    return tensor.is_floating_point() and bool((tensor.isnan() | (tensor == torch.inf)).any())


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in cast("Mapping[object, object]", value).values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in cast("Sequence[object]", value):
            yield from _tensors(each)
