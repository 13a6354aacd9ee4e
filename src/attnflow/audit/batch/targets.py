"""Runs a loss once, and reads off its gradient which token each position is trained on, and with what weight.

Logits are looked for among what modules return. A loss that forms none is read from the last hidden states.
Logits that a step makes of a part of the hidden states are placed by comparing those.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs as _with_keywords,  # pyright: ignore[reportPrivateUsage]
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from attnflow.audit.batch.gradients import UNKNOWN, Targets, of_logits, of_states
from attnflow.audit.batch.reading import ANSWERS
from attnflow.audit.packing import as_tensor
from attnflow.audit.rows import leaves
from attnflow.models.passes.evaluation import examining, unchanged
from attnflow.models.subject import Subject

_KEPT: Final = 64  # of the tensors that modules return, the last ones
_TRIED: Final = 8  # of them, as logits or as hidden states of the last layer
_UNDERSTOOD: Final = 0.9  # share of the trained positions from which a tensor is taken as the logits


class LossUnread(Exception):
    """The loss could not be read; the message says why."""


class TrainsNothing(LossUnread):
    """There is a loss, and its gradient is zero."""


@dataclass(eq=False)
class Returned:
    tensor: Tensor
    call: int  # number of the outermost call in which it was returned
    source: Tensor | None = None  # what its module made it of, row by row
    gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:  # once in each backward pass
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass(eq=False)
class Pass:
    logits: deque[Returned]  # what may be logits, the last tensors
    states: deque[Returned]  # what may be the hidden states of the last layer
    wide: deque[Tensor]  # what modules returned of [batch, positions, width]
    model: nn.Module | None = None  # the outermost module that was called
    head: Tensor | None = None  # [vocabulary, width], of its output layer
    calls: int = 0  # of outermost modules
    inputs: tuple[Tensor, ...] = ()  # integers that it was last called with
    output: object = None  # of its last call


def read_targets(
    step: Callable[[Any], object],
    batch: Mapping[str, Any],
    least: int,
    model: nn.Module | None = None,
    several: bool = False,
) -> Targets:
    """Run the loss once, and read off what it trains, also by the output layer of `model`; ids are below `least`.

    Of several processes, each stops at the last tensors of one width: further back, others may have to take part.
    """
    with _recorded(least, model) as shown:
        loss = _loss_of(step(dict(batch)))
        returned = [*shown.logits, *shown.states]
        if all(part.gradient is None for part in returned):  # else the step has called backward
            if loss is None or not loss.requires_grad:
                raise LossUnread("no loss with gradients was returned")
            widths = list(dict.fromkeys(part.tensor.shape[-1] for part in reversed(shown.logits)))
            alike = [[part for part in shown.logits if part.tensor.shape[-1] == width] for width in widths]
            logits = alike if several else [shown.logits]
            for parts in (*logits, shown.states):  # hidden states only where no logits are part of the loss
                _differentiate(loss, parts)
                if any(map(_matters, parts)) or (several and any(part.gradient is not None for part in parts)):
                    break
    with torch.no_grad():
        numbers = [(path.strip("."), t) for path, t in leaves(shown.output) if t.numel() == 1 and t.is_floating_point()]
        value = torch.nan if loss is None else float(loss)
        targets = _targets(shown)
        known = bool((targets.token != UNKNOWN).all())
        return replace(
            targets,
            loss=value,
            rest=value - float(targets.value.sum()) if known else torch.nan,
            scalars={name: float(number) for name, number in numbers},
            inputs=shown.inputs,
            model=shown.model,
        )


def _differentiate(loss: Tensor, parts: Sequence[Returned]) -> None:
    tensors = [part.tensor for part in parts]
    scale = 1024.0 if any(t.dtype == torch.float16 for t in tensors) else 1.0  # small gradients would be lost
    whole = torch.full_like(loss, scale)
    options: Any = {"retain_graph": True, "allow_unused": True}
    gradients: Any = torch.autograd.grad(loss, tensors, whole, **options) if tensors else ()
    for part, gradient in zip(parts, gradients, strict=True):
        part.gradient = None if gradient is None else gradient / scale


def _loss_of(returned: object) -> Tensor | None:
    value = cast(Any, returned)
    if isinstance(value, Mapping):
        value = cast(Mapping[str, Any], value).get("loss")
    elif isinstance(value, tuple | list):
        value = cast("list[Any]", value)[0] if value else None
    elif not isinstance(value, Tensor):
        value = getattr(value, "loss", None)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise LossUnread(f"the loss must be one number, got shape {list(value.shape)}: pass a function that reduces it")
    return value if isinstance(value, Tensor) else None


@contextmanager
def _recorded(least: int, model: nn.Module | None) -> Generator[Pass]:
    """Keep what modules return in this thread; models, generators and gradients are as before afterwards."""
    shown, here, depth = Pass(deque(maxlen=_KEPT), deque(maxlen=_TRIED), deque(maxlen=_KEPT)), get_ident(), [0]
    shown.head = None if model is None else _head(model)
    restored: list[nn.Module] = []

    def enter(module: nn.Module, args: object) -> None:
        if get_ident() != here:
            return
        if depth[0] == 0:
            if all(module is not other for other in restored):
                restored.append(module)
                stack.enter_context(unchanged(module))
                stack.enter_context(examining(module))
                stack.enter_context(_without_gradients(module))
            head = _head(module)
            if shown.model is None or head is not None:
                shown.model, shown.head = module, head if shown.head is None else shown.head
            shown.calls += 1
        depth[0] += 1

    def leave(module: nn.Module, args: object, *rest: object) -> None:
        if get_ident() != here:
            return
        *kwargs, output = rest  # without keywords where the call has raised
        depth[0] -= 1
        for _, tensor in leaves(output):
            if not tensor.requires_grad or not tensor.is_floating_point() or tensor.ndim < 2:
                continue
            if tensor.ndim == 3:
                shown.wide.append(tensor)
            size, sizes = tensor.shape[-1], None if shown.head is None else shown.head.shape
            state = sizes is not None and sizes[0] != size == sizes[1]
            whole = size >= least and (sizes is None or depth[0] == 0 or size == sizes[0])
            kept = shown.states if state else shown.logits
            if (state or whole) and all(tensor is not part.tensor for part in kept):
                given = next((x for _, x in leaves(args) if x.shape[:-1] == tensor.shape[:-1]), None)
                kept.append(Returned(tensor, shown.calls, given))
                tensor.register_hook(kept[-1].add)
        if depth[0] == 0 and module is shown.model:
            shown.output = output
            shown.inputs = tuple(tensor for _, tensor in leaves((args, kwargs)) if not tensor.is_floating_point())

    def refuse(*_: object) -> None:
        raise ValueError("the step updates the parameters: pass a function that only computes the loss of a batch")

    with ExitStack() as stack, torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        stack.enter_context(cast(Any, torch.compiler).set_stance("force_eager"))
        leaving = register_module_forward_hook(leave, with_kwargs=True, always_call=True)
        stack.callback(_with_keywords.pop, leaving.id, None)  # `remove` leaves it behind, and torch.compile warns of it
        for handle in (register_module_forward_pre_hook(enter), leaving, register_optimizer_step_pre_hook(refuse)):
            stack.callback(handle.remove)
        yield shown


@contextmanager
def _without_gradients(model: nn.Module) -> Generator[None]:
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _head(model: nn.Module) -> Tensor | None:
    """The matrix [vocabulary, width] of the model's own output layer, which may make the logits."""
    getter = getattr(model, "get_output_embeddings", None)
    inner = getattr(model, "module", None)
    head = getter() if callable(getter) else None
    if head is None and isinstance(inner, nn.Module):
        return _head(inner)
    weight = getattr(head, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _targets(shown: Pass) -> Targets:
    best: Targets | None = None
    parts = [*shown.logits, *shown.states]
    if not all(part.gradient is None or part.gradient.isfinite().all() for part in parts):
        raise LossUnread("its gradient is not finite")
    if any(part.gradient is not None for part in parts) and not any(map(_matters, parts)):
        raise TrainsNothing("its gradient by the logits is zero everywhere: it trains nothing")
    logits = [part for part in reversed(shown.logits) if _matters(part)][:_TRIED]
    for part in (*logits, *filter(_matters, reversed(shown.states))):
        if any(part is state for state in shown.states):
            if best is not None:
                break
            targets = of_states(part.tensor, cast(Tensor, part.gradient), cast(Tensor, shown.head))
        else:
            targets = _joined(part, shown)
        if _share(targets) >= _UNDERSTOOD:
            return targets
        best = targets if best is None or _share(targets) > _share(best) else best
    if best is None:
        raise LossUnread("no module returned logits, or hidden states of the last layer, that the loss is made of")
    return best


def _matters(part: Returned) -> bool:
    return part.gradient is not None and bool(part.gradient.any())


def _joined(part: Returned, shown: Pass) -> Targets:
    targets, placed = _scattered(part, shown.wide)
    size = part.tensor.shape[-1]
    others = [o for o in shown.logits if o.call != part.call and o.tensor.shape[-1] == size and _matters(o)]
    calls = {other.call for other in others}
    for other in others if placed is not None else ():
        beside, there = _scattered(other, [cast(Tensor, placed)])
        if there is not None and not (beside.trained & targets.trained).any():
            targets = targets.joined(beside)
            calls.discard(other.call)
    return replace(targets, calls=1 + len(calls))


def _scattered(part: Returned, wide: Sequence[Tensor]) -> tuple[Targets, Tensor | None]:
    """(what logits say, in the rows of the hidden states that they were made of; these states, if they are known)."""
    targets, places = of_logits(part.tensor, cast(Tensor, part.gradient)), _places(part, wide)
    if places is None:
        return targets, None
    states, rows = places

    def spread(values: Tensor, empty: int | float) -> Tensor:
        whole = torch.full((states.shape[0] * states.shape[1],), empty, dtype=values.dtype)
        return whole.scatter(0, rows, values.flatten()).reshape(states.shape[:2])

    return targets.changed(spread), states


def _places(part: Returned, wide: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """(hidden states, which of their rows each row of the logits was made of); None if that cannot be told."""
    if part.source is None:
        return None
    rows = part.source.detach().flatten(0, -2)
    for states in reversed(wide):
        there = states.detach().flatten(0, 1)
        if states is part.tensor or there.shape[-1] != rows.shape[-1] or len(there) < len(rows):
            continue
        if torch.equal(there, rows):
            return states, torch.arange(len(there))
        number = torch.cat([there, rows.to(there)]).unique(dim=0, return_inverse=True)[1].cpu()
        known, sought = number[: len(there)], number[len(there) :]
        if torch.isin(sought, known).all():
            ways = [_in_order(sought.tolist(), known.tolist(), last=last) for last in (False, True)]
            first, last = map(torch.tensor, ways)
            trained = (cast(Tensor, part.gradient) != 0).any(-1).flatten().cpu()
            apart = first.amin() >= 0 and len(first.unique()) == len(first)
            return (states, first) if apart and torch.equal(first[trained], last[trained]) else None
    return None


def _in_order(sought: list[int], known: list[int], last: bool) -> list[int]:
    """Where rows stand among others, equal ones in the first or last places that keep the order; -1: not at all."""
    if len(set(known)) == len(known):
        at = {number: index for index, number in enumerate(known)}
        return [at[number] for number in sought]
    step = -1 if last else 1
    left = iter(list(enumerate(known))[::step])
    return [next((index for index, other in left if other == number), -1) for number in sought[::step]][::step]


def _share(targets: Targets) -> float:
    trained = targets.trained
    return float((targets.token[trained] >= 0).double().mean()) if trained.any() else 0.0


def call_of(subject: Subject, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a model takes of a batch: what its forward names, and other entries that reach its layers or its loss."""
    parameters = inspect.signature(subject.model.forward).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    call = {n: v for n, v in batch.items() if n in parameters or (anything and n not in ANSWERS)}
    if subject.config is not None and subject.takes_use_cache:
        call.setdefault("use_cache", False)  # as in training: a cache switches off packing by positions
    return call


def run_model(subject: Subject, batch: Mapping[str, Any]) -> object:
    return subject.model(**call_of(subject, batch))


def least_width(batch: Mapping[str, Any]) -> int:
    """The least width of a tensor of logits: all ids and labels of the batch are below it."""
    named = (value for name, value in batch.items() if name.endswith(("input_ids", "labels")) and value is not None)
    return max([1, *(int(tensor.max()) for tensor in map(as_tensor, named) if tensor.numel())]) + 1
