"""Forward passes under hooks: one full forward, or prefill and decoding with a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.inputs import Call, Inputs, Slot, accepts, embedding_table, takes_use_cache
from attnflow.audit.packing import real_positions
from attnflow.audit.survey import Survey, entering, survey
from attnflow.audit.trace import Event, Frame, Key, Tracer, Watch, layer_names
from attnflow.models.evaluation import REFUSALS, refusal, seed_all


@dataclass(frozen=True)
class Way:
    """How a call is run.

    Attributes:
        path: its name in a report.
        chunks: lengths of prefill and decoding steps; empty for one full forward.
        drafts: tokens that are fed and rejected after the prefill: the cache is cropped again.
        pads: padding put before every sequence.
        cache: makes the cache that the first step is given; None for the model's own.
    """

    path: str
    chunks: tuple[int, ...] = ()
    drafts: int = 0
    pads: int = 0
    cache: Callable[[], Any] | None = None


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
        way: how the model is run: one full forward, or steps.
        passes: forward passes so far (a cached run counts each step).
        layer_calls: layer calls of the last pass.
        skipped: {module: reason} for what could not be watched.
        layer_names: {dotted name: index} of the layers.
        dtype: of the model's parameters.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, watch: Watch, seed: int, way: Way | None = None) -> None:
        self.model = model
        self.inputs = inputs
        self.watch: Watch = watch
        self.seed = seed
        self.way = way or Way("forward")
        self.passes = 0
        self.layer_calls = 0
        self.skipped: dict[str, str] = {}
        every, ours = layer_names(model), frozenset[str]().union(*(slot.layers for slot in inputs.slots))
        self.layer_names = {name: index for name, index in every.items() if name in ours}
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def run(self, call: Call, visit: Callable[[Event], None]) -> None:
        """One pass (or one cached run); `visit` sees every event in order of execution."""
        frame = frame_of(self.inputs)
        tracer = Tracer(self.model, self.layer_names, frame, visit, self.watch)
        seed_all(self.seed)
        with moved(self.model, self.inputs, call.noise, lambda: tracer.frame.segments), tracer.attached():
            if self.way.chunks:
                self._cached(tracer, call.kwargs)
            else:
                self.model(**call.kwargs)
                self.passes += 1
        self.layer_calls = tracer.depth
        self.skipped |= tracer.skipped

    def is_end(self, key: Key) -> bool:
        """Whether a tensor belongs to a layer or to the model itself, not to a module inside a layer."""
        return not key.module or key.module in self.layer_names

    def record(self, call: Call) -> Recording:
        """One pass with all its events kept; tensors that are changed in place later are copied."""
        with torch.no_grad():
            events, raw = self.distinct(call)
            if any(tensor._version != version for tensor, version in raw.values()):
                events, _ = self.distinct(call, copy=True)
            return Recording(events)

    def distinct(self, call: Call, copy: bool = False) -> tuple[dict[Key, Event], dict[int, tuple[Tensor, int]]]:
        """The events of one pass, without inputs that an earlier event has shown already, and (tensor, version)s."""
        events: dict[Key, Event] = {}
        seen: dict[int, tuple[Tensor, int]] = {}  # holds the tensors, so that no id is used twice

        def keep(event: Event) -> None:
            earlier = seen.get(id(event.raw))
            if event.key.side == "in" and earlier is not None and earlier[1] == event.raw._version:
                return
            seen[id(event.raw)] = (event.raw, event.raw._version)
            if copy:
                values = event.values.clone()
                event = replace(event, values=values, raw=values)
            events[event.key] = event

        self.run(call, keep)
        return events, seen

    def _cached(self, tracer: Tracer, kwargs: Mapping[str, Any]) -> None:
        name = next((n for n in ("past_key_values", "cache_params") if accepts(self.model.forward, n)), None)
        if name is None or not takes_use_cache(self.model):
            raise UnsupportedArchitecture(
                f"{type(self.model).__name__}.forward takes no cache: audit it with cache=False"
            )
        *encoder, decoder = self.inputs.slots
        state: dict[str, Any] = {} if self.way.cache is None else {name: self.way.cache()}
        start = encoded = 0
        for step, length in enumerate(self.way.chunks):
            end = start + length
            tracer.begin(step, encoded)
            segments = {**{slot.length: slot.offset for slot in encoder}, length: decoder.offset + start}
            tracer.frame = replace(tracer.frame, segments=segments)
            part = sliced(self.inputs, kwargs, start, end) | state
            try:
                output = self.model(**part, use_cache=True)
            except REFUSALS as error:
                raise UnsupportedArchitecture(
                    f"{type(self.model).__name__} does not decode in steps of {list(self.way.chunks)} tokens with a "
                    f"cache ({type(error).__name__}: {refusal(error)}); audit it with cache=False"
                ) from error
            self.passes += 1
            state = {name: _entry(output, name)}
            if state[name] is None:
                raise UnsupportedArchitecture(
                    f"{type(self.model).__name__} returned no {name}: audit it with cache=False"
                )
            if encoder:
                state["encoder_outputs"] = _encoder_output(_entry(output, "encoder_last_hidden_state"))
                state |= {} if encoder[0].name is None else {encoder[0].name: None}
                if step == 0:
                    encoded = sum(n for path, n in tracer.layer_calls.items() if path in encoder[0].layers)
            start = end
            if step == 0 and self.way.drafts:
                with tracer.paused():
                    self._reject(kwargs, state, name, start)

    def _reject(self, kwargs: Mapping[str, Any], state: dict[str, Any], name: str, start: int) -> None:
        """Feed tokens that are none of the sequence's, then crop the cache, as speculative decoding does."""
        wrong = self.inputs.draw(torch.Generator().manual_seed(self.seed + 1)).values
        part = sliced(self.inputs, {**kwargs, **wrong}, start, start + self.way.drafts) | state
        if hasattr(state[name], "activate_past_recording"):  # sliding layers forget, unless they are told
            state[name].activate_past_recording()
        cache = _entry(self.model(**part, use_cache=True), name)
        self.passes += 1
        if not hasattr(cache, "crop"):
            raise UnsupportedArchitecture(f"{type(cache).__name__} cannot be cropped")
        cache.crop(-self.way.drafts)
        state[name] = cache


class FirstPass(NamedTuple):
    """What the pass of a survey shows at the layers."""

    events: Recording
    layer_calls: int
    skipped: dict[str, str]


def surveyed(model: nn.Module, inputs: Inputs, seed: int) -> tuple[Survey, FirstPass | None]:
    """A survey, and the recording of its pass, which saves another one.

    None where the layers get other positions than the inputs have, or tensors are changed in place.
    """
    every = frozenset(layer_names(model))
    whole = replace(inputs, slots=tuple(replace(slot, layers=every) for slot in inputs.slots))
    runner = Runner(model, whole, "layers", seed)
    passes: list[tuple[dict[Key, Event], dict[int, tuple[Tensor, int]]]] = []
    seen = survey(model, inputs, lambda: passes.append(runner.distinct(inputs.base)))
    ((events, raw),) = passes
    watched = frozenset[str]().union(*(slot.layers for slot in seen.inputs.slots))
    alike = watched == every and frame_of(seen.inputs) == frame_of(whole)
    if not alike or any(tensor._version != version for tensor, version in raw.values()):
        return seen, None
    return seen, FirstPass(Recording(events), runner.layer_calls, runner.skipped)


def frame_of(inputs: Inputs) -> Frame:
    """What sequence axes look like in one full forward."""
    streams = any(slot.entry is not None and slot.entry.axis > 0 for slot in inputs.slots)
    return Frame(inputs.batch, inputs.batched, {slot.length: slot.offset for slot in inputs.slots}, streams)


@contextmanager
def moved(
    model: nn.Module, inputs: Inputs, noise: Mapping[int, Tensor], segments: Callable[[], Mapping[int, int]]
) -> Generator[None]:
    """Add noise [batch, n, width] to what enters each stack, once in every step.

    Args:
        model: the model.
        inputs: its call.
        noise: by the offset of the slot; nothing happens without.
        segments: {length: joint position of the first one} of the step that runs.
    """
    entered: dict[int, int] = {}

    def pads(slot: Slot, real: Tensor, module: nn.Module, args: object, output: Any) -> Any:
        start = segments().get(output.shape[1]) if isinstance(output, Tensor) and output.ndim == 3 else None
        if start is None or len(output) != inputs.batch:
            return None
        rows = slice(start - slot.offset, start - slot.offset + output.shape[1])
        added = noise[slot.offset][:, rows].masked_fill(real[:, rows, None], 0.0)
        times = -(-output.shape[2] // added.shape[2])
        return output + added.repeat(1, 1, times)[..., : output.shape[2]].to(output)

    def hook(slot: Slot, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert slot.entry is not None
        vectors = entering(args, kwargs)
        if vectors is None:
            return None
        axis = slot.entry.axis if slot.entry.positions_first else slot.entry.axis + 1
        start = segments().get(vectors.shape[axis])
        if start is None or entered.get(slot.offset) == start:  # a layer that runs again, in the same step
            return None
        entered[slot.offset] = start
        rows = noise[slot.offset][:, start - slot.offset : start - slot.offset + vectors.shape[axis]]
        changed = vectors + slot.entry.arranged(rows, vectors.ndim).to(vectors)
        return (
            tuple(changed if value is vectors else value for value in args),
            {name: changed if value is vectors else value for name, value in kwargs.items()},
        )

    table = embedding_table(model)
    with ExitStack() as hooks:
        for slot in inputs.slots:
            if slot.offset not in noise or slot.entry is None:
                continue
            layer, real = model.get_submodule(slot.entry.layer), real_positions(inputs, slot)
            hooks.enter_context(layer.register_forward_pre_hook(partial(hook, slot), with_kwargs=True))
            if table is not None and not real.all():
                # padding keeps its token, but what embeds it may mix positions before the first layer
                hooks.enter_context(table.register_forward_hook(partial(pads, slot, real)))
        yield


def sliced(inputs: Inputs, kwargs: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """The keyword arguments of the step that feeds positions [start, end) to a model that has seen those before."""
    decoder = inputs.slots[-1]
    prefix = "decoder_" if (decoder.name or "").startswith("decoder_") else ""
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


def _encoder_output(hidden: Any) -> Any:
    if "transformers" not in sys.modules:
        return (hidden,)
    from attnflow.audit.hf.caches import encoder_output

    return encoder_output(hidden)


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def refuse_nan(inputs: Inputs, module: str, offset: int, values: Tensor) -> None:
    """Refuse NaN, which hides every change, in one output [batch or 1, positions, features] from position `offset` on.

    Padding may be NaN (a query with no key to attend to); real positions may not.

    Raises:
        ValueError: naming the module and the position.
    """
    if not values.is_floating_point() or not values.isnan().any():
        return
    bad = values.isnan().any(-1).cpu()
    for slot in inputs.slots:
        if slot.offset <= offset < slot.offset + slot.length:
            bad = bad & real_positions(inputs, slot)[:, offset - slot.offset : offset - slot.offset + bad.shape[1]]
    if bad.any():
        row, column = (int(index) for index in torch.nonzero(bad)[0])
        raise ValueError(
            f"{module or 'the model'} gives NaN at position {column + offset} (sequence {row}), which hides what "
            "moves it: repair the weights or the inputs first, or audit in a wider precision (dtype=)"
        )
