"""Errors of the domain, such as a leak or an unsupported model. Wrong arguments raise `ValueError` or `TypeError`."""

from __future__ import annotations

from collections.abc import Sequence


class AttnflowError(Exception):
    """Base class of the errors that concern the domain rather than an argument."""


class LeakFound(AttnflowError):
    """A label reaches the position that predicts it.

    Attributes:
        witness: the path of the information: `witness[0]` is the position that carries the label, and `witness[l]` is
            where the label has arrived after layer `l`.
    """

    def __init__(self, message: str, witness: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.witness = tuple(witness)


class UnsupportedArchitecture(AttnflowError):
    """A model lacks a part that this feature needs; the message names the part."""


class RankFailed(AttnflowError, RuntimeError):
    """What several processes do together failed on one of them; the message names its rank, on every rank."""


class WrongBase(AttnflowError):
    """A saved bias, reader or other add-on belongs to another model."""


class MissingExtra(AttnflowError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {module}, which is not installed: pip install 'attnflow[{extra}]'")
        self.module = module
        self.extra = extra
