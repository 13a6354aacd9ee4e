"""Compares decoding with one full forward: steps, chunks, drafts, rejected drafts, left padding, a static cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.inputs import Inputs, fresh
from attnflow.audit.passes import Event, Recording, Runner, Tracer, Watched, put_back
from attnflow.audit.report import Violation
from attnflow.audit.rounding import other_precision, row_change, scale_of, unit
from attnflow.models.arguments import CACHES
from attnflow.models.passes.evaluation import REFUSALS, precision, refusal
from attnflow.models.passes.watching import Watch


@dataclass(frozen=True)
class DecodingPath:
    name: str  # of it in a report
    chunks: tuple[int, ...]  # lengths of prefill and decoding steps
    drafts: int = 0  # tokens that are fed and rejected after the prefill: the cache is cropped again
    pads: int = 0  # padding put before every sequence
    cache: Callable[[], Any] | None = None  # makes the cache that the first step is given; None for the model's own


def step_lengths(inputs: Inputs, cache: bool | Sequence[int]) -> tuple[int, ...]:
    n = inputs.slots[-1].length
    taken = {slot.length for slot in inputs.slots[:-1]}  # no step may be as long as the encoder's
    if cache is True:
        single = next((k for k in range(min(4, n - 1), 0, -1) if n - k not in taken), 0)
        return (n - single, *([1] * single))
    lengths = tuple(checks.integer("cache", length, 1) for length in cast(Sequence[object], cache))
    if sum(lengths) != n:
        raise ValueError(f"cache must list step lengths that add up to the {n} positions, got {list(lengths)}")
    if taken & set(lengths):
        raise ValueError(f"no step may be as long as the encoder's sequence ({max(taken)}), got {list(lengths)}")
    return lengths


def decoding_paths(inputs: Inputs, cache: bool | Sequence[int]) -> list[DecodingPath]:
    asked = DecodingPath("cached", step_lengths(inputs, cache))
    n = inputs.slots[-1].length
    if cache is not True or len(inputs.slots) > 1 or n < 6:
        return [asked]
    part, prefill = n // 3, n - n // 3
    steps = (prefill, *([1] * part))
    paths = [asked, DecodingPath("chunks", (part, part, n - 2 * part)), DecodingPath("drafts", (prefill, part))]
    if not getattr(inputs.model, "_is_stateful", False):  # else a state cannot be taken back: `generate` refuses, too
        paths.append(DecodingPath("crop", steps, drafts=part))
    if inputs.subject.accepted("attention_mask") and "attention_mask" not in inputs.kwargs:
        paths.append(DecodingPath("left padding", (prefill + 2, *([1] * part)), pads=2))
    if "transformers" in sys.modules:
        paths.append(DecodingPath("static cache", steps, cache=partial(_static_cache, inputs.model, n)))
    return paths


class SteppedRunner(Runner):
    def __init__(self, inputs: Inputs, watch: Watched, seed: int, decoding: DecodingPath) -> None:
        super().__init__(inputs, watch, seed)
        self._decoding = decoding
        self.path = decoding.name

    def feed(self, tracer: Tracer, kwargs: Mapping[str, Any]) -> None:
        name = self.inputs.subject.accepted(*CACHES)
        if name is None or not self.inputs.subject.takes_use_cache:
            raise self._uncached("takes no cache: ")
        *encoder, decoder = self.inputs.slots
        prompted = getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False)
        if prompted or not any(decoder.length in value.shape for value in kwargs.values() if isinstance(value, Tensor)):
            raise self._uncached(
                "adds positions of its own to every step, so it does not decode in steps of the inputs: "
            )
        state: dict[str, Any] = {} if self._decoding.cache is None else {name: self._decoding.cache()}
        start = encoded = 0
        encodes = cast(Any, self.model).get_encoder() if encoder and hasattr(self.model, "get_encoder") else None
        watched = {"encoder": encodes} if isinstance(encodes, nn.Module) and encodes is not self.model else {}
        encoded_as = list[Any]()  # what the encoder returned
        for step, length in enumerate(self._decoding.chunks):
            end = start + length
            tracer.begin(step, encoded)
            segments = {**{slot.length: slot.offset for slot in encoder}, length: decoder.offset + start}
            tracer.frame = replace(tracer.frame, segments=segments, whole=False)
            part = fresh(sliced(self.inputs, kwargs, start, end)) | state
            try:
                with Watch(watched, leave=lambda _, output: encoded_as.append(output)):
                    output = self.model(**part, use_cache=True)
            except REFUSALS as error:
                why = f"with a cache ({type(error).__name__}: {refusal(error)}); "
                steps = f"does not decode in steps of {list(self._decoding.chunks)} tokens "
                raise self._uncached(steps + why) from error
            self.passes += 1
            state = {name: _cache(output)}
            if state[name] is None:
                raise self._uncached("returned no cache: ")
            if encoder:
                hidden = _entry(output, "encoder_last_hidden_state")
                state["encoder_outputs"] = _encoder_output(encoded_as, hidden)
                state |= {} if encoder[0].name is None else {encoder[0].name: None}
                if step == 0:
                    encoded = sum(n for path, n in tracer.layer_calls.items() if path in encoder[0].layers)
            start = end
            if step == 0 and self._decoding.drafts:
                with tracer.watch.paused():
                    self._reject(kwargs, state, name, start)

    def _uncached(self, why: str) -> UnsupportedArchitecture:
        return UnsupportedArchitecture(f"{type(self.model).__name__} {why}audit it with cache=False")

    def _reject(self, kwargs: Mapping[str, Any], state: dict[str, Any], name: str, start: int) -> None:
        wrong = self.inputs.draw(torch.Generator().manual_seed(self.seed + 1)).kwargs
        part = fresh(sliced(self.inputs, {**kwargs, **wrong}, start, start + self._decoding.drafts)) | state
        if hasattr(state[name], "activate_past_recording"):  # sliding layers forget, unless they are told
            state[name].activate_past_recording()
        cache = _cache(self.model(**part, use_cache=True))
        self.passes += 1
        if not hasattr(cache, "crop"):
            raise UnsupportedArchitecture(f"{type(cache).__name__} cannot be cropped")
        cache.crop(-self._decoding.drafts)
        state[name] = cache


def sliced(inputs: Inputs, kwargs: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """The keyword arguments of the step that feeds positions [start, end), those before being in the cache."""
    decoder = inputs.slots[-1]
    mask, part = f"{decoder.prefix}attention_mask", dict[str, Any]()
    for name, value in kwargs.items():
        if name in {"labels", "use_cache"}:
            continue
        if isinstance(value, Tensor) and name.startswith(decoder.prefix):
            if name == mask and value.ndim == 2:
                value = value[:, :end]
            elif name == mask and value.ndim == 4:
                value = value[..., start:end, :end]
            elif name == decoder.name:
                value = value[:, start:end] if inputs.batched else value[start:end]
            elif value.ndim in (1, 2) and value.shape[-1] == decoder.length:
                value = value[..., start:end]
        part[name] = value
    return part


def _static_cache(model: nn.Module, length: int) -> object:
    from transformers import PreTrainedModel
    from transformers.cache_utils import StaticCache

    if not isinstance(model, PreTrainedModel) or not cast(Any, model)._can_compile_fullgraph:
        raise UnsupportedArchitecture(f"{type(model).__name__} takes no static cache")
    return StaticCache(config=model.config.get_text_config(), max_cache_len=length)


def _encoder_output(returned: list[Any], hidden: Any) -> object:
    """What an encoder returned, or else its states: some decoders read entries of their own, some by index."""
    if "transformers" not in sys.modules:
        return (hidden,)
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.utils.generic import ModelOutput

    return next((o for o in returned[:1] if isinstance(o, ModelOutput)), BaseModelOutput(last_hidden_state=hidden))


def _cache(output: Any) -> Any:
    """The cache that a model returns, whose name may differ from the argument's; None without."""
    return next((cache for name in CACHES if (cache := _entry(output, name)) is not None), None)


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


class DecodingComparison:
    """Compares decoding with one full forward, in two precisions: only a mistake keeps its size in both."""

    def __init__(self, inputs: Inputs, watch: Watched, seed: int) -> None:
        self.passes = 0  # so far
        self._runner = Runner(inputs, watch, seed)
        self._full: dict[torch.dtype, Recording] = {}

    def of(self, path: DecodingPath) -> Violation | str | None:
        """The first module that differs, if a layer or the model does; a reason where the model lacks this path."""
        model, dtype = self._runner.model, self._runner.dtype
        other = other_precision(dtype)
        try:
            full, stepped = self._run(None, dtype), self._run(path, dtype)
        except (*REFUSALS, UnsupportedArchitecture) as error:  # not every model has every path
            if path.name == "cached":  # it was asked for
                raise
            return refusal(error)
        try:
            exact, exactly = self._run(None, other), self._run(path, other)
        except (*REFUSALS, UnsupportedArchitecture) as error:
            raise UnsupportedArchitecture(
                f"{type(model).__name__} does not run in {other}, so a difference of its cache may be rounding "
                f"({error}); audit it with cache=False"
            ) from error
        ends = {key for key in stepped if key.side == "out" and self._runner.is_end(key)}
        violation: Violation | None = None
        unshown = False  # whether only this precision shows a difference
        for key, event in stepped.items():
            if violation is not None and key not in ends:
                continue
            first = key._replace(step=0)
            whole, reference, again = full.get(first), exact.get(first), exactly.get(key)
            if whole is None or reference is None or again is None or _of_pairs(whole):
                continue
            beyond = _beyond(event, whole, reference, again, path.pads, dtype, other)
            if beyond is None:
                unshown |= dtype != torch.float64 and _far(event, whole, path.pads) is not None
                continue
            violation = violation or _of_path(path, event, beyond, confirmed=True)
            if key in ends or not ends:
                return violation
        return self._in_this_precision(path, full) if unshown else None

    def _in_this_precision(self, path: DecodingPath, full: Recording) -> Violation | None:
        """The first module that differs far by itself: its inputs are put back to those of the full forward."""
        differs: list[Violation] = []

        def visit(event: Event) -> None:
            whole = full.get(event.key._replace(step=0))
            if whole is None or event.pooled or _of_pairs(whole):
                return
            far = _far(event, whole, path.pads)
            if far is not None:
                differs.append(_of_path(path, event, far, confirmed=False))
            rows = _aligned(event, whole, path.pads)
            if rows is not None:
                put_back(event, torch.cat([event.values[:, : -rows[1].shape[1]], rows[1]], 1))

        runner = SteppedRunner(_padded(self._runner.inputs, path.pads), "modules", self._runner.seed, path)
        with torch.no_grad():
            runner.run(runner.inputs.base, visit)
        self.passes += runner.passes
        return differs[0] if differs else None

    def _run(self, path: DecodingPath | None, dtype: torch.dtype) -> Recording:
        if path is None and dtype in self._full:
            return self._full[dtype]
        runner, other = self._runner, None if dtype == self._runner.dtype else dtype
        inputs = runner.inputs if path is None else _padded(runner.inputs, path.pads)
        with precision(runner.model, other):
            call = inputs.in_precision(other), runner.watch, runner.seed
            runner = Runner(*call) if path is None else SteppedRunner(*call, path)
            recording = runner.record(runner.inputs.base)
        self.passes += runner.passes
        if path is None:
            self._full[dtype] = recording
        return recording


def _of_path(path: DecodingPath, event: Event, place: tuple[int, int, float], *, confirmed: bool) -> Violation:
    row, column, change = place
    return Violation("cache", event.layer, event.blame, None, column, change, None, row, path.name, confirmed)


def _beyond(
    event: Event, whole: Event, exact: Event, exactly: Event, pads: int, dtype: torch.dtype, other: torch.dtype
) -> tuple[int, int, float] | None:
    pairs: list[Tensor] = []
    for stepped, full in ((event, whole), (exactly, exact)):
        rows = _aligned(stepped, full, pads)
        if rows is None:
            return None
        pairs.append(row_change(*rows))
    change, second = pairs
    eps, finer = torch.finfo(dtype).eps, torch.finfo(other).eps
    error, size = scale_of(whole.values.double() - exact.values.double()), scale_of(exact.values)
    if finer < eps:  # rounding shrinks with the precision, a mistake does not: the border is between them
        wrong = second > change.clamp(min=error + eps * size) * math.sqrt(finer / eps)
    else:  # nothing is finer: the full forward's own error, as measured in the coarser precision
        wrong = change > 16 * (error * eps / finer + eps * size)
    # constants that a model keeps in float32 (decays, frequencies) are right to that precision only, in any other
    wrong &= (change if finer >= eps else second) > 16 * torch.finfo(torch.float32).eps * size
    return _largest_of(change, wrong, event, pads)


def _far(event: Event, whole: Event, pads: int) -> tuple[int, int, float] | None:
    rows = _aligned(event, whole, pads)
    if rows is None:
        return None
    change, far = row_change(*rows), math.sqrt(unit(whole.values)) * scale_of(whole.values)
    return _largest_of(change, change > far, event, pads)


def _largest_of(change: Tensor, wrong: Tensor, event: Event, pads: int) -> tuple[int, int, float] | None:
    if not wrong.any():
        return None
    row, column = divmod(int(torch.where(wrong, change, -1.0).argmax()), change.shape[1])
    return row, column + max(event.offset - pads, 0), float(change[row, column])


def _aligned(event: Event, whole: Event, pads: int) -> tuple[Tensor, Tensor] | None:
    start = max(event.offset - pads, 0) - whole.offset
    rows = event.values[:, max(pads - event.offset, 0) :]
    full = whole.values[:, max(start, 0) : start + rows.shape[1]]
    return (rows, full) if start >= 0 and rows.shape[1] and rows.shape == full.shape else None


def _of_pairs(event: Event) -> bool:
    return event.raw.ndim > 3 and event.raw.shape[-2] == event.raw.shape[-1] == event.values.shape[1]


def _padded(inputs: Inputs, pads: int) -> Inputs:
    """The call with left padding in attention_mask, and in position_ids if the model takes them."""
    if not pads:
        return inputs
    slot = inputs.slots[0]
    if slot.name is None or not inputs.batched or set(inputs.kwargs) - {slot.name, "position_ids", "use_cache"}:
        raise UnsupportedArchitecture("the inputs hold more than ids and positions")
    values = inputs.values(slot)
    fill = int(inputs.pool[0]) if len(inputs.pool) else 0
    front = values.new_full((inputs.batch, pads, *values.shape[2:]), fill)
    real = torch.ones(inputs.batch, slot.length + pads, dtype=torch.int64, device=values.device)
    real[:, :pads] = 0
    kwargs: dict[str, Any] = {**inputs.kwargs, slot.name: torch.cat([front, values], 1), "attention_mask": real}
    if inputs.subject.accepted("position_ids"):
        positions = inputs.kwargs.get("position_ids", torch.arange(slot.length, device=values.device))
        positions = positions.expand(inputs.batch, -1)
        kwargs["position_ids"] = torch.cat([positions.new_zeros(inputs.batch, pads), positions], 1)
    return replace(inputs, kwargs=kwargs, slots=(replace(slot, length=slot.length + pads),))
