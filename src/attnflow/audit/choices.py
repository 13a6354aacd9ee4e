"""What moves through a choice of the model (top-k, a comparison) and what through values: passes with choices held."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Through = Literal["", "values", "choices", "values and choices"]
_MOST: Final = 16  # choices that are tried one by one
_BETWEEN: Final = ("torch.", "jaxtyping.", "beartype.", "attnflow.audit.")


@dataclass(frozen=True)
class Decision:
    """Integers or bools that an operator made of floating-point numbers, and who called it."""

    operator: str
    chosen: tuple[Tensor, ...]
    place: str
    counts: bool  # whether it was made of whole numbers, which count what was chosen before, as the offsets of experts

    def fits(self, operator: str, chosen: Sequence[Tensor]) -> bool:
        shapes = [each.shape for each in chosen]
        return self.operator == operator and [each.shape for each in self.chosen] == shapes

    def differs(self, other: Decision) -> bool:
        return not (self.counts and other.counts) and not all(map(torch.equal, self.chosen, other.chosen))


class _Desynchronised(RuntimeError):
    """A pass with held choices made others than the pass that they come from."""


@dataclass(eq=False)
class Choices(TorchDispatchMode):
    """Record the choices of a pass; with `held`, choices of an earlier pass by number, these stand in their place.

    A choice is any result of bools or integers that an operator computes from floating-point numbers. Those inside a
    compiled graph or a kernel of its own are not seen, and count as values.
    """

    held: Mapping[int, Decision] = field(default_factory=dict[int, Decision])
    made: list[Decision] = field(default_factory=list[Decision])

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        output = func(*args, **(kwargs or {}))
        results = cast("list[Any]", list(output) if isinstance(output, tuple | list) else [output])
        discrete = [i for i, each in enumerate(results) if isinstance(each, Tensor) and not _numbers(each)]
        paired = len(discrete) < len(results)  # as (values, indices) of a top-k
        sources = [each for each in tree_leaves((args, kwargs)) if _numbers(each)]
        if not discrete or not sources:
            return output
        if paired and (len(results) != 2 or discrete != [1] or not _has_dim(func)):
            return output  # what an operator returns beside its numbers, as a kernel its seed
        chosen = [results[i] for i in discrete]
        held = self.held.get(len(self.made))
        self.made.append(
            Decision(str(func), tuple(each.clone() for each in chosen), _caller(), all(map(_whole, sources)))
        )
        if held is None:
            return output
        if not held.fits(str(func), chosen):
            raise _Desynchronised
        for i, before in zip(discrete, held.chosen, strict=True):
            results[i] = before.clone()
        if paired:  # the values that stand at the held indices
            results[0] = _at(func, args, kwargs or {}, results[-1])
        return type(output)(results) if isinstance(output, tuple | list) else results[0]


def separated(run: Callable[[bool], Tensor], moves: Callable[[Tensor], bool]) -> tuple[Through, str]:
    """Tell what moves a target, whose vector `run(changed)` returns from the inputs as they were or as changed.

    Returns the way, and the first choice that moves the target alone; ("", "") where no choice differs.
    """
    with Choices() as base:
        run(False)
    with Choices() as other:
        run(True)
    pairs = enumerate(zip(base.made, other.made, strict=False))
    differ = [number for number, (one, two) in pairs if one.fits(two.operator, two.chosen) and one.differs(two)]
    if not differ:
        return "", ""

    def held(changed: bool, choices: Mapping[int, Decision]) -> bool:
        try:
            with Choices(choices):
                vector = run(changed)
        except _Desynchronised:
            return changed  # another way through the code was taken: nothing shows that values do not move it
        return moves(vector)

    vote = next((number for number in differ[:_MOST] if held(False, {number: other.made[number]})), None)
    by_values = held(True, dict(enumerate(base.made)))
    named = "" if vote is None else f"{other.made[vote].operator.split('.')[1]} ({other.made[vote].place})"
    if not by_values:
        return "choices", named  # without a name, of several together
    return ("values", "") if vote is None else ("values and choices", named)


def _numbers(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _whole(value: Tensor) -> bool:
    real = torch.view_as_real(value) if value.is_complex() else value
    return bool((real == real.round()).all())


def _has_dim(func: Any) -> bool:
    return any(argument.name == "dim" for argument in func._schema.arguments)


def _at(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], index: Tensor) -> Tensor:
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    source, dim = cast(Tensor, given["self"]), cast(int, given.get("dim", -1))  # the default of all that have one
    if index.ndim == source.ndim:
        return source.gather(dim, index)
    return source.gather(dim, index.unsqueeze(dim)).squeeze(dim)


def _caller() -> str:
    """The file and line that called the operator: outside of torch, of type checkers and of the audit."""
    frame = sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
