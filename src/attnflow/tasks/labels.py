"""`Label`: what one position must predict; `Labels`: many of them as one array, as a task keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray, integer, number
from attnflow._core.plain import as_integer, as_number, as_object, only_keys
from attnflow.tasks.tokens import Token


@dataclass(frozen=True, slots=True)
class Label:
    """What one position must predict. A position may carry several labels (the paper's def. 3.4 allows one).

    Attributes:
        position: index into the task's inputs.
        target: the token to predict: its `id` is the class, its provenance the data token that must not be visible.
            A target that is no data token (a class label) has an empty provenance and cannot leak.
        task: the subtask that it belongs to; `merge` numbers them by their place in the family.
        weight: its factor in the loss, finite; a negative one makes the target less likely.
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
        object.__setattr__(self, "weight", number("weight of a label", self.weight))

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


_ROW: Final = np.dtype(
    [
        ("position", np.int64),
        ("target_id", np.int64),
        ("target_position", np.int64),
        ("data_index", np.int64),  # -1 without one
        ("task", np.int64),
        ("weight", np.float64),
    ]
)


@dataclass(frozen=True, eq=False, slots=True)
class Labels:
    """Labels as one structured array; its fields are those of `_ROW`."""

    table: npt.NDArray[Any]

    @classmethod
    def of(cls, labels: Iterable[Label]) -> Labels:
        """Make the array from labels."""
        if isinstance(labels, Labels):
            return labels
        listed = list(labels)
        for label in listed:
            if not isinstance(label, Label):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"expected a Label, got {label!r} of type {type(label).__name__}")
        rows = [
            (
                label.position,
                label.target_id,
                label.target.position,
                -1 if label.data_index is None else label.data_index,
                label.task,
                label.weight,
            )
            for label in listed
        ]
        return cls(np.array(rows, dtype=_ROW))

    @classmethod
    def columns(
        cls,
        position: object,
        target_id: IntArray,
        target_position: object,
        data_index: object,
        task: object = 0,
        weight: object = 1.0,
    ) -> Labels:
        """Make the array from columns, each broadcast to the targets."""
        table = np.empty(len(target_id), dtype=_ROW)
        columns = (position, target_id, target_position, data_index, task, weight)
        for name, column in zip(_ROW.names or (), columns, strict=True):
            table[name] = column
        return cls(table)

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Label]:
        for position, id, place, index, task, weight in self.table.tolist():
            yield Label(position, Token(id, place, () if index < 0 else (index,)), task, weight)

    def part(self, first: int, last: int) -> Labels:
        """A view of labels `first` to `last - 1`."""
        return Labels(self.table[first:last])

    def equals(self, other: Labels) -> bool:
        """Whether both are the same labels in the same order."""
        return np.array_equal(self.table, other.table)
