"""What can go wrong with a store, beyond wrong arguments (`ValueError`, `TypeError`) and unknown ids (`KeyError`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from attnflow._core.errors import AttnflowError


class StoreError(AttnflowError):
    """A store cannot do what was asked; nothing of it has happened."""


class StoreLocked(StoreError):
    """Another process, or another `Store` of this one, writes to the directory."""


class NotAStore(StoreError):
    """There is no store at this place, and none can be made there."""


class NewerFormat(StoreError):
    """The store was written by a later version of this package."""


class ReadOnly(StoreError):
    """The store was opened to be read, or the file system does not let it be written."""


@contextmanager
def failures(what: str) -> Generator[None]:
    """Whatever a backend's package raises, which is of many kinds, as a `StoreError` that says what did not happen."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"{what}: {(str(error) or type(error).__name__).splitlines()[0]}") from error
