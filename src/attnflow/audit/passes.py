"""Forward passes under hooks: one full forward, or prefill and decoding with a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.inputs import Inputs, accepts
from attnflow.audit.trace import Event, Frame, Key, Tracer, Watch, layer_names
from attnflow.models.evaluation import seed_all

Path = Literal["forward", "cached"]


@dataclass(frozen=True)
class Recording:
    """The events of one pass by name, in order of execution."""

    events: dict[Key, Event]

    def at(self, key: Key, row: int, position: int) -> Tensor:
        """The vector of one position."""
        event = self.events[key]
        return event.values[row, position - event.offset]


class Runner:
    """Runs the model on variations of one call, counting passes; every pass sees the same random numbers.

    Attributes:
        chunks: lengths of prefill and decoding steps; empty for one full forward.
        passes: forward passes so far (a cached run counts each step).
        layer_calls: layer calls of the last pass.
        skipped: {module: reason} for what could not be watched.
        layer_names: {dotted name: index} of the layers.
        dtype: of the model's parameters.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, watch: Watch, seed: int, chunks: Sequence[int] = ()) -> None:
        self.model = model
        self.inputs = inputs
        self.watch: Watch = watch
        self.seed = seed
        self.chunks = tuple(chunks)
        self.passes = 0
        self.layer_calls = 0
        self.skipped: dict[str, str] = {}
        self.layer_names = layer_names(model)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    @property
    def path(self) -> Path:
        """Which way the model is run."""
        return "cached" if self.chunks else "forward"

    def run(self, kwargs: Mapping[str, Any], visit: Callable[[Event], None]) -> None:
        """One pass (or one cached run); `visit` sees every event in order of execution."""
        frame = Frame(self.inputs.batch, self.inputs.batched, {s.length: s.offset for s in self.inputs.slots})
        tracer = Tracer(self.model, self.layer_names, frame, visit, self.watch)
        seed_all(self.seed)
        with tracer.attached():
            if self.chunks:
                self._cached(tracer, kwargs)
            else:
                self.model(**kwargs)
                self.passes += 1
        self.layer_calls = tracer.depth
        self.skipped |= tracer.skipped

    def record(self, kwargs: Mapping[str, Any]) -> Recording:
        """One pass with all its events kept; tensors that are changed in place later are copied."""
        with torch.no_grad():
            events, raw = self.distinct(kwargs)
            if any(tensor._version != version for tensor, version in raw.values()):
                events, _ = self.distinct(kwargs, copy=True)
            return Recording(events)

    def distinct(
        self, kwargs: Mapping[str, Any], copy: bool = False
    ) -> tuple[dict[Key, Event], dict[int, tuple[Tensor, int]]]:
        """The events of one pass, without inputs that an earlier event has shown already, and (tensor, version)s."""
        events: dict[Key, Event] = {}
        seen: dict[int, tuple[Tensor, int]] = {}  # holds the tensors, so that no id is used twice

        def keep(event: Event) -> None:
            earlier = seen.get(id(event.raw))
            if event.key.side == "in" and earlier is not None and earlier[1] == event.raw._version:
                return
            seen[id(event.raw)] = (event.raw, event.raw._version)
            events[event.key] = copied(event) if copy else event

        self.run(kwargs, keep)
        return events, seen

    def _cached(self, tracer: Tracer, kwargs: Mapping[str, Any]) -> None:
        name = next((n for n in ("past_key_values", "cache_params") if accepts(self.model.forward, n)), None)
        if name is None or not accepts(self.model.forward, "use_cache"):
            raise UnsupportedArchitecture(
                f"{type(self.model).__name__}.forward takes no cache: audit it with cache=False"
            )
        *encoder, decoder = self.inputs.slots
        state: dict[str, Any] = {}
        start = encoded = 0
        for step, length in enumerate(self.chunks):
            end = start + length
            tracer.begin(step, encoded)
            tracer.frame = Frame(
                self.inputs.batch,
                self.inputs.batched,
                {**{slot.length: slot.offset for slot in encoder}, length: decoder.offset + start},
            )
            part = sliced(self.inputs, kwargs, start, end) | state
            output = self.model(**part, use_cache=True)
            self.passes += 1
            state = {name: _entry(output, name)}
            if state[name] is None:
                raise UnsupportedArchitecture(
                    f"{type(self.model).__name__} returned no {name}: audit it with cache=False"
                )
            if encoder:
                state |= {encoder[0].name: None, "encoder_outputs": (_entry(output, "encoder_last_hidden_state"),)}
                if step == 0:
                    encoded = sum(n for path, n in tracer.layer_calls.items() if "encoder" in path.split("."))
            start = end


def sliced(inputs: Inputs, kwargs: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """The keyword arguments of the step that feeds positions [start, end) to a model that has seen those before."""
    decoder = inputs.slots[-1]
    prefix = "decoder_" if decoder.name.startswith("decoder_") else ""
    part: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in {"labels", "use_cache"}:
            continue
        if isinstance(value, Tensor) and name.startswith(prefix):
            if name == f"{prefix}attention_mask" and value.ndim == 2:
                value = value[:, :end]
            elif name == f"{prefix}attention_mask" and value.ndim == 4:
                value = value[..., start:end, :end]
            elif name == decoder.name:
                value = value[:, start:end] if inputs.batched else value[start:end]
            elif value.ndim in (1, 2) and value.shape[-1] == decoder.length:
                value = value[..., start:end]
        part[name] = value
    return part


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def copied(event: Event) -> Event:
    """The event with values that later in-place changes do not touch."""
    values = event.values.clone()
    return Event(event.key, event.blame, event.layer, event.depth, event.offset, values, values)
