"""One layer call of a model, run alone: what its output at i takes from its own input at j."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.gradients import Graph
from attnflow.audit.inputs import Inputs
from attnflow.audit.passes import frame_of
from attnflow.audit.trace import Event, Key, canonical

_CARRIERS = ("hidden_states", "encoder_hidden_states")


class Invocation(NamedTuple):
    """A layer and the arguments it was called with, by the names of forward's parameters."""

    module: nn.Module
    kwargs: dict[str, Any]


def invocations(model: nn.Module, inputs: Inputs) -> list[Invocation]:
    """The layer calls of one forward, in order of execution."""
    calls: list[Invocation] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Invocation(module, dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)))

    with ExitStack() as hooks, torch.no_grad():
        for name in frozenset[str]().union(*(slot.layers for slot in inputs.slots)):
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
        model(**inputs.kwargs)
    return calls


class Replay:
    """A layer call with its inputs that carry information: its first tensor and, in a decoder, the encoder's states."""

    def __init__(self, inputs: Inputs, call: Invocation, generator: torch.Generator) -> None:
        self.inputs = inputs
        self.call = call
        self.generator = generator
        self.frame = frame_of(inputs)

    def parts(self) -> Iterator[Part]:
        """One subject for each of these inputs."""
        names = [name for name in self.call.kwargs if name in (next(iter(self.call.kwargs)), *_CARRIERS)]
        tensors = {name: self.call.kwargs[name] for name in names if isinstance(self.call.kwargs[name], Tensor)}
        carriers = {
            name: t for name, t in tensors.items() if t.ndim == 2 + self.frame.batched and self.rows(t) is not None
        }
        if not carriers:
            raise UnsupportedArchitecture(
                f"{type(self.call.module).__name__} takes no tensor [batch, n, width]: measure the model with "
                "by='output'"
            )
        return (Part(self, name, tensor) for name, tensor in carriers.items())

    def rows(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """(a view [batch, positions, width], joint position of its first row)."""
        view = canonical(tensor, self.frame, layered=True)
        return view if isinstance(view, tuple) else None

    def run(self, changed: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[Tensor, int]:
        """The layer's output as rows, with some arguments changed."""
        module = self.call.module
        bound = inspect.signature(module.forward).bind_partial()
        arguments = {name: _isolated(changed.get(name, value), dtype) for name, value in self.call.kwargs.items()}
        bound.arguments.update(arguments)
        output = module.forward(*bound.args, **bound.kwargs)
        first = cast(tuple[Any, ...], output)[0] if isinstance(output, tuple | list) else output
        view = self.rows(first) if isinstance(first, Tensor) else None
        if view is None:
            raise UnsupportedArchitecture(
                f"{type(module).__name__} returns no tensor [batch, n, width]: measure the model with by='output'"
            )
        return view


class Part:
    """A layer call seen from one of its inputs; a `Subject` of `measure`."""

    def __init__(self, replay: Replay, name: str, tensor: Tensor) -> None:
        self.module = replay.call.module
        self.dtype = tensor.dtype
        self._replay = replay
        self._name = name
        self._tensor = tensor.detach()
        rows, self._offset = cast(tuple[Tensor, int], replay.rows(self._tensor))
        self.columns = range(self._offset, self._offset + rows.shape[1])
        self._scale = float(rows.double().std(correction=0)) or 1.0
        self._noise: dict[int, Tensor] = {}

    def outputs(self, dtype: torch.dtype | None, column: int | None = None, sample: int = 0) -> dict[int, Tensor]:
        """See `Subject.outputs`."""
        moved = self._tensor.clone()
        if column is not None:
            rows = cast(tuple[Tensor, int], self._replay.rows(moved))[0]
            if sample not in self._noise:
                noise = torch.randn(rows.shape, generator=self._replay.generator) * self._scale
                self._noise[sample] = noise.to(moved)
            rows[:, column - self._offset] += self._noise[sample][:, column - self._offset]
        with torch.no_grad():
            values, offset = self._replay.run({self._name: moved}, dtype)
        return {offset: values}

    def graph(self) -> Graph:
        """One run with its autograd graph, from this input to the output."""
        leaf = self._tensor.clone().requires_grad_()
        rows = cast(tuple[Tensor, int], self._replay.rows(leaf))[0].detach().requires_grad_()
        with torch.enable_grad():
            whole = rows if self._replay.frame.batched else rows[0]
            if whole.shape != leaf.shape:
                whole = whole.transpose(0, 1)  # the layer wants its sequence axis first
            values, offset = self._replay.run({self._name: whole}, None)
        event = Event(Key(0, "", 0, "out", ""), "", None, 0, offset, values, values)
        return Graph([event] if values.requires_grad else [], [(self._offset, rows)])


def _isolated(value: Any, dtype: torch.dtype | None) -> Any:
    """A layer's argument for one replay: tensors in `dtype`, caches copied so that a replay leaves no trace."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_isolated(item, dtype) for item in cast(list[Any], value))
    return copy.deepcopy(value) if hasattr(value, "update") and not isinstance(value, dict) else value
