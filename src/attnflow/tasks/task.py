"""`Task`: inputs (each a `Token`), labels (each a `Label`: what a position must predict) and a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from attnflow._core.checks import IntArray, integer, number
from attnflow._core.plain import as_integer, as_list, as_number, as_object, only_keys
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask, not_a_mask
from attnflow.masks.spec import mask_from_dict
from attnflow.order.flow import Flow, analyze
from attnflow.tasks.tokens import Token, TokenSequence

_Built = TypeVar("_Built")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Label:
    """What one position must predict. A position may carry several labels (the paper's def. 3.4 allows one).

    Attributes:
        position: index into the task's inputs.
        target: the token to predict. Its `id` is the class, its provenance the data token that must not be visible. A
            class label, which is not a data token, has an empty provenance and cannot leak.
        task: the label's subtask; `merge` numbers subtasks by their place in the family.
        weight: its factor in the loss, finite; a negative one makes the target less likely.
    """

    position: int
    target: Token
    task: int = 0
    weight: float | int = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.target, Token):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"target must be a Token (it carries the data index), got {type(self.target).__name__}")
        if isinstance(self.target.id, tuple) or len(self.target.provenance) > 1:
            raise ValueError(f"a target is one vocabulary id of at most one data token, got {self.target}")
        object.__setattr__(self, "position", integer("position of a label", self.position))
        object.__setattr__(self, "task", integer("task of a label", self.task))
        object.__setattr__(self, "weight", number("weight of a label", self.weight))

    @property
    def target_id(self) -> int:
        """The vocabulary id to predict."""
        return self.target.ids[0]

    @property
    def data_index(self) -> int | None:
        """The data token to predict; None if the target is not a token of the data."""
        return next(iter(self.target.provenance), None)

    def to_dict(self) -> dict[str, object]:
        """The label as plain data."""
        target = self.target.to_dict()
        return {"position": self.position, "target": target, "task": self.task, "weight": self.weight}

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


_INTEGERS: Final = "position", "target_id", "target_position", "data_index", "task"  # data_index is -1 without one
_ROW: Final = np.dtype([*((name, np.int64) for name in _INTEGERS), ("weight", np.float64)])


@dataclass(frozen=True, eq=False, slots=True)
class LabelTable:
    """Labels as one structured array; its fields are those of `_ROW`."""

    table: npt.NDArray[Any]

    @classmethod
    def of(cls, labels: Iterable[Label]) -> LabelTable:
        if isinstance(labels, LabelTable):
            return labels
        listed = list(labels)
        for label in listed:
            if not isinstance(label, Label):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"expected a Label, got {label!r} of type {type(label).__name__}")
        targets = [
            (label.target.ids[0], label.target.position, *(label.target.provenance or (-1,))) for label in listed
        ]
        rows = [
            (label.position, *target, label.task, label.weight) for label, target in zip(listed, targets, strict=True)
        ]
        return cls(np.array(rows, dtype=_ROW))

    @classmethod
    def columns(cls, position: object, target_id: IntArray, *rest: object) -> LabelTable:
        """Make labels from the fields of `_ROW`, in their order; each is an array or one value for all."""
        table = np.empty(len(target_id), dtype=_ROW)
        columns = (position, target_id, *rest)
        for name, column in zip(_ROW.names or (), columns, strict=True):
            table[name] = column
        return cls(table)

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Label]:
        for position, id, place, index, task, weight in self.table.tolist():
            yield Label(position, Token(id, place, () if index < 0 else (index,)), task, weight)

    def part(self, first: int, last: int) -> LabelTable:
        return LabelTable(self.table[first:last])


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Task:
    """A training task tau = (W, V, M): inputs, labels, mask (hasse, def. 3.1, without its bound k <= |C|).

    Inputs and labels are stored as arrays (`sequence`, `targets`); `inputs` and `labels` build objects on demand.

    A task may also have a mask per layer. It then fits models of exactly that many layers: information flows by the
    *product* of the layers' relations and not by their closure, and `mask` raises in favour of `masks`.

    Attributes:
        sequence: the input tokens as arrays.
        targets: the labels as one array.
        masks: which position may attend to which: one mask for all layers, or one for each.
        num_layers: how many layers a mask per layer is for; None where one mask serves any number of layers.

    >>> import attnflow as af
    >>> tokens = [Token(id, i) for i, id in enumerate([5, 7, 5])]
    >>> task = Task(tokens[:2], [Label(1, target=tokens[2])], af.masks.causal(2))
    >>> task.size, task.is_dense
    (2, True)
    """

    sequence: TokenSequence
    targets: LabelTable
    masks: tuple[Mask, ...]
    num_layers: int | None

    def __init__(self, inputs: Iterable[Token], labels: Iterable[Label], mask: Mask | Sequence[Mask]) -> None:
        """Make a task; `mask` may be a list of one mask per layer.

        Raises:
            TypeError: the mask is not a `Mask`, an input not a `Token`, or a label not a `Label`.
            ValueError: the mask is not square or not as long as the inputs, or a label lies outside the sequence.
        """
        masks = tuple(mask) if isinstance(mask, Sequence) else (mask,)
        if not masks:
            raise ValueError("expected a mask or at least one mask per layer, got an empty sequence")
        sequence, targets = TokenSequence.of(inputs), LabelTable.of(labels)
        size = len(sequence)
        for each in masks:
            if not isinstance(each, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise not_a_mask(each)
            if each.num_queries != each.num_keys:
                raise ValueError(f"mask must be square, got shape {each.shape}")
            if each.num_queries != size:
                raise ValueError(f"mask must be as long as the inputs ({size}), got shape {each.shape}")
        if len(targets) and (last := int(targets.table["position"].max())) >= size:
            raise ValueError(f"labels must lie within the {size} inputs, got position {last}")
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "num_layers", len(masks) if isinstance(mask, Sequence) else None)

    @property
    def mask(self) -> Mask:
        """The mask of all layers; a task with a mask per layer raises `ValueError`."""
        if self.num_layers is not None:
            raise ValueError(
                f"this task has a mask per layer ({self.num_layers}), not one for all: use task.masks, and run models "
                "under af.masks.attach(model, per_layer=task.masks)"
            )
        return self.masks[0]

    @cached_property
    def inputs(self) -> tuple[Token, ...]:
        """The input tokens; a token may stand at several places."""
        return tuple(self.sequence)

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        """What is predicted where; several labels per position are allowed."""
        return tuple(self.targets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        same = self.sequence.equals(other.sequence) and np.array_equal(self.targets.table, other.targets.table)
        return same and (self.num_layers, self.masks) == (other.num_layers, other.masks)

    def __hash__(self) -> int:
        labels = (self.targets.table[name].tobytes() for name in ("position", "target_id", "task"))
        return hash((self.sequence.position.tobytes(), *labels, self.masks))

    def __repr__(self) -> str:
        mask = self.masks[0] if self.num_layers is None else list(self.masks)
        return f"Task({self.size} inputs, {len(self.targets)} labels, {mask!r})"

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
        """The information flow of the mask, or of the masks layer by layer (`af.order.analyze`)."""
        return analyze(self.masks[0] if self.num_layers is None else self.masks)

    @property
    def depth(self) -> int:
        """Layers until all information has flowed; a model with fewer layers lacks some of what the mask allows."""
        return 1 if self.is_dense else self.flow.depth

    @cached_property
    def is_dense(self) -> bool:
        """Whether one layer suffices for all information to flow: A = R (def. 3.2); never with a mask per layer."""
        return self.num_layers is None and self.flow.is_dense

    @cached_property
    def attends_itself(self) -> bool:
        """Whether every position may attend to itself; the residual connection does not count."""
        own = np.arange(self.size)
        return all(bool(mask.relabelled()[0].holds(own, own).all()) for mask in self.masks)

    def densified(self) -> Task:
        """The same task with the mask R: every position attends to all positions that can reach it, and to itself.

        The information flow stays the same but takes one layer, so a model computes something else (def. 3.8).

        Raises:
            ValueError: the task has a mask per layer: no single mask has the flow of their product.
        """
        if self.num_layers is not None:
            raise ValueError(
                f"a task with a mask per layer ({self.num_layers}) has no dense form: its flow is the product of its "
                "masks, and one mask for all layers would let more flow"
            )
        if self.is_dense and self.attends_itself:
            return self
        chunks = self.flow.reachability_by_rows(max(1, (1 << 23) // max(1, self.size)))
        parts = [IntervalRows.from_bool(rows.numpy()) for _, rows in chunks]
        return Task(
            self.sequence, self.targets, Mask(IntervalRows.stack(parts, self.size), f"densified({self.mask!r})")
        )

    def sparsified(self, window: int | None = None, anchors: int | Sequence[int] | None = None) -> Task:
        """The same task under a sparser mask of the same order (`Flow.sparsify`; hasse, def. 3.8); see its `depth`.

        No label can leak that did not before. But information now takes up to `depth` layers instead of one and is
        mixed on its way: a model computes something else, and one with fewer layers misses some of it.

        Args:
            window: also keep the original pairs with |q - k| < window, of positions in the task's sequence.
            anchors: also keep the original pairs whose key is an anchor: positions, or how many to spread evenly.

        Raises:
            ValueError: the task has a mask per layer.

        >>> import attnflow as af
        >>> task = af.tasks.merge(af.tasks.causal_lm(range(64))).task
        >>> [task.sparsified(window=window).depth for window in (None, 8, 62)]
        [62, 9, 2]
        """
        if self.num_layers is not None:
            raise ValueError(
                f"a task with a mask per layer ({self.num_layers}) cannot be sparsified: no single mask has the flow "
                "of their product. Sparsify its masks instead"
            )
        return Task(self.sequence, self.targets, self.flow.sparsify(window=window, anchors=anchors).mask)

    def to_dict(self) -> dict[str, object]:
        """The task as plain data for JSON; `from_dict` reads it back."""
        masks = [mask.to_dict() for mask in self.masks]
        return {
            "version": _VERSION,
            "inputs": [token.to_dict() for token in self.inputs],
            "labels": [label.to_dict() for label in self.labels],
            **({"mask": masks[0]} if self.num_layers is None else {"masks": masks}),
        }

    @classmethod
    def from_dict(cls, spec: object, where: str = "task") -> Task:
        """Make a task from plain data: the output of `to_dict`, or a SPEC.json for `attnflow mask check`.

            {"version": 1,
             "inputs": [5, {"id": 7, "position": 1, "provenance": [1]}, {"id": [5, 9], "position": 1}],
             "labels": [{"position": 0, "target": {"id": 7, "position": 1}, "task": 0, "weight": 1.0}],
             "mask": {"name": "causal", "parameters": {"n": 3}}}

        A bare number as an input is the data token at that place. By default `provenance` is the token's own position,
        `version`, `task` and `weight` are 1, 0 and 1. The mask may be a `Mask` (for other forms see
        `attnflow.masks.spec`), or "masks" a list of one per layer.

        Raises:
            ValueError: a part is missing, unknown or malformed; the message says which.
        """
        values = as_object(spec, where)
        stacked = "masks" in values and "mask" not in values
        only_keys(values, where, ("inputs", "labels", "masks" if stacked else "mask"), ("version",))
        version = values.get("version", _VERSION)
        if version != _VERSION:
            raise ValueError(f"{where}: this release reads version {_VERSION}, got version {version!r}")
        inputs = [_at(f"{where}: inputs[{i}]", _input, each, i) for i, each in _numbered(values, "inputs", where)]
        labels = [_at(f"{where}: labels[{i}]", Label.from_dict, each) for i, each in _numbered(values, "labels", where)]
        if not stacked:
            return _at(where, cls, inputs, labels, mask_from_dict(values["mask"], f"{where}: mask"))
        masks = [mask_from_dict(each, f"{where}: masks[{i}]") for i, each in _numbered(values, "masks", where)]
        return _at(where, cls, inputs, labels, masks)


def _numbered(values: Mapping[str, object], name: str, where: str) -> Iterable[tuple[int, object]]:
    return enumerate(as_list(values[name], f"{where}: {name}"))


def _input(spec: object, index: int) -> Token:
    return Token.from_dict(spec) if isinstance(spec, Mapping) else Token(as_integer(spec, "id"), position=index)


def _at(place: str, build: Callable[..., _Built], *values: object) -> _Built:
    try:
        return build(*values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error
