"""Functions as models: any callable from token ids to numbers is called like a module and judged by its return value.

A loss, an evaluation loop, a procedure that trains while it is tested: what happens inside is its own affair, and so
no module inside is watched. Whatever it remembers from one call to the next is found by calling it in another order.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnflow.audit.inputs import Inputs, fresh
from attnflow.audit.report import Violation
from attnflow.audit.rows import leaves
from attnflow.audit.shards import Shards
from attnflow.models.passes.evaluation import evaluating, seed_all, unchanged
from attnflow.models.passes.processes import by_rank
from attnflow.models.subject import Loaded

_OTHER: Final = 0x5EED  # added to a seed that may be the one by which the caller drew the tokens
_FUNCTIONS: Final = (types.FunctionType, types.MethodType, functools.partial)
_APART: Final = ("mask", "position", "type", "segment", "seq")  # in names of integers that are no tokens


@dataclass(frozen=True)
class Follower:
    """An argument that repeats the tokens: labels, or targets that are the tokens one place on."""

    shift: int  # its first number is token 0 or token 1
    values: Tensor  # as it was passed

    def of(self, tokens: Tensor) -> Tensor:
        """The argument for other tokens; a negative number marks a place that is not scored, and stays."""
        changed, other = self.values.clone(), tokens[..., self.shift : self.shift + self.values.shape[-1]]
        changed[..., : other.shape[-1]] = other.to(changed)  # a last target that is no token here stays, too
        return torch.where(self.values < 0, self.values, changed)


class Function(nn.Module):
    """A callable as a module whose parameters are those that it holds; forward returns {name: tensor}."""

    def __init__(self, call: Callable[..., object], followers: Mapping[str, Follower], name: str | None) -> None:
        super().__init__()
        self.call = call
        self.followers = followers
        self.name = name  # the argument that takes the tokens; None if they are the only one
        self.held: tuple[nn.Module, ...] = ()  # and those of its copy
        self.ahead: set[str] = set()  # outputs of n numbers that are scores of the next token, see `align`
        self.labels: list[int] = []  # the tokens that fewer than n - 1 numbers score; empty if there are as many
        self.size: tuple[int, ...] = ()  # of the tokens
        self.twin: Function | None = None  # a copy that was never called; None if none can be made
        self.shards: Shards | None = None  # puts together what several processes return

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (parameter for module in self.held for parameter in module.parameters(recurse=False))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return (buffer for module in self.held for buffer in module.buffers(recurse=False))

    def forward(self, **kwargs: Any) -> dict[str, object]:
        if self.name is None:
            (tokens,) = args = tuple(kwargs.values())
            named, size = {}, tokens.shape[-1]
        else:
            tokens = cast(Tensor, kwargs[self.name])
            size = min([tokens.shape[-1], *(follower.values.shape[-1] for follower in self.followers.values())])
            followers = {name: follower.of(tokens) for name, follower in self.followers.items()}
            args, named = (), {**kwargs, self.name: tokens[..., :size], **followers}
        if self.shards is None:
            returned = self._returned(*args, **named)
        else:
            rows = tokens.numel() // tokens.shape[-1]
            self.shards.batched = tokens.ndim > 1
            returned = self.shards.called(lambda: self._returned(*args, **named), (rows, size))
            if tokens.ndim == 1:
                returned = {n: cast(Tensor, v)[0] if n in self.shards.placed else v for n, v in returned.items()}
        for name in self.ahead & set(returned):
            value = returned[name]
            if isinstance(value, Tensor) and value.numel() == np.prod(self.size):
                returned[name] = value.reshape(self.size)[..., :-1]
        return {name: self._at_labels(value) for name, value in returned.items()} if self.labels else returned

    def _returned(self, *args: Any, **named: Any) -> dict[str, object]:
        with torch.enable_grad():  # it may train
            return named_leaves(_numbers(self.call(*args, **named)))

    def _at_labels(self, value: object) -> object:
        """Fewer than n - 1 numbers, among zeros at the labels that nothing scores."""
        shape = *self.size[:-1], len(self.labels)
        if not isinstance(value, Tensor) or value.numel() != np.prod(shape):
            return value
        full = value.new_zeros(*self.size[:-1], self.size[-1] - 1)
        full[..., torch.tensor(self.labels) - 1] = value.reshape(shape)
        return full

    def on(self, shards: Shards) -> None:
        """Put together what several processes return, of the copy as well; a copy that only some can make goes."""
        if shards.processes is not None and not all(shards.processes.gather(self.twin is not None)):
            self.twin, self.held = None, ()
        for function in (self, self.twin):
            if function is not None:
                function.shards = shards

    def beside(self, reference: Callable[..., object], kwargs: Mapping[str, Any], seed: int) -> list[Violation]:
        """Where the outputs differ from those of a reference, which the first rank alone computes."""
        assert self.shards is not None
        processes, other = self.shards.processes, Function(reference, self.followers, self.name)
        other.ahead, other.size = self.ahead, self.size
        first = processes is None or processes.rank == processes.ranks[0]

        def alone(call: Function) -> dict[str, object]:
            seed_all(seed)
            return call(**fresh(kwargs))

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if isinstance(reference, nn.Module) and first:
                stack.enter_context(unchanged(reference))
                stack.enter_context(evaluating(reference))
            expected = next(iter(by_rank(processes, lambda: alone(other) if first else {}).values()))
            return self.shards.beside(alone(self), expected, type(self).__name__)

    def align(self, inputs: Inputs, seed: int) -> tuple[str, ...]:
        """Read off three calls which of n numbers score the next token: the last never moves; why nothing is tested."""
        draw = inputs.draw(torch.Generator().manual_seed(seed + _OTHER))
        place = torch.arange(inputs.size).expand(inputs.batch, -1)
        self.size = (inputs.batch, inputs.size) if inputs.batched else (inputs.size,)
        if self.twin is not None:
            self.twin.size = self.size
        middle = min([inputs.size // 2, *self.labels[-1:]])

        def tensors(start: int) -> dict[str, Tensor]:
            seed_all(seed)
            answer: dict[str, object] = self(**fresh(inputs.changed(place >= start, draw).kwargs))
            return {name: value for name, value in answer.items() if isinstance(value, Tensor)}

        base, half, every = map(tensors, (inputs.size, middle, 0))
        for name, before in base.items():
            after = every.get(name)
            if after is None or after.shape != before.shape or before.numel() != np.prod(self.size) or before.ndim > 2:
                continue
            moves = (before != after).reshape(self.size).reshape(-1, inputs.size).any(0)
            if before.is_floating_point() and moves.any() and not moves[-1]:
                self.ahead.add(name)
        if not _differ(base, every):
            return ("the output does not move when every token changes: nothing can be seen in it",)
        if not _differ(base, half):
            return (
                f"the output moves when every token changes, and not when those from {middle} on do: it does "
                "not read them, or answers with what it remembers of a sequence that begins alike",
            )
        return ()


def named_leaves(output: object) -> dict[str, object]:
    """{path: what a call returned there}."""
    returned: dict[str, object] = {}
    for path, value in leaves(output, lambda path, value: returned.update({path.lstrip(".") or "output": value})):
        returned[path.lstrip(".") or "output"] = value
    return returned


def _differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() != other.keys() or any(not torch.equal(value, other[name]) for name, value in one.items())


def is_function(call: object) -> TypeGuard[Callable[..., object]]:
    """Whether an audit treats this as a function: it is callable, and neither a module nor a class."""
    return callable(call) and not isinstance(call, nn.Module | Loaded | type)


def as_function(call: Callable[..., object], inputs: Any) -> tuple[Function, Any]:
    """(the callable as a module, inputs whose first tensor is all tokens, without what repeats or follows them)."""
    name, followers = None, dict[str, Follower]()
    if isinstance(inputs, Mapping):
        given = dict(cast(Mapping[str, Any], inputs))
        integers = {n: v for n, v in given.items() if isinstance(v, Tensor) and not v.is_floating_point()}
        tokens = {n: v for n, v in integers.items() if not any(word in n for word in _APART) and v.dtype != torch.bool}
        tensors = [n for n, v in given.items() if isinstance(v, Tensor)]
        name = "input_ids" if "input_ids" in given else next(iter([*tokens, *tensors]), "")
        first = given.get(name)
        inputs = {name: first, **given} if name else given
        if isinstance(first, Tensor):
            for other in [other for other in tokens if other != name]:
                if (shift := _shift(first, tokens[other])) is not None:
                    followers[other] = Follower(shift, inputs.pop(other))
            ends = [follower.values[..., -1:] for follower in followers.values() if follower.shift]
            ends = [end.to(first) for end in ends if (end >= 0).all()]
            inputs |= {name: torch.cat([first, ends[0]], -1)} if ends else {}
    title = str(getattr(call, "__name__", type(call).__name__)).replace("<lambda>", "lambda")
    made = type(title, (Function,), {})  # reports name what leaks by its class
    function = made(call, followers, name)
    again, held = copied(call)
    function.held = tuple(held)
    if again is not None:
        function.twin = made(again, followers, name)
        function.twin.ahead = function.ahead
    return function, inputs


def _shift(tokens: Tensor, other: Tensor) -> int | None:
    if other.shape != tokens.shape or not bool((other >= 0).any()):
        return None
    if bool(((other == tokens) | (other < 0)).all()):
        return 0
    later = other[..., :-1]
    return 1 if later.numel() and bool(((later == tokens[..., 1:]) | (later < 0)).all()) else None


def _numbers(value: object) -> object:
    if isinstance(value, Tensor) and value.is_meta:
        raise ValueError("the function returned a tensor on the meta device, which holds no numbers: run it on another")
    if isinstance(value, Tensor):
        return value.detach() if value.layout in (torch.strided, torch.jagged) else value.detach().to_dense()
    if isinstance(value, np.ndarray | np.generic):
        return torch.as_tensor(np.asarray(value)) if value.dtype.kind in "fiub" else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in cast(Mapping[Any, object], value).items()}
    if isinstance(value, list | tuple):
        items = [_numbers(item) for item in cast(list[object], value)]
        tensors = [item for item in items if isinstance(item, Tensor)]
        plain = not isinstance(cast(list[object], value)[0] if value else None, Tensor)
        alike = len(tensors) == len(items) > 0 and len({tensor.shape for tensor in tensors}) == 1
        return torch.stack(tensors) if alike and (plain or tensors[0].ndim == 0) else items
    return value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _module_of(call: Any) -> str:
    while isinstance(call, functools.partial):
        call = call.func
    return str(getattr(inspect.unwrap(call), "__module__", ""))


def copied(call: Callable[..., object]) -> tuple[Callable[..., object] | None, list[nn.Module]]:
    """(a copy with a state of its own, the modules of both); (None, []) if something in it cannot be copied."""
    copier = _Copier(_module_of(call))
    try:
        start = call if isinstance(call, _FUNCTIONS) else getattr(call, "__call__")  # noqa: B004, B009 - its method
        new = copier.value(start)
    except Exception:  # whatever an object of the user's raises when it is copied, such as an open file
        return None, []
    return new, copier.modules()


class _Copier:
    """Copies objects, closures and the globals of one file; `copy.deepcopy` would share those of functions."""

    def __init__(self, home: str) -> None:
        self._home = home  # the file of the callable; functions of other files are shared
        self._memo: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._functions: dict[int, types.FunctionType] = {}

    def value(self, old: Any) -> Any:
        if isinstance(old, types.FunctionType):
            return self._function(old)
        if isinstance(old, types.MethodType):
            return types.MethodType(self.value(old.__func__), self.value(old.__self__))
        if isinstance(old, functools.partial):
            keywords = {name: self.value(item) for name, item in old.keywords.items()}
            return functools.partial(self.value(old.func), *map(self.value, old.args), **keywords)
        if isinstance(old, type | types.ModuleType):
            return old
        new = copy.deepcopy(old, self._memo)
        functions = {name: item for name, item in getattr(old, "__dict__", {}).items() if isinstance(item, _FUNCTIONS)}
        getattr(new, "__dict__", {}).update({name: self.value(item) for name, item in functions.items()})
        return new

    def _function(self, old: types.FunctionType) -> types.FunctionType:
        if id(old) in self._functions:  # it may call itself
            return self._functions[id(old)]
        space = self._globals.setdefault(id(old.__globals__), dict(old.__globals__))
        cells = tuple(types.CellType() for _ in old.__closure__ or ())
        new = types.FunctionType(old.__code__, space, old.__name__, None, cells)
        self._functions[id(old)] = new
        new.__kwdefaults__, new.__defaults__ = old.__kwdefaults__, self.value(old.__defaults__)
        for cell, before in zip(cells, old.__closure__ or (), strict=True):
            if before != types.CellType():  # it is filled
                cell.cell_contents = self.value(before.cell_contents)
        if old.__module__ == self._home:
            for name in {*_names(old.__code__)} & {*old.__globals__}:
                item = old.__globals__[name]
                shared = isinstance(item, types.FunctionType) and item.__module__ != self._home
                space[name] = item if shared else self.value(item)
        return new

    def modules(self) -> list[nn.Module]:
        old = [item for item in self._memo.get(id(self._memo), ()) if isinstance(item, nn.Module)]  # kept by deepcopy
        return old + [self._memo[id(module)] for module in old]
