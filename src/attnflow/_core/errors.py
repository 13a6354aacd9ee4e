"""Domain failures. Wrong arguments raise `ValueError` or `TypeError`; these are for what the maths or a model says."""

from __future__ import annotations

from collections.abc import Sequence


class AttnflowError(Exception):
    """Base of every failure that is about the domain rather than about an argument."""


class LeakFound(AttnflowError):
    """A label reaches the position that predicts it.

    Attributes:
        witness: the path of the information, one position per layer boundary: `witness[0]` is the
            position that carries the label, `witness[l]` where it has arrived after layer `l`.
    """

    def __init__(self, message: str, witness: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.witness = tuple(witness)


class UnsupportedArchitecture(AttnflowError):
    """A model has no part that this feature needs; the message names the part."""


class WrongBase(AttnflowError):
    """Something that was saved for a model, such as a bias or a reader, belongs to another one."""


class MissingExtra(AttnflowError, ImportError):
    """An optional dependency is not installed; the message says which extra brings it."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {module}, which is not installed: pip install 'attnflow[{extra}]'")
        self.module = module
        self.extra = extra
