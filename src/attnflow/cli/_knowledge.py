"""Stores as the `attnflow knowledge` commands open them."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow._core.progress import Progress, Reporter
    from attnflow.knowledge.index import SearchMode
    from attnflow.knowledge.store import Store


@contextmanager
def opened(uri: str, *, read_only: bool = True, search: SearchMode = "auto") -> Generator[Store, None, None]:
    """A store that exists, closed at the end.

    Raises:
        BadUsage: there is none, or an id that it does not have.
    """
    from attnflow.knowledge.store import Store

    durable(uri)
    path = Path(uri.removeprefix("milvus:"))
    if not uri.startswith("milvus:http") and not path.is_file() and not (path.is_dir() and any(path.iterdir())):
        raise BadUsage(f"there is no store at {uri}: `attnflow knowledge build {uri} FILE` makes one")
    try:
        with Store.open(uri, read_only=read_only, search=search) as store:
            yield store
    except KeyError as error:
        raise BadUsage(str(error.args[0])) from error


def durable(uri: str) -> None:
    """Refuse a store that would be gone when the command ends."""
    if uri == "memory":
        raise BadUsage("a store in memory is gone when the command ends: name a folder")


def shown(spinner: Reporter, what: str) -> Progress:
    """Progress under another name."""
    return lambda done, total, _: spinner(done, total, what)


def note(text: str) -> None:
    """Something that the user should know, on stderr."""
    print(f"attnflow: {text}", file=sys.stderr)


def note_truncated(places: Sequence[str], total: int) -> None:
    """Say which texts were too long."""
    if places:
        more = ", ..." if len(places) > 5 else ""
        note(
            f"{len(places):,} of {total:,} texts are longer than the encoder reads, and their ends are not embedded: "
            f"{', '.join(places[:5])}{more}"
        )
