"""`Task`: inputs (`Token` says what one is made of), labels (`Label` says what a position must predict) and a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from attnflow._core.plain import as_integer, as_list, as_object, only_keys
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask
from attnflow.masks.spec import mask_from_dict
from attnflow.order.flow import Flow, analyze
from attnflow.tasks.density import holds_diagonal, is_transitive
from attnflow.tasks.labels import Label, Labels
from attnflow.tasks.tokens import Inputs, Token

_Built = TypeVar("_Built")
_VERSION: Final = 1


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Task:
    """A training task tau = (W, V, M): inputs, labels, mask (hasse, def. 3.1, without its bound k <= |C|).

    Inputs and labels are kept as arrays (`sequence`, `targets`); as objects they are made when they are asked for, at
    about 5 us each.

    Attributes:
        sequence: the input tokens as arrays.
        targets: the labels as one array.
        mask: which position may attend to which; square, as long as the inputs.

    >>> import attnflow as af
    >>> tokens = [Token(id, i) for i, id in enumerate([5, 7, 5])]
    >>> task = Task(tokens[:2], [Label(1, target=tokens[2])], af.masks.causal(2))
    >>> task.size, task.is_dense
    (2, True)
    """

    sequence: Inputs
    targets: Labels
    mask: Mask

    def __init__(
        self, inputs: Iterable[Token], labels: Iterable[Label | tuple[int, Token, int, float]], mask: Mask
    ) -> None:
        """Make a task.

        A label may also be given as its tuple (position, target token, task, weight).

        Raises:
            TypeError: the mask is no `Mask`, or an input no `Token`, or a label no `Label`.
            ValueError: the mask is not square or not as long as the inputs, or a label lies outside the sequence.
        """
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise not_a_mask(mask)
        sequence, targets = Inputs.of(inputs), Labels.of(labels)
        size = len(sequence)
        if mask.num_queries != mask.num_keys:
            raise ValueError(f"mask must be square, got shape {mask.shape}")
        if mask.num_queries != size:
            raise ValueError(f"mask must be as long as the inputs ({size}), got shape {mask.shape}")
        if len(targets) and (last := int(targets.column("position").max())) >= size:
            raise ValueError(f"labels must lie within the {size} inputs, got position {last}")
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "mask", mask)

    @cached_property
    def inputs(self) -> tuple[Token, ...]:
        """The input tokens; a token may stand at several places."""
        return tuple(self.sequence)

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        """What is predicted where; several labels per position are allowed."""
        return tuple(self.targets)

    def __eq__(self, other: object) -> bool:
        """Whether inputs, labels (in their order) and mask are the same."""
        if not isinstance(other, Task):
            return NotImplemented
        return self.sequence.equals(other.sequence) and self.targets.equals(other.targets) and self.mask == other.mask

    def __hash__(self) -> int:
        labels = (self.targets.column(name).tobytes() for name in ("position", "target_id", "task"))
        return hash((self.sequence.position.tobytes(), *labels, self.mask))

    def __repr__(self) -> str:
        return f"Task({self.size} inputs, {len(self.targets)} labels, {self.mask!r})"

    @property
    def size(self) -> int:
        """Number of input positions."""
        return len(self.sequence)

    @property
    def position_ids(self) -> Int[Tensor, " n"]:
        """The position id of each input, int64. They may repeat and jump: pass them, and the mask, to the model."""
        return torch.from_numpy(self.sequence.position)

    @cached_property
    def flow(self) -> Flow:
        """The information flow of the mask (`af.order.analyze`)."""
        return analyze(self.mask)

    @cached_property
    def is_dense(self) -> bool:
        """Whether one layer lets everything flow that ever will: A = R (hasse, def. 3.2)."""
        quick = is_transitive(self.mask.relabelled()[0])
        return self.flow.is_dense if quick is None else quick

    @cached_property
    def attends_itself(self) -> bool:
        """Whether every position may attend to itself; the residual connection alone is not attention."""
        return bool(holds_diagonal(self.mask.relabelled()[0]).all())

    def densified(self) -> Task:
        """The same task with the mask R: every position attends to all that can ever reach it, and to itself.

        The information flow is the same; what a model computes is not, since it now takes one layer (def. 3.8).
        """
        if self.is_dense and self.attends_itself:
            return self
        chunks = self.flow.reachability(chunk=max(1, (1 << 23) // max(1, self.size)))
        parts = [IntervalRows.from_bool(rows.numpy()) for _, rows in chunks]
        return Task(
            self.sequence, self.targets, Mask(IntervalRows.stack(parts, self.size), f"densified({self.mask!r})")
        )

    def to_dict(self) -> dict[str, object]:
        """The task as plain data for JSON; `from_dict` reads it back."""
        return {
            "version": _VERSION,
            "inputs": [token.to_dict() for token in self.inputs],
            "labels": [label.to_dict() for label in self.labels],
            "mask": self.mask.to_dict(),
        }

    @classmethod
    def from_dict(cls, spec: object, where: str = "task") -> Task:
        """The task of plain data, as `to_dict` or a person wrote it; what `attnflow mask check SPEC.json` reads.

            {"version": 1,
             "inputs": [5, {"id": 7, "position": 1, "provenance": [1]}, {"id": [5, 9], "position": 1}],
             "labels": [{"position": 0, "target": {"id": 7, "position": 1}, "task": 0, "weight": 1.0}],
             "mask": {"name": "causal", "parameters": {"n": 3}}}

        An input that is a bare number stands for the data token at that place. `provenance` is by default the token's
        own position; `version`, `task` and `weight` are by default 1, 0 and 1. For the forms of a mask see
        `attnflow.masks.spec`; it may also be a `Mask`.

        Raises:
            ValueError: a part is missing, unknown or malformed; the message says where it stands.
        """
        values = as_object(spec, where)
        only_keys(values, where, ("inputs", "labels", "mask"), ("version",))
        version = values.get("version", _VERSION)
        if version != _VERSION:
            raise ValueError(f"{where}: this release reads version {_VERSION}, got version {version!r}")
        inputs = [_at(f"{where}: inputs[{i}]", _input, each, i) for i, each in _numbered(values, "inputs", where)]
        labels = [_at(f"{where}: labels[{i}]", Label.from_dict, each) for i, each in _numbered(values, "labels", where)]
        mask = mask_from_dict(values["mask"], f"{where}: mask")
        return _at(where, cls, inputs, labels, mask)


def _numbered(values: Mapping[str, object], name: str, where: str) -> Iterable[tuple[int, object]]:
    return enumerate(as_list(values[name], f"{where}: {name}"))


def _input(spec: object, index: int) -> Token:
    return Token.from_dict(spec) if isinstance(spec, Mapping) else Token(as_integer(spec, "id"), position=index)


def _at(place: str, build: Callable[..., _Built], *values: object) -> _Built:
    try:
        return build(*values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error
