"""`Task`: inputs (`Token` says what one is made of), labels (`Label` says what a position must predict) and a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, SupportsIndex, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from attnflow._core.checks import integer, number
from attnflow._core.plain import as_integer, as_list, as_number, as_object, only_keys
from attnflow.masks.intervals import BoolArray, IntervalRows
from attnflow.masks.mask import Mask, not_a_mask
from attnflow.masks.spec import mask_from_dict, mask_to_dict
from attnflow.order.bits import range_reduce
from attnflow.order.flow import Flow, analyze

_Built = TypeVar("_Built")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, init=False)
class Token:
    """An input vector: which embedding, at which position, made of which data tokens.

    Two tokens are the same input iff all three agree. Equal vocabulary ids at different places of the data are
    therefore different tokens: their positions differ, and so does their provenance.

    Attributes:
        id: a vocabulary id, or a sorted tuple of ids: the mean of their *token* embeddings, to which the encoding of
            `position` is applied afterwards (hasse, eq. 46; averaging positions in, as the paper does, would make
            the first and last averaged token equal to a data token, see order.md). A tuple of one id is that id.
        position: the position id that the model encodes, counted from 0.
        provenance: indices of the data tokens that this input was made of. A label whose data token is among them
            can be read off this input; a [MASK] token carries none.
    """

    id: int | tuple[int, ...]
    position: int
    provenance: frozenset[int]

    def __init__(
        self,
        id: SupportsIndex | Iterable[SupportsIndex],
        position: SupportsIndex,
        provenance: Iterable[SupportsIndex] | None = None,
    ) -> None:
        """A token of one vocabulary id, or of the mean of several.

        `provenance` is by default the token's own position, which is right for a data token at its own place, and errs
        on the side of finding a leak elsewhere. Pass `()` for [MASK].

        >>> Token(7, position=2).provenance
        frozenset({2})
        >>> Token((9, 5), position=1, provenance=(0, 2)).id
        (5, 9)
        """
        object.__setattr__(self, "id", _token_id(id))
        object.__setattr__(self, "position", integer("position", position))
        chosen = cast(object, (self.position,) if provenance is None else provenance)
        if isinstance(chosen, str | bytes) or not isinstance(chosen, Iterable) or getattr(chosen, "ndim", 1) == 0:
            raise TypeError(f"provenance must be a collection of data indices, such as (2,), got {chosen!r}")
        object.__setattr__(
            self, "provenance", frozenset(integer("provenance", index) for index in cast(Iterable[object], chosen))
        )

    @property
    def ids(self) -> tuple[int, ...]:
        """The vocabulary ids whose embeddings are averaged; one for an ordinary token."""
        return self.id if isinstance(self.id, tuple) else (self.id,)

    def to_dict(self) -> dict[str, object]:
        """The token as plain data."""
        identity = list(self.id) if isinstance(self.id, tuple) else self.id
        return {"id": identity, "position": self.position, "provenance": sorted(self.provenance)}

    @classmethod
    def from_dict(cls, spec: object, where: str = "token") -> Token:
        """The token of plain data; without `provenance` it is the token's own position."""
        values = as_object(spec, where)
        only_keys(values, where, ("id", "position"), ("provenance",))
        identity, provenance = values["id"], values.get("provenance")
        is_one = not isinstance(identity, list | tuple)
        ids = [as_integer(each, f"{where}.id") for each in ([identity] if is_one else as_list(identity, where))]
        places = None if provenance is None else as_list(provenance, f"{where}.provenance")
        return cls(
            ids,
            as_integer(values["position"], f"{where}.position"),
            None if places is None else [as_integer(each, f"{where}.provenance") for each in places],
        )


@dataclass(frozen=True, slots=True)
class Label:
    """What one position must predict. A position may carry several labels (the paper's def. 3.4 allows one).

    Attributes:
        position: index into the task's inputs.
        target: the token to predict: its `id` is the class, its provenance the data token that must not be visible.
            A target from outside of the data (a class label) has an empty provenance and cannot leak.
        task: the subtask that it belongs to; `merge` numbers them by their place in the family.
        weight: its factor in the loss, finite and at least 0.
    """

    position: int
    target: Token
    task: int = 0
    weight: float | int = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.target, Token):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"target must be a Token, got {type(self.target).__name__}; it knows its data index")
        if isinstance(self.target.id, tuple) or len(self.target.provenance) > 1:
            raise ValueError(f"a target is one vocabulary id of at most one data token, got {self.target}")
        object.__setattr__(self, "position", integer("position of a label", self.position))
        object.__setattr__(self, "task", integer("task of a label", self.task))
        object.__setattr__(self, "weight", number("weight of a label", self.weight, 0.0))

    @property
    def target_id(self) -> int:
        """The vocabulary id to predict."""
        return self.target.ids[0]

    @property
    def data_index(self) -> int | None:
        """The data token to predict; None for a target that is no token of the data."""
        return next(iter(self.target.provenance), None)

    def to_dict(self) -> dict[str, object]:
        """The label as plain data."""
        return {
            "position": self.position,
            "target": self.target.to_dict(),
            "task": self.task,
            "weight": self.weight,
        }

    @classmethod
    def from_dict(cls, spec: object, where: str = "label") -> Label:
        """The label of plain data; without `task` and `weight` they are 0 and 1."""
        values = as_object(spec, where)
        only_keys(values, where, ("position", "target"), ("task", "weight"))
        return cls(
            as_integer(values["position"], f"{where}.position"),
            Token.from_dict(values["target"], f"{where}.target"),
            as_integer(values.get("task", 0), f"{where}.task"),
            as_number(values.get("weight", 1.0), f"{where}.weight"),
        )


@dataclass(frozen=True, init=False, repr=False)
class Task:
    """A training task tau = (W, V, M): inputs, labels, mask (hasse, def. 3.1, without its bound k <= |C|).

    Attributes:
        inputs: the input tokens; a token may stand at several places.
        labels: what is predicted where; several labels per position are allowed.
        mask: which position may attend to which; square, as long as the inputs.

    >>> import attnflow as af
    >>> tokens = [Token(id, i) for i, id in enumerate([5, 7, 5])]
    >>> task = Task(tokens[:2], [Label(1, target=tokens[2])], af.masks.causal(2))
    >>> task.size, task.is_dense
    (2, True)
    """

    inputs: tuple[Token, ...]
    labels: tuple[Label, ...]
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
        tokens = tuple(inputs)
        targets = tuple(Label(*label) if isinstance(label, tuple) else label for label in labels)
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise not_a_mask(mask)
        if mask.num_queries != mask.num_keys:
            raise ValueError(f"mask must be square, got shape {mask.shape}")
        if mask.num_queries != len(tokens):
            raise ValueError(f"mask must be as long as the inputs ({len(tokens)}), got shape {mask.shape}")
        _all_of(Token, tokens)
        _all_of(Label, targets)
        for label in targets:
            if label.position >= len(tokens):
                raise ValueError(f"labels must lie within the {len(tokens)} inputs, got position {label.position}")
        object.__setattr__(self, "inputs", tokens)
        object.__setattr__(self, "labels", targets)
        object.__setattr__(self, "mask", mask)

    def __repr__(self) -> str:
        return f"Task({len(self.inputs)} inputs, {len(self.labels)} labels, {self.mask!r})"

    @property
    def size(self) -> int:
        """Number of input positions."""
        return len(self.inputs)

    @property
    def position_ids(self) -> Int[Tensor, " n"]:
        """The position id of each input, int64. They may repeat and jump: pass them, and the mask, to the model."""
        return torch.tensor([token.position for token in self.inputs], dtype=torch.int64)

    @cached_property
    def flow(self) -> Flow:
        """The information flow of the mask (`af.order.analyze`)."""
        return analyze(self.mask)

    @cached_property
    def is_dense(self) -> bool:
        """Whether one layer lets everything flow that ever will: A = R (hasse, def. 3.2)."""
        quick = _is_transitive(self.mask.relabelled()[0])
        return self.flow.is_dense if quick is None else quick

    @cached_property
    def attends_itself(self) -> bool:
        """Whether every position may attend to itself; the residual connection alone is not attention."""
        return bool(_holds_diagonal(self.mask.relabelled()[0]).all())

    def densified(self) -> Task:
        """The same task with the mask R: every position attends to all that can ever reach it, and to itself.

        The information flow is the same; what a model computes is not, since it now takes one layer (def. 3.8).
        """
        if self.is_dense and self.attends_itself:
            return self
        chunks = self.flow.reachability(chunk=max(1, (1 << 23) // max(1, self.size)))
        parts = [IntervalRows.from_bool(rows.numpy()) for _, rows in chunks]
        return Task(self.inputs, self.labels, Mask(IntervalRows.stack(parts, self.size), f"densified({self.mask!r})"))

    def to_dict(self) -> dict[str, object]:
        """The task as plain data for JSON; `from_dict` reads it back."""
        return {
            "version": _VERSION,
            "inputs": [token.to_dict() for token in self.inputs],
            "labels": [label.to_dict() for label in self.labels],
            "mask": mask_to_dict(self.mask),
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


def _all_of(kind: type, items: Iterable[object]) -> None:
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"expected a {kind.__name__}, got {item!r} of type {type(item).__name__}")


def _holds_diagonal(rows: IntervalRows) -> BoolArray:
    row = rows.row_index()
    holds = np.zeros(rows.num_rows, dtype=np.bool_)
    holds[row[(rows.starts <= row) & (row < rows.ends)]] = True
    return holds


def _is_transitive(rows: IntervalRows) -> bool | None:
    """Whether a relation, with its diagonal, is transitive; None where its rows are not one interval each.

    Row i is closed iff no row that it holds reaches beyond it: range minima and maxima, O(n log n).
    """
    closed = rows.with_diagonal()
    starts, ends = closed.starts, closed.ends
    if len(starts) != rows.num_rows:
        return None
    lowest = range_reduce(np.minimum, starts, starts, ends)
    highest = range_reduce(np.maximum, ends, starts, ends)
    return bool((lowest >= starts).all() and (highest <= ends).all())


def _token_id(value: object) -> int | tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return integer("id", value)
    ids = sorted(integer("id", item) for item in cast(Iterable[object], value))
    if not ids:
        raise ValueError("id must be a vocabulary id or at least one of them to average, got an empty sequence")
    return ids[0] if len(ids) == 1 else tuple(ids)
