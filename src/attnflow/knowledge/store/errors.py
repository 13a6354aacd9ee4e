"""What can go wrong with a store, beyond wrong arguments (`ValueError`, `TypeError`) and unknown ids (`KeyError`)."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

from attnflow._core.checks import preview
from attnflow._core.errors import AttnflowError
from attnflow._core.markup import plural

# Where an engine's own source raised it is of no use to our callers.
_PLACE_IN_SOURCE: Final = re.compile(r",? *(/\S*|crates?/\S*|\S*[\\/])\S+\.rs:\d+(:\d+)?|\(?backtrace.*", re.DOTALL)
_ADVICE: Final = (
    (("no space left", "file too large", "disk quota", "os error 28", "os error 27", "os error 122"),
     "make room on the disk and call again"),
    (("permission denied", "read-only file system", "os error 13", "os error 30"),
     "see to the rights of the folder, or open it with read_only=True"),
    (("too many open files", "os error 24"), "raise the limit on open files (ulimit -n)"),
)  # fmt: skip


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


class Damaged(StoreError):
    """Files of a store do not hold what was written to them; `Store.rescue` copies what is whole.

    Attributes:
        place: the store.
        ids: of entries whose bytes have changed, as far as that is what is wrong.
    """

    def __init__(self, place: str, what: str, ids: Sequence[int] = ()) -> None:
        super().__init__(f"{place} is damaged: {what}; Store.rescue({place!r}, to=...) copies what is whole")
        self.place, self.ids = place, tuple(ids)


def changed_rows(place: str, ids: Sequence[int]) -> Damaged:
    """Of entries that do not match their checksums."""
    return Damaged(
        place, f"{plural(len(ids), 'entry has', 'entries have')} other bytes than were written: {preview(ids)}", ids
    )


@contextmanager
def failures(what: str, advice: str = "") -> Generator[None]:
    """Whatever a backend's package raises, which is of many kinds, as a `StoreError` that says what did not happen."""
    try:
        yield
    except StoreError:
        raise
    except BaseException as error:
        if not of_engine(error):
            raise
        said = reason(error)
        lower = str(error).lower()
        hint = next((hint for signs, hint in _ADVICE if any(sign in lower for sign in signs)), advice)
        raise StoreError(f"{what}: {said}{'; ' * bool(hint)}{hint}") from error


def of_engine(error: BaseException) -> bool:
    """Whether it says that something failed, and not that the process is to end; Rust panics over damaged files."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def reason(error: BaseException) -> str:
    """What an engine says, in one line."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return _PLACE_IN_SOURCE.sub("", line).strip().rstrip(",:;. ") or type(error).__name__
