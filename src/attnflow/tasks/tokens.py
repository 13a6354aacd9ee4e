"""`Token`: what one input vector is made of; `TokenSequence` and `TokenTable` hold many tokens of tasks as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray, integer
from attnflow._core.plain import as_integer, as_list, as_object, only_keys
from attnflow.masks.intervals import ragged
from attnflow.masks.numbering import invert


@dataclass(frozen=True, slots=True, init=False)
class Token:
    """An input vector: an embedding at a position, with the data tokens that it was made of.

    Two tokens are the same input iff all three agree, so equal ids at different places are different tokens.

    Attributes:
        id: a vocabulary id, or a sorted tuple of ids. A tuple means the mean of their *token* embeddings, with
            `position` encoded afterwards (hasse, eq. 46, averages positions too; see order.md).
        position: the position id that the model encodes, counted from 0.
        provenance: indices of the data tokens that this input was made of; a label for one of them can be read off it.
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

        `provenance` defaults to the token's own position, so that a leak is not missed. Pass `()` for [MASK].

        >>> Token(7, position=2).provenance
        frozenset({2})
        >>> Token((9, 5), position=1, provenance=(0, 2)).id
        (5, 9)
        """
        ids = _several("id", id)
        if ids is not None and not ids:
            raise ValueError("id must be a vocabulary id or at least one of them to average, got an empty sequence")
        object.__setattr__(self, "id", integer("id", id) if ids is None else ids[0] if len(ids) == 1 else tuple(ids))
        object.__setattr__(self, "position", integer("position", position))
        sources = [self.position] if provenance is None else _several("provenance", provenance)
        if sources is None:
            raise TypeError(f"provenance must be a collection of data indices, such as (2,), got {provenance!r}")
        object.__setattr__(self, "provenance", frozenset(sources))

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
        ids, provenance = values["id"], values.get("provenance")

        def integers(name: str, listed: object) -> list[int]:
            return [as_integer(each, f"{where}.{name}") for each in as_list(listed, where)]

        return cls(
            integers("id", ids if isinstance(ids, list | tuple) else [ids]),
            as_integer(values["position"], f"{where}.position"),
            None if provenance is None else integers("provenance", provenance),
        )


def _several(name: str, value: object) -> list[int] | None:
    """The integers of a collection in ascending order; None if the value is not a collection."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return None
    return sorted(integer(name, each) for each in cast(Iterable[object], value))


@dataclass(frozen=True, eq=False, slots=True)
class Ragged:
    """Rows of integers of different lengths: row r is `values[indptr[r]:indptr[r + 1]]`."""

    indptr: IntArray
    values: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        indptr = np.cumsum([0, *map(len, rows)])
        return cls(indptr, np.fromiter((value for row in rows for value in row), np.int64, int(indptr[-1])))

    @classmethod
    def single(cls, values: IntArray) -> Ragged:
        return cls(np.arange(len(values) + 1), values)

    @classmethod
    def stack(cls, parts: Sequence[Ragged]) -> Ragged:
        lengths = [np.zeros(1, np.int64), *(part.lengths for part in parts)]
        return cls(np.cumsum(np.concatenate(lengths)), np.concatenate([part.values for part in parts]))

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.indptr)

    def take(self, rows: IntArray) -> Ragged:
        lengths = self.lengths[rows]
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Ragged(indptr, self.values[ragged(self.indptr[rows], lengths)[1]])

    def lists(self) -> list[list[int]]:
        values, cuts = self.values.tolist(), self.indptr.tolist()
        return [values[first:last] for first, last in pairwise(cuts)]

    def padded(self, fill: int) -> IntArray:
        """The rows as [rows, longest row], at least one column wide."""
        lengths = self.lengths
        table = np.full((len(lengths), max(1, int(lengths.max(initial=0)))), fill, dtype=np.int64)
        table[np.arange(table.shape[1]) < lengths[:, None]] = self.values
        return table

    def numbers(self) -> IntArray:
        """A number for each row, equal iff the rows are; their values must not be negative."""
        lengths = self.lengths
        numbers = np.full(len(lengths), -1)
        numbers[lengths == 1] = self.values[self.indptr[:-1][lengths == 1]]
        several = np.flatnonzero(lengths > 1)
        number: dict[tuple[int, ...], int] = {}
        for row, values in zip(several.tolist(), self.take(several).lists(), strict=True):
            numbers[row] = -2 - number.setdefault(tuple(values), len(number))
        return numbers


@dataclass(frozen=True, eq=False, slots=True)
class TokenTable:
    """Tokens as columns: ids and provenance (ascending in each row), and position."""

    ids: Ragged
    position: IntArray
    provenance: Ragged

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> TokenTable:
        return cls(
            Ragged.of([token.ids for token in tokens]),
            np.fromiter((token.position for token in tokens), np.int64, len(tokens)),
            Ragged.of([sorted(token.provenance) for token in tokens]),
        )

    @classmethod
    def data(cls, ids: IntArray, position: IntArray | None = None) -> TokenTable:
        """Data tokens 0, 1, ..., each at its own place, or at `position`."""
        own = np.arange(len(ids))
        return cls(Ragged.single(ids), own if position is None else position, Ragged.single(own))

    @classmethod
    def stack(cls, parts: Sequence[TokenTable]) -> TokenTable:
        return cls(
            Ragged.stack([part.ids for part in parts]),
            np.concatenate([part.position for part in parts]),
            Ragged.stack([part.provenance for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.position)

    def take(self, rows: IntArray) -> TokenTable:
        return TokenTable(self.ids.take(rows), self.position[rows], self.provenance.take(rows))

    def numbers(self) -> IntArray:
        number = np.zeros(len(self), dtype=np.int64)
        for column in (self.ids.numbers(), self.position, self.provenance.numbers()):
            values, inverse = np.unique(column, return_inverse=True)
            number = np.unique(number * len(values) + inverse, return_inverse=True)[1]
        return number


@dataclass(frozen=True, eq=False, slots=True)
class TokenSequence:
    """A sequence of tokens as arrays: input i is token `index[i]` of a table that a family's tasks share."""

    table: TokenTable
    index: IntArray

    @classmethod
    def of(cls, tokens: Iterable[Token]) -> TokenSequence:
        if isinstance(tokens, TokenSequence):
            return tokens
        listed = list(tokens)
        for token in listed:
            if not isinstance(token, Token):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"expected a Token, got {token!r} of type {type(token).__name__}")
        return cls(TokenTable.of(listed), np.arange(len(listed)))

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[Token]:
        used, place = np.unique(self.index, return_inverse=True)
        table = self.table.take(used)
        rows = zip(table.ids.lists(), table.position.tolist(), table.provenance.lists(), strict=True)
        tokens = [Token(*row) for row in rows]
        return (tokens[i] for i in place.tolist())

    def equals(self, other: TokenSequence) -> bool:
        if len(self) != len(other):
            return False
        if self.table is other.table and np.array_equal(self.index, other.index):
            return True
        _, (mine, others) = numbered([self, other])
        return np.array_equal(mine, others)

    @property
    def position(self) -> IntArray:
        return self.table.position[self.index]

    def carriers(self) -> tuple[IntArray, IntArray]:
        rows = self.table.provenance.take(self.index)
        owner = np.repeat(np.arange(len(self)), rows.lengths)
        order = np.argsort(rows.values, kind="stable")
        return rows.values[order], owner[order]


def numbered(sequences: Sequence[TokenSequence]) -> tuple[TokenTable, list[IntArray]]:
    tables = {id(inputs.table): inputs.table for inputs in sequences}
    whole = TokenTable.stack(list(tables.values())) if tables else TokenTable.of([])
    first, number = as_they_appear(whole.numbers())
    cuts = np.cumsum([len(table) for table in tables.values()])[:-1]
    of_table = dict(zip(tables, np.split(number, cuts), strict=True)) if tables else {}
    return whole.take(first), [of_table[id(inputs.table)][inputs.index] for inputs in sequences]


def as_they_appear(values: npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    return np.sort(first), invert(np.argsort(first))[number]
