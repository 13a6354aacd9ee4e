"""Runs forward passes with a model's modules watched; inputs and outputs become [batch, positions, features].

`Runner` runs variations of one call; a `Tracer` turns what its `Watch` sees into `Event`s, in order of execution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.functions import Function
from attnflow.audit.inputs import Inputs, Slot, Variation, fresh
from attnflow.audit.rounding import unit
from attnflow.audit.rows import Frame, OutputLayout, arranged, canonical, layout_of, leaves, settled
from attnflow.models.passes.evaluation import seed_all
from attnflow.models.passes.processes import Communication, Processes, splits_features, whole, world
from attnflow.models.passes.watching import Arguments, Call, Watch
from attnflow.models.subject import own_name

Watched = Literal["modules", "layers"]


class Key(NamedTuple):
    step: int
    module: str
    call: int
    side: Literal["in", "out"]
    leaf: str


@dataclass(frozen=True)
class Event:
    key: Key  # its name
    blame: str  # the module that made it: the module itself for its output, the caller for its input
    layer: int | None  # index of the surrounding layer, None outside of layers
    depth: int  # number of layers begun so far
    offset: int  # joint position of its first row
    values: Tensor  # [batch, positions, features]; [1, positions, features] where the module made one for all sequences
    raw: Tensor  # the tensor as the module saw it
    pooled: bool = False  # whether each row is of a whole sequence, or of all: it may depend on any of its positions


Recording = dict[Key, Event]  # of one pass, in order of execution


def put_back(event: Event, values: Tensor) -> None:
    """Write values into a tensor of a running pass, so that what follows starts from them; not into a copy of it."""
    raw = event.raw
    shared = event.values.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
    if shared and all(stride or size == 1 for stride, size in zip(raw.stride(), raw.shape, strict=True)):
        event.values.copy_(values)


class Tracer:
    def __init__(self, runner: Runner, visit: Callable[[Event], None]) -> None:
        self.runner = runner
        self.layers = runner.layer_names
        self.frame = runner.frame  # set anew for every step of a cached run
        self.visit = visit
        self._inside: dict[int, Tensor] = {}  # {offset: the last output of a module inside, with all its positions}
        modules = runner.model.named_modules()
        watched = {n: m for n, m in modules if runner.watch == "modules" or n in self.layers or not n}
        self.watch = Watch(watched, self._enter, self._leave)
        self.begin(0)

    def begin(self, step: int, depth: int = 0) -> None:
        self.step = step
        self.depth = depth  # layers begun in this pass
        self.layer_calls: dict[str, int] = {}  # how often each layer was called in the last pass
        self._open: list[tuple[Call, int]] = []  # layers that run, with their index
        self.watch.restart()

    def _enter(self, call: Call) -> None:
        if call.caller is not None:  # the inputs of the model itself are what is perturbed
            self._emit(call, "in", call.caller.name, (call.args, call.kwargs))
        if call.name in self.layers:
            self.depth += 1
            self.layer_calls[call.name] = self.layer_calls.get(call.name, 0) + 1
            first = self.layer_calls[call.name] == 1
            self._open.append((call, self.layers[call.name] if first else self.depth - 1))

    def _leave(self, call: Call, output: object) -> None:
        self._emit(call, "out", call.name, output)
        if call.name in self.layers:
            while self._open.pop()[0] is not call:
                pass  # a layer that raised, in a model that goes on

    def _emit(self, call: Call, side: Literal["in", "out"], blame: str, root: object) -> None:
        if not call.name and self.frame.whole and self.frame.segments:
            self._receive(call, root)
            return
        layer = self._open[-1][1] if self._open else None
        for leaf, part in leaves(root):
            tensor = whole(part)
            rows = canonical(tensor, self.frame, call.name in self.layers or not call.name, layer is not None)
            if isinstance(rows, str):
                self.runner.skipped[call.name] = rows
            elif rows is not None:
                key = Key(self.step, call.name, call.number, side, leaf)
                label = own_name(blame) or self.runner.inputs.subject.kind
                values = self.runner.joined(rows[0])
                if side == "out":
                    self._inside[rows[1]] = values
                self.visit(Event(key, label, layer, self.depth, rows[1], values, tensor))

    def _receive(self, call: Call, root: object) -> None:
        layouts = self.runner.layouts

        def unknown(path: str, value: object) -> None:
            # A cache of keys and values or states is audited on its own, by decoding.
            if "cache" not in type(value).__name__.lower() and not hasattr(value, "get_seq_length"):
                single = isinstance(value, int | float) and not path.rpartition(".")[2].isdigit()  # not of a list
                why = f"is a {type(value).__name__}, which is not looked into"
                layouts[path] = OutputLayout("unknown", why=why, sure=single)

        for path, part in leaves(root, unknown):
            tensor = whole(part)
            if tensor.is_meta:
                why = "is on the meta device, which holds no numbers"
                layouts[path] = OutputLayout("unknown", shape=tuple(tensor.shape), why=why, sure=False)
                continue
            layout = layouts.get(path) or layout_of(tensor, self.frame, self._inside)
            if layout.form != "unknown" and layout.shape != tuple(tensor.shape):
                layout = layout._replace(form="unknown", why="has another shape after inputs change")
            layouts[path] = layout
            key = Key(self.step, call.name, call.number, "out", path)
            rows, name = self.runner.joined(arranged(tensor, layout, self.frame)), self.runner.inputs.subject.kind
            of_rank = path.startswith(".rank ")  # of a step whose ranks return all positions each
            name = name if layout.aligned and not of_rank else f"{name}{path}"
            self.visit(Event(key, name, None, self.depth, layout.offset, rows, tensor, not layout.aligned))


class Runner:
    """Runs the model on variations of one call, counting passes; every pass sees the same random numbers."""

    path = "forward"  # how the model is run, by the name in a report

    def __init__(self, inputs: Inputs, watch: Watched, seed: int) -> None:
        self.model = model = inputs.model
        self.inputs = inputs
        self.watch: Watched = watch
        self.seed = seed
        self.passes = 0  # so far; a cached run counts each step
        self.layer_calls = 0  # of the last pass
        self.skipped: dict[str, str] = {}  # {module: reason} of those that could not be watched
        self.layouts: dict[str, OutputLayout] = {}  # {path in the model's own output: layout}, of the first pass
        self.layer_names = {name: index for name, index in inputs.subject.layers.items() if name in inputs.layers}
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.frame = frame_of(inputs)
        shards = model.shards if isinstance(model, Function) else None
        self.several = inputs.processes is not None or (shards is not None and shards.processes is not None)
        # what each rank holds of one activation, side by side, so that all ranks judge the same numbers
        self.joined = inputs.processes.joined if inputs.processes is not None and inputs.joins else _as_they_are

    def run(self, call: Variation, visit: Callable[[Event], None]) -> None:
        seed_all(self.seed)
        with moved(self.inputs, call.noise, lambda: tracer.frame.segments):
            tracer = Tracer(self, visit)  # sees what moved
            with tracer.watch:
                self.feed(tracer, call.kwargs)
        self.layer_calls = tracer.depth

    def feed(self, tracer: Tracer, kwargs: Mapping[str, Any]) -> None:
        self.model(**fresh(kwargs))
        self.passes += 1

    def is_end(self, key: Key) -> bool:
        return not key.module or key.module in self.layer_names

    def record(self, call: Variation) -> Recording:
        with torch.no_grad():
            events, intact = self.distinct(call)
            return events if intact else self.distinct(call, copy=True)[0]

    def arranged(self, base: Recording) -> Recording:
        unsure = {path: layout for path, layout in self.layouts.items() if not (layout.sure or layout.why)}
        if not unsure:
            return base
        selected = torch.zeros(self.inputs.batch, self.inputs.size, dtype=torch.bool)
        selected[0] = True
        moved = self.record(self.inputs.changed(selected, self.inputs.draw(torch.Generator().manual_seed(self.seed))))
        for path, layout in unsure.items():
            key = Key(0, "", 0, "out", path)
            if key in base and key in moved:
                self.layouts[path] = settled(layout, base[key].raw, moved[key].raw, self.frame)
        return self.record(self.inputs.base)

    def distinct(self, call: Variation, copy: bool = False) -> tuple[Recording, bool]:
        """(the events of a pass without inputs that an earlier event showed, whether none was changed in place)."""
        events: Recording = {}
        seen: dict[int, tuple[Tensor, int]] = {}  # (tensor, version) by id; holds the tensors, so that ids stay theirs
        rewritten = False

        def keep(event: Event) -> None:
            nonlocal rewritten
            tensor, version = seen.get(id(event.raw), (None, event.raw._version))
            if event.key.side == "in" and tensor is not None and version == event.raw._version:
                return
            rewritten |= version != event.raw._version
            seen[id(event.raw)] = (event.raw, event.raw._version)
            if copy:
                event = replace(event, values=event.values.clone(), raw=event.raw.clone())
            events[event.key] = event

        self.run(call, keep)
        return events, not rewritten and all(tensor._version == version for tensor, version in seen.values())


def on_ranks(inputs: Inputs, processes: Processes | None) -> Inputs:
    """The inputs of a model that these processes run together, after one pass that shows what they hold of it.

    Raises:
        UnsupportedArchitecture: a model that is not sharded exchanges tensors with other ranks: each of its passes must
            run on all of them. Every rank finds this in the same first pass, so that none waits for another.
    """
    if processes is None:
        if world():
            with torch.no_grad(), Communication() as communication:
                inputs.model(**fresh(inputs.kwargs))
            if communication.seen:
                raise UnsupportedArchitecture(
                    f"a call of {inputs.subject.kind} exchanges tensors with other ranks ({communication.seen}), and "
                    "one rank sees its part alone: audit the parallel step, audit.check(step, ids, shard=...) on each "
                    "rank"
                )
        return inputs
    inputs = replace(inputs, processes=processes)
    if splits_features(inputs.model):
        return replace(inputs, joins=True)
    sums: list[tuple[str, float, float]] = []  # (module, sum of its values, border of rounding)

    def add(event: Event) -> None:
        values = event.values.double()
        sums.append((event.blame, float(values.sum()), math.sqrt(unit(event.values)) * float(values.abs().sum())))

    with torch.no_grad():
        Runner(inputs, "modules", 0).run(inputs.base, add)
    for found in zip(*processes.gather(sums), strict=False):
        totals = [total for _, total, _ in found]
        if len(set(totals)) > 1:
            inputs = replace(inputs, joins=True)
        if max(totals) - min(totals) > found[0][2]:
            return replace(inputs, joins=True, unlike=found[0][0])
    return inputs


def _as_they_are(values: Tensor) -> Tensor:
    return values


def frame_of(inputs: Inputs) -> Frame:
    kept, tensors = inputs.kwargs.get("logits_to_keep"), [v for v in inputs.kwargs.values() if isinstance(v, Tensor)]
    inner = () if isinstance(inputs.model, Function) else inputs.model.parameters()  # nothing inside it is watched
    return Frame(
        inputs.batch,
        inputs.batched,
        segments={slot.length: slot.offset for slot in inputs.slots},
        streams=any(slot.entry is not None and slot.entry.axis > 0 for slot in inputs.slots),
        passed=tuple({tensor.shape[1] for tensor in tensors if tensor.ndim == 2}),
        kept=kept if type(kept) is int else 0,
        widths=frozenset(size for parameter in inner for size in parameter.shape[:2]),
        beside=frozenset(map(len, inputs.beside.values())),
    )


@contextmanager
def moved(inputs: Inputs, noise: Mapping[int, Tensor], segments: Callable[[], Mapping[int, int]]) -> Generator[None]:
    """Add noise [batch, n, width], by slot offset, to what enters each stack, once per step."""
    entered: dict[int, int] = {}

    def enter(slot: Slot, call: Call) -> Arguments | None:
        assert slot.entry is not None
        vectors = entering(call.args, call.kwargs)
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
            tuple(changed if value is vectors else value for value in call.args),
            {name: changed if value is vectors else value for name, value in call.kwargs.items()},
        )

    def embedded(slot: Slot, real: Tensor, _: Call, output: Any) -> Tensor | None:
        start = segments().get(output.shape[1]) if isinstance(output, Tensor) and output.ndim == 3 else None
        if start is None or len(output) != inputs.batch:
            return None
        rows = slice(start - slot.offset, start - slot.offset + output.shape[1])
        added = noise[slot.offset][:, rows].masked_fill(real[:, rows, None], 0.0)
        times = -(-output.shape[2] // added.shape[2])
        return output + added.repeat(1, 1, times)[..., : output.shape[2]].to(output)

    table = inputs.subject.embedding
    with ExitStack() as watches:
        for slot in inputs.slots:
            if slot.offset not in noise or slot.entry is None:
                continue
            layer, real = inputs.model.get_submodule(slot.entry.layer), inputs.real_in(slot)
            watches.enter_context(Watch({slot.entry.layer: layer}, partial(enter, slot)))
            if table is not None and not real.all():  # padding keeps its token, but what embeds it may mix positions
                watches.enter_context(Watch({"table": table}, leave=partial(embedded, slot, real)))
        yield


def entering(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    values = (*args, *kwargs.values())
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim >= 3), None)


def refuse_nan(inputs: Inputs, module: str, offset: int, values: Tensor) -> None:
    """Refuse NaN, which hides changes, in an output from position `offset` on; padding may hold it."""
    bad = values.isnan().any(-1).cpu()
    if bad.any() and (bad := bad & inputs.real[:, offset : offset + bad.shape[1]]).any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{module or 'the model'} gives NaN at position {column + offset} (sequence {row}), which hides what "
            "moves it: repair the weights or the inputs first, or audit in a wider precision (dtype=)"
        )
