"""Real text for the comparison: Shakespeare's works, split by work, in rows of equal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from attnflow.bias.documents import works
from attnflow.bias.packing import Packed
from attnflow.models import sample_text

VALIDATION: Final = ("macbeth", "twelfth_night", "henry_v", "pericles")
TEST: Final = (
    "hamlet",
    "tempest",
    "julius_caesar",
    "as_you_like_it",
    "richard_iii",
    "sonnets",
    "coriolanus",
    "much_ado_about_nothing",
)


@dataclass(frozen=True)
class Split:
    """Rows of works that no other part has.

    Attributes:
        training: packed works.
        validation: for choosing the learning rate; each row from one work.
        test: for the results; likewise.
    """

    training: Packed
    validation: Packed
    test: Packed


def split_text(tokenizer: Any, length: int, rows_per_work: int) -> Split:
    """Shakespeare's works in rows of `length` tokens.

    Args:
        tokenizer: of the model.
        length: tokens of a row.
        rows_per_work: rows taken from each held-out work, evenly spaced.

    Raises:
        MissingPackage: the package `shakespeare` is not installed.
    """
    held = {*VALIDATION, *TEST}

    def tokens(work: str) -> list[int]:
        return list(tokenizer(sample_text(work), add_special_tokens=False, verbose=False)["input_ids"])

    def spread(names: tuple[str, ...]) -> Packed:
        return Packed((row for name in names for row in _spread(tokens(name), length, rows_per_work)), length)

    training = Packed((tokens(name) for name in works() if name not in held), length)
    return Split(training, spread(VALIDATION), spread(TEST))


def _spread(tokens: list[int], length: int, count: int) -> list[list[int]]:
    """`count` rows at equal distances; each a document of its own."""
    last = len(tokens) - length
    if last < (count - 1) * length:
        raise ValueError(f"a work of {len(tokens)} tokens has no {count} rows of {length}")
    starts = torch.linspace(0, last, count + 2)[1:-1] if count > 1 else torch.tensor([last / 2])
    return [tokens[int(start) : int(start) + length] for start in starts]
