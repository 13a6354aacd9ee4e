"""Hooks on every submodule: what goes in and out of it, as [batch, positions, features], in order of execution."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn

Watch = Literal["modules", "layers"]


class Key(NamedTuple):
    """Names one tensor of one pass: the same in every pass over inputs of the same shape."""

    step: int
    module: str
    call: int
    side: Literal["in", "out"]
    leaf: str


@dataclass(frozen=True)
class Event:
    """A tensor with a sequence axis that enters or leaves a module.

    Attributes:
        key: its name.
        blame: the module to blame if this is the first tensor that moves: the module itself for its output, the
            caller for its input (the caller computed it).
        layer: index of the surrounding layer, None outside of layers.
        depth: number of layers begun so far.
        offset: joint position of its first row.
        values: [batch, positions, features]; [1, positions, features] where the module made one for all sequences.
        raw: the tensor as the module saw it.
    """

    key: Key
    blame: str
    layer: int | None
    depth: int
    offset: int
    values: Tensor
    raw: Tensor


@dataclass(frozen=True)
class Frame:
    """What sequence axes look like: number of sequences, and {length: joint position of the first one}.

    `streams`: whether the layers are called with several streams, [streams, batch, positions, width].
    """

    batch: int
    batched: bool
    segments: Mapping[int, int]
    streams: bool = False


def layer_names(model: nn.Module) -> dict[str, int]:
    """{dotted name: index in its list} of the layers: members of the outermost module lists that hold whole blocks.

    A list of leaf modules (projections, norms) is not a stack of layers, nor is an `nn.Sequential` of unlike modules.
    """
    layers: dict[str, int] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{f}.") for f in layers):
            continue
        blocks = list(module)
        alike = isinstance(module, nn.ModuleList) or (len(blocks) > 1 and len({type(block) for block in blocks}) == 1)
        if blocks and alike and all(any(True for _ in block.children()) for block in blocks):
            layers |= {f"{name}.{index}": index for index in range(len(blocks))}
    return layers


def canonical(tensor: Tensor, frame: Frame, layered: bool = False) -> tuple[Tensor, int] | str | None:
    """(values [batch, positions, features], offset); None without a sequence axis; a reason if it cannot be told.

    Of a tensor whose width is the length of the sequence too, only a layer's or the model's is read, as [batch,
    positions, width]: inside a layer either axis may be the sequence.
    """
    if not tensor.is_floating_point() or tensor.ndim < 1 + frame.batched:
        return None
    if not frame.batched:
        tensor = tensor[None]
    sizes = list(tensor.shape)
    pairs = [p for p in range(len(sizes) - 1) if sizes[p] == frame.batch and sizes[p + 1] in frame.segments]
    streams = len(sizes) > 3 and pairs == [1] and (sizes[0] not in (1, frame.batch) or frame.streams)
    if streams and sizes[0] == frame.batch and not layered:
        return f"shape {tuple(tensor.shape)} has two axes as long as the batch"
    if streams:
        tensor, axes = tensor.movedim(1, 0), [2]
    elif sizes[0] in (1, frame.batch):
        axes = [axis for axis in range(1, len(sizes)) if sizes[axis] in frame.segments]
    elif len(sizes) >= 3 and sizes[0] in frame.segments and sizes[1] == frame.batch:
        tensor, axes = tensor.transpose(0, 1), [1]
    else:
        return None
    if not axes:
        return None
    sizes = list(tensor.shape)
    scores = len(sizes) > 3 and axes == [len(sizes) - 2, len(sizes) - 1]  # [batch, heads, queries, keys]: of queries
    if len(axes) > 1 and not scores and not (layered and len(sizes) == 3):
        return f"shape {tuple(tensor.shape)} has several axes as long as the sequence"
    values = tensor.movedim(axes[0], 1)
    return values.reshape(values.shape[0], values.shape[1], -1), frame.segments[sizes[axes[0]]]


class Tracer:
    """Watches one or several forward passes of a model.

    Attributes:
        layers: {path: index} of the layers that count, those of the stacks whose positions are audited.
        frame: set anew for every step of a cached run.
        depth: layers begun in this pass.
        skipped: {module: reason} of the modules that could not be watched.
        layer_calls: how often each layer was called in the last pass.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, int], frame: Frame, visit: Callable[[Event], None], watch: Watch
    ) -> None:
        self.model = model
        self.layers = layers
        self.frame = frame
        self.visit = visit
        self.watch = watch
        self._off = False
        self.skipped: dict[str, str] = {}
        self.begin(0)

    def begin(self, step: int, depth: int = 0) -> None:
        """Start a pass, or a step of a cached run that does not run the first `depth` layers (the encoder) again."""
        self.step = step
        self.depth = depth
        self.layer_calls: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._stack: list[tuple[str, int]] = []
        self._current: list[int | None] = [None]

    @contextmanager
    def attached(self) -> Generator[Tracer, None, None]:
        """With hooks on all watched modules; all are removed afterwards."""
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if self.watch == "modules" or name in self.layers or not name:
                    # partial, not closures: a type checker that decorates functions would recompile each of them
                    enter, leave = partial(self._enter, name), partial(self._leave, name)
                    hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(leave))
            yield self

    @contextmanager
    def paused(self) -> Generator[None]:
        """Runs inside are not watched."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._off:
            return
        caller = self._stack[-1][0] if self._stack else name
        call = self._calls[name] = self._calls.get(name, -1) + 1
        if self._stack:  # the inputs of the model itself are what is perturbed
            for leaf, tensor in leaves((args, kwargs)):
                self._emit(Key(self.step, name, call, "in", leaf), caller, tensor)
        self._stack.append((name, call))
        if name in self.layers:
            self.depth += 1
            self.layer_calls[name] = self.layer_calls.get(name, 0) + 1
            self._current.append(self.depth - 1 if self.layer_calls[name] > 1 else self.layers[name])

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._off:
            return
        call = self._stack[-1][1]
        for leaf, tensor in leaves(output):
            self._emit(Key(self.step, name, call, "out", leaf), name, tensor)
        self._stack.pop()
        if name in self.layers:
            self._current.pop()

    def _emit(self, key: Key, blame: str, tensor: Tensor) -> None:
        rows = canonical(tensor, self.frame, layered=key.module in self.layers or not key.module)
        if isinstance(rows, str):
            self.skipped[key.module] = rows
        elif rows is not None:
            label = blame or type(self.model).__name__
            self.visit(Event(key, label, self._current[-1], self.depth, rows[1], rows[0], tensor))


def leaves(root: object) -> list[tuple[str, Tensor]]:
    """All tensors in nested tuples, lists and mappings, each with its path; caches and other objects are left out."""
    tensors: list[tuple[str, Tensor]] = []
    left: list[tuple[str, object]] = [("", root)]
    while left:  # a loop: it runs for every module of every pass
        path, value = left.pop()
        if isinstance(value, Tensor):
            tensors.append((path, value))
        elif isinstance(value, Mapping):
            items = cast(Mapping[Any, object], value).items()
            left += [(f"{path}.{k}", item) for k, item in items if "past" not in str(k) and "cache" not in str(k)][::-1]
        elif isinstance(value, tuple | list):
            left += [(f"{path}.{index}", item) for index, item in enumerate(cast(list[object], value))][::-1]
    return tensors
