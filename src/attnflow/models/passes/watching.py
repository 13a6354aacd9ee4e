"""Watching a forward pass: what enters and leaves chosen modules, in call order, and what replaces it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> calls = calls_of({"linear": model[0]}, lambda: model(torch.ones(1, 2)))
    >>> calls[0].name, calls[0].number, tuple(calls[0].output.shape)
    ('linear', 0, (1, 3))

`Watch` calls `enter` before and `leave` after each call; either may return something else for the model to go on with.

    >>> with Watch({"linear": model[0]}, leave=lambda call, output: output * 0):
    ...     bool(model(torch.ones(1, 2)).any())
    False
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnflow._core.errors import UnsupportedArchitecture


@dataclass(eq=False)
class Call:
    """One call of a watched module, whose key is `name`; `output` is None until it returns.

    `number` counts earlier calls since the start or the last `restart`. `caller` is the innermost watched call around
    this one. `args` and `kwargs` include replacements.
    """

    name: Any
    module: nn.Module
    number: int
    caller: Call | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def first(self) -> Any:
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def arguments(self) -> dict[str, Any]:
        return dict(inspect.signature(self.module.forward).bind(*self.args, **self.kwargs).arguments)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Enter = Callable[[Call], Arguments | None]
Leave = Callable[[Call, Any], Any]


class Watch:
    """Watches modules until `remove` is called or the `with` block ends, even by an error.

    Calls of other threads are ignored, unless it is to watch `everywhere`. `enter(call)` may return `(args, kwargs)`,
    and `leave(call, output)` an output, in place of the call's own; None changes nothing. A call that raises never
    reaches `leave`.
    """

    def __init__(
        self,
        modules: Mapping[Any, nn.Module],
        enter: Enter | None = None,
        leave: Leave | None = None,
        everywhere: bool = False,
    ) -> None:
        self._thread = None if everywhere else threading.get_ident()
        self._on_enter, self._on_leave = enter, leave
        self._open: list[Call] = []
        self._counts: dict[Any, int] = {}
        self._off = False
        self._hooks: list[RemovableHandle] = []
        for name, module in modules.items():
            # partial, not closures: a type checker that decorates functions would recompile each of them
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(partial(self._leave, name), with_kwargs=True))

    def restart(self) -> None:
        self._counts.clear()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Ignore calls inside, and do not count them."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def remove(self) -> None:
        """Stop watching; a call in another thread may hold a hook still, which then does nothing."""
        self._off = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _enter(
        self, name: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Arguments | None:
        if self._off or kwargs is None or self._thread not in (None, threading.get_ident()):
            return None
        number = self._counts[name] = self._counts.get(name, -1) + 1
        call = Call(name, module, number, self._open[-1] if self._open else None, args, kwargs)
        changed = None if self._on_enter is None else self._on_enter(call)
        self._open.append(call)
        return changed

    def _leave(self, name: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._off or self._thread not in (None, threading.get_ident()):
            return None
        place = next((i for i in reversed(range(len(self._open))) if self._open[i].name == name), None)
        if place is None:
            return None
        call, *inside = self._open[place:]
        # what was opened inside and is still open raised an error that was caught, or is this module's by another name
        self._open[place:] = [other for other in inside if other.module is module]
        call.args, call.kwargs = args, kwargs
        changed = None if self._on_leave is None else self._on_leave(call, output)
        call.output = output if changed is None else changed
        return changed


@torch.no_grad()
def calls_of(modules: Mapping[Any, nn.Module], run: Callable[[], object]) -> list[Call]:
    """Record the modules' calls while `run()` runs, without gradients, in the order of their starts.

    Arguments and outputs stay alive. A call that raised has None for its output.
    """
    calls: list[Call] = []
    with Watch(modules, calls.append):
        run()
    return calls


def tensors_in(output: object) -> list[Tensor]:
    tensors: list[Tensor] = []
    mapped(output, lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def mapped(output: object, change: Callable[[Tensor], Tensor]) -> object:
    if isinstance(output, Tensor):
        return change(output) if output.is_floating_point() else output
    if isinstance(output, tuple | list):
        parts = [mapped(part, change) for part in cast("Sequence[object]", output)]
        kind = cast(Any, type(output))
        return kind(*parts) if hasattr(output, "_fields") else kind(parts)
    return output


def with_tensor(output: object, old: Tensor | None, new: Tensor) -> object:
    def change(tensor: Tensor) -> Tensor:
        same = old is not None and tensor.data_ptr() == old.data_ptr() and tensor.shape == old.shape
        return new if same else tensor

    return mapped(output, change)


def hidden_of(call: Call) -> Tensor:
    values = (*call.args, *(call.kwargs[n] for n in ("hidden_states", *call.kwargs) if n in call.kwargs))
    hidden = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim >= 2), None)
    if hidden is None:
        raise UnsupportedArchitecture(f"{call.name} is called without a tensor of hidden states")
    return hidden


def handed_again(call: Call, old: Tensor, new: Tensor) -> Arguments:
    """Replace arguments beside the stream that hold the embedding once more, as Zamba's layers get it."""
    hidden = hidden_of(call)

    def change(value: object) -> object:
        same = isinstance(value, Tensor) and value is not hidden and value.shape == old.shape
        return new if same and torch.equal(cast(Tensor, value), old) else value

    return tuple(map(change, call.args)), {name: change(value) for name, value in call.kwargs.items()}


def with_hidden(call: Call, value: Tensor) -> Arguments:
    hidden = hidden_of(call)
    args = tuple(value if given is hidden else given for given in call.args)
    return args, {name: value if given is hidden else given for name, given in call.kwargs.items()}
