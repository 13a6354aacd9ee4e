"""The measured order: what really flows where, layer by layer or from inputs to outputs."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.masks.build import from_dense
from attnflow.order.audit import state
from attnflow.order.audit.inputs import Inputs, accepts
from attnflow.order.audit.perturb import row_change
from attnflow.order.audit.runner import Progress, Runner
from attnflow.order.audit.trace import Event, Frame, canonical, layer_names
from attnflow.order.audit.vjp import record_graph
from attnflow.order.flow import Flow, analyze

_SAMPLES = 2


def measured(
    model: nn.Module, inputs: Inputs, mode: str, by: Literal["layer", "output"], seed: int, progress: Progress | None
) -> Flow:
    """See `Audit.measure`."""
    if accepts(model.forward, "use_cache") and "use_cache" not in inputs.kwargs:
        kwargs = {**inputs.kwargs, "use_cache": False}
        inputs = Inputs(kwargs, inputs.slots, inputs.batch, inputs.batched, inputs.pool)
    end_to_end = (_by_gradient if mode == "vjp" else _by_change)(model, inputs, seed, progress)
    if by == "output":
        return analyze(from_dense(end_to_end, "measured"))
    names = layer_names(model)
    if not names:
        raise UnsupportedArchitecture(f"{type(model).__name__} has no list of layers: measure it with by='output'")
    replay = _Replay(model, inputs, mode, seed, progress)
    masks = replay.masks()
    if not masks:
        raise UnsupportedArchitecture(f"no layer of {type(model).__name__} was called: measure it with by='output'")
    flow = analyze([from_dense(mask, f"measured layer {index}") for index, mask in enumerate(masks)])
    outside = end_to_end & ~flow.reachability()
    if outside.any():
        target, source = outside.nonzero()[0].tolist()
        raise UnsupportedArchitecture(
            f"position {target} of {type(model).__name__} depends on {source}, which no layer passes on: something "
            "flows outside of the layers. Measure it with by='output'"
        )
    return flow


def _by_change(model: nn.Module, inputs: Inputs, seed: int, progress: Progress | None) -> Tensor:
    """[i, j]: the output at i moves when the input at j changes; two draws for each j."""
    generator = torch.Generator().manual_seed(seed)
    runner = Runner(model, inputs, "layers", seed)
    base = _outputs(runner, inputs)
    drawn = [inputs.draw(generator) for _ in range(_SAMPLES)]

    def change(column: int, sample: int, other: torch.dtype | None) -> list[tuple[int, Tensor]]:
        selected = torch.zeros(inputs.batch, inputs.size, dtype=torch.bool)
        selected[:, column] = True
        before, call = (base, inputs) if other is None else (_again(runner, inputs, other), inputs.in_precision(other))
        with state.precision(model, other):
            after = _outputs(runner, call, call.changed(selected, drawn[sample]))
        return [(offset, row_change(after[offset], values)) for offset, values in before.items()]

    return _relation(inputs, base, change, _dtype(model), progress)


def _again(runner: Runner, inputs: Inputs, other: torch.dtype) -> dict[int, Tensor]:
    with state.precision(runner.model, other):
        return _outputs(runner, inputs.in_precision(other))


def _outputs(runner: Runner, inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> dict[int, Tensor]:
    """{offset: the model's last output for that sequence}."""
    found: dict[int, Tensor] = {}

    def visit(event: Event) -> None:
        if event.key.side == "out":
            found[event.offset] = event.values

    with torch.no_grad():
        runner.run(inputs.kwargs if kwargs is None else kwargs, visit)
    if not found:
        raise UnsupportedArchitecture(f"{type(runner.model).__name__} returned nothing with a sequence axis")
    return found


def _relation(
    inputs: Inputs,
    outputs: Mapping[int, Tensor],
    change: Callable[[int, int, torch.dtype | None], list[tuple[int, Tensor]]],
    dtype: torch.dtype,
    progress: Progress | None,
    columns: range | None = None,
) -> Tensor:
    """bool [n, n] of what moves; small changes count only if they keep their size in the other precision."""
    relation = torch.eye(inputs.size, dtype=torch.bool)
    other = torch.float64 if dtype != torch.float64 else torch.float32
    scale = {offset: float(values.abs().nan_to_num(nan=0.0).max()) for offset, values in outputs.items()}
    small = math.sqrt(torch.finfo(dtype).eps)
    border = math.sqrt(torch.finfo(other).eps / torch.finfo(dtype).eps)
    for column in columns if columns is not None else range(inputs.size):
        if progress is not None:
            progress(column, inputs.size, "measure")
        for sample in range(_SAMPLES):
            moved = change(column, sample, None)
            suspicious = any(bool(((c > 0) & (c < small * scale[o])).any()) for o, c in moved)
            second = dict(change(column, sample, other)) if suspicious else {}
            for offset, c in moved:
                real = c > 0
                if offset in second:
                    kept = second[offset] >= c * border if border < 1 else second[offset] <= c * border
                    real &= kept | (c >= small * scale[offset])
                relation[offset : offset + c.shape[1], column] |= real.any(0)
    return relation


def _by_gradient(model: nn.Module, inputs: Inputs, seed: int, progress: Progress | None) -> Tensor:
    """[i, j]: the Jacobian of the output at i with respect to the embedding at j is not zero."""
    generator = torch.Generator().manual_seed(seed)
    graph = record_graph(Runner(model, inputs, "layers", seed))
    last = {event.offset: event for event in graph.events if event.key.side == "out"}
    relation = torch.eye(inputs.size, dtype=torch.bool)
    for offset, event in last.items():
        for position in range(event.values.shape[1]):
            if progress is not None:
                progress(offset + position, inputs.size, "measure")
            noise = torch.randn(event.values.shape, generator=generator, dtype=torch.float64).to(event.values)
            cotangent = torch.zeros_like(noise)
            cotangent[:, position] = noise[:, position]
            relation[offset + position] |= (graph.pull([(event, cotangent)], inputs.size) != 0).any(0)
    return relation


class _Replay:
    """Runs the model once and, at each layer call, replays that layer alone with changed inputs."""

    def __init__(self, model: nn.Module, inputs: Inputs, mode: str, seed: int, progress: Progress | None) -> None:
        self.model = model
        self.inputs = inputs
        self.mode = mode
        self.progress = progress
        self.generator = torch.Generator().manual_seed(seed)
        self.frame = Frame(inputs.batch, inputs.batched, {slot.length: slot.offset for slot in inputs.slots})
        self.found: list[Tensor] = []

    def masks(self) -> list[Tensor]:
        """What each layer call lets flow, in order of execution."""
        calls: list[tuple[nn.Module, dict[str, Any]]] = []
        names = layer_names(self.model)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((module, _named(module, args, kwargs)))

        modules = dict(self.model.named_modules())
        handles = [modules[name].register_forward_pre_hook(hook, with_kwargs=True) for name in names]
        try:
            with torch.no_grad():
                self.model(**self.inputs.kwargs)
        finally:
            for handle in handles:
                handle.remove()
        for number, call in enumerate(calls):
            if self.progress is not None:
                self.progress(number, len(calls), "measure layers")
            self.found.append(self._layer(*call))
        return self.found

    def _layer(self, module: nn.Module, kwargs: dict[str, Any]) -> Tensor:
        slots = self._slots(kwargs)
        if not slots:
            raise UnsupportedArchitecture(
                f"{type(module).__name__} takes no tensor [batch, n, width]: measure the model with by='output'"
            )
        base = self._run(module, kwargs, {}, None)
        relation = torch.eye(self.inputs.size, dtype=torch.bool)
        for name, (tensor, offset) in slots.items():
            if self.mode == "vjp":
                relation |= self._gradients(module, kwargs, name, tensor, offset)
                continue
            rows = cast(tuple[Tensor, int], canonical(tensor, self.frame))[0]
            noise = [self._noise(rows) for _ in range(_SAMPLES)]

            def change(
                column: int,
                sample: int,
                other: torch.dtype | None,
                name: str = name,
                tensor: Tensor = tensor,
                offset: int = offset,
                noise: list[Tensor] = noise,
            ) -> list[tuple[int, Tensor]]:
                moved = tensor.clone()
                view = cast(tuple[Tensor, int], canonical(moved, self.frame))[0]
                view[:, column - offset] += noise[sample][:, column - offset]
                with state.precision(self.model, other):
                    before = base if other is None else self._run(module, kwargs, {}, other)
                    after = self._run(module, kwargs, {name: moved}, other)
                return [(o, row_change(after[o], values)) for o, values in before.items()]

            columns = range(offset, offset + rows.shape[1])
            relation |= _relation(self.inputs, base, change, tensor.dtype, None, columns)
        return relation

    def _slots(self, kwargs: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
        """The layer's inputs that carry information: its first tensor and, in a decoder, the encoder's states."""
        first = next(iter(kwargs), None)
        slots: dict[str, tuple[Tensor, int]] = {}
        for name, value in kwargs.items():
            if name in {first, "hidden_states", "encoder_hidden_states"} and isinstance(value, Tensor):
                found = canonical(value, self.frame)
                if isinstance(found, tuple) and value.ndim == 2 + self.frame.batched:
                    slots[name] = (value, found[1])
        return slots

    def _noise(self, tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64)
        return (noise * (float(tensor.double().std(correction=0)) or 1.0)).to(tensor)

    def _run(
        self,
        module: nn.Module,
        kwargs: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        grad: bool = False,
    ) -> dict[int, Tensor]:
        given = {name: _isolated(changed.get(name, value), dtype) for name, value in kwargs.items()}
        bound = inspect.signature(module.forward).bind_partial()
        bound.arguments.update(given)
        with torch.set_grad_enabled(grad):
            output = module.forward(*bound.args, **bound.kwargs)
        first = cast(tuple[Any, ...], output)[0] if isinstance(output, tuple | list) else output
        found = canonical(first, self.frame) if isinstance(first, Tensor) else None
        if not isinstance(found, tuple):
            raise UnsupportedArchitecture(
                f"{type(module).__name__} returns no tensor [batch, n, width]: measure the model with by='output'"
            )
        return {found[1]: found[0]}

    def _gradients(
        self,
        module: nn.Module,
        kwargs: Mapping[str, Any],
        name: str,
        tensor: Tensor,
        offset: int,
    ) -> Tensor:
        leaf = tensor.detach().clone().requires_grad_()
        relation = torch.zeros(self.inputs.size, self.inputs.size, dtype=torch.bool)
        for start, values in self._run(module, kwargs, {name: leaf}, None, grad=True).items():
            for position in range(values.shape[1] if values.requires_grad else 0):
                cotangent = torch.zeros_like(values)
                cotangent[:, position] = self._noise(torch.ones_like(values[:, position]))
                (gradient,) = torch.autograd.grad(values, leaf, cotangent, retain_graph=True)
                rows = cast(tuple[Tensor, int], canonical(gradient, self.frame))[0]
                relation[start + position, offset : offset + rows.shape[1]] |= (rows != 0).any(-1).any(0).cpu()
        return relation


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by the names of forward's parameters, in their order."""
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def _isolated(value: Any, dtype: torch.dtype | None) -> Any:
    """A layer's argument for one replay: tensors in `dtype`, caches copied so that a replay leaves no trace."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_isolated(item, dtype) for item in cast(list[Any], value))
    return copy.deepcopy(value) if hasattr(value, "update") and not isinstance(value, dict) else value


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
