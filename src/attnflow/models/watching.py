"""Watching a forward pass: what enters and leaves chosen modules, in order of calls, and what takes its place.

The plain case needs one function. Run the model and look at what its layers returned:

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> calls = calls_of({"linear": model[0]}, lambda: model(torch.ones(1, 2)))
    >>> calls[0].name, calls[0].number, tuple(calls[0].output.shape)
    ('linear', 0, (1, 3))

`Watch` is the general one: it calls `enter` before and `leave` after each call of a watched module, and either may
return something else for the model to go on with. It keeps nothing itself.

    >>> with Watch({"linear": model[0]}, leave=lambda call, output: output * 0):
    ...     bool(model(torch.ones(1, 2)).any())
    False
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


@dataclass(eq=False)
class Call:
    """One call of a watched module.

    Attributes:
        name: the key under which the module is watched: usually its path, or the number of its layer.
        module: the module.
        number: how often it was called before, counted from the start of the watch or its last `restart`.
        caller: the innermost watched call that this one is a part of; None for an outermost one.
        args: positional arguments of its forward, with whatever has taken their place.
        kwargs: keyword arguments.
        output: what it returned; None until then.
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
        """The first argument, however it was passed."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def arguments(self) -> dict[str, Any]:
        """All arguments by the names of forward's parameters."""
        return dict(inspect.signature(self.module.forward).bind(*self.args, **self.kwargs).arguments)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Enter = Callable[[Call], Arguments | None]
Leave = Callable[[Call, Any], Any]


class Watch:
    """Watches modules from now on, until `remove` is called or the `with` block ends, by an error too.

    A module may be called several times, and inside of other watched modules. A call that raises has no output: `leave`
    is not called for it.

    Args:
        modules: the modules by name; several names may stand for one module.
        enter: called as `enter(call)` before each call. It may return `(args, kwargs)`, which take the place of the
            call's own, or None to change nothing.
        leave: called as `leave(call, output)` after it. What it returns takes the place of the output, unless it is
            None.
    """

    def __init__(
        self, modules: Mapping[Any, nn.Module], enter: Enter | None = None, leave: Leave | None = None
    ) -> None:
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
        """Count the calls of each module from zero again."""
        self._counts.clear()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Calls inside are neither seen nor counted."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _enter(self, name: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if self._off:
            return None
        number = self._counts[name] = self._counts.get(name, -1) + 1
        call = Call(name, module, number, self._open[-1] if self._open else None, args, kwargs)
        changed = None if self._on_enter is None else self._on_enter(call)
        self._open.append(call)
        return changed

    def _leave(self, name: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        place = next((i for i in reversed(range(len(self._open))) if self._open[i].name == name), None)
        if self._off or place is None:
            return None
        call, *inside = self._open[place:]
        # what was opened inside and is still open raised an error that was caught, or is this module's by another name
        self._open[place:] = [each for each in inside if each.module is module]
        call.args, call.kwargs = args, kwargs
        changed = None if self._on_leave is None else self._on_leave(call, output)
        call.output = output if changed is None else changed
        return changed


@torch.no_grad()
def calls_of(modules: Mapping[Any, nn.Module], run: Callable[[], object]) -> list[Call]:
    """All calls of the modules while `run()` runs, without gradients, in the order in which they begin.

    They keep arguments and outputs alive. A call that raised has None for its output.
    """
    calls: list[Call] = []
    with Watch(modules, calls.append):
        run()
    return calls
