"""A fact of a store: the key that questions ask for, and its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SEPARATOR: Final = "\t"  # between the key of a fact, which is asked for, and its value


@dataclass(frozen=True)
class Record:
    """A fact: its text is "key<tab>value"."""

    text: str
