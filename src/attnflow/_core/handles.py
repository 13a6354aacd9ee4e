"""`Handle`: returned by every function that changes a model; it undoes the change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from attnflow._core.wrappers import class_of

_H = TypeVar("_H", bound="Handle")


class Handle(ABC):
    """A change of a model that lasts until `remove()` or the end of the `with` block; print it to see what it changed.

    Attributes:
        model: the model that was changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._active = True

    @property
    def active(self) -> bool:
        """Whether the change is still in force."""
        return self._active

    @property
    def kind(self) -> str:
        """The name of the model's class, without wrappers."""
        return class_of(self.model).__name__

    def remove(self) -> None:
        """Restore the model exactly to its state before the change; a second call does nothing.

        Raises:
            RuntimeError: a later change of the model must be removed first. Nothing is changed then.
        """
        if self._active:
            self._restore()
            self._active = False

    def results(self) -> Sequence[object]:
        """The results that the handle holds now, which `af.report` shows for it (default: none)."""
        return ()

    @abstractmethod
    def _restore(self) -> None:
        """Undo the change, or raise before anything is undone."""

    @abstractmethod
    def _summary(self) -> str:
        """Describe the change in a line or a table."""

    def __enter__(self: _H) -> _H:
        if not self._active:
            raise RuntimeError(f"this {type(self).__name__} was removed; attach again")
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        return self._summary() if self._active else f"{self._summary()} (removed)"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.kind}{'' if self._active else ', removed'}>"
