"""`Token` says what an input is made of, `Label` what a position must predict."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex, cast

from attnflow._core.checks import integer
from attnflow._core.plain import as_integer, as_list, as_number, as_object, only_keys


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
        """Make a token.

        Args:
            id: a vocabulary id, or several to average.
            position: position id, from 0.
            provenance: data indices; by default the token's own position, which is right for a data token at its
                own place, and errs on the side of finding a leak elsewhere. Pass `()` for [MASK].

        >>> Token(7, position=2).provenance
        frozenset({2})
        >>> Token((9, 5), position=1, provenance=(0, 2)).id
        (5, 9)
        """
        object.__setattr__(self, "id", _token_id(id))
        object.__setattr__(self, "position", integer("position", position))
        chosen = (self.position,) if provenance is None else provenance
        object.__setattr__(self, "provenance", frozenset(integer("provenance", index) for index in chosen))

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
        weight = float(self.weight)
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weight of a label must be finite and at least 0, got {weight}")
        object.__setattr__(self, "weight", weight)

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


def _token_id(value: object) -> int | tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return integer("id", value)
    ids = sorted(integer("id", item) for item in cast(Iterable[object], value))
    if not ids:
        raise ValueError("id must be a vocabulary id or at least one of them to average, got an empty sequence")
    return ids[0] if len(ids) == 1 else tuple(ids)
