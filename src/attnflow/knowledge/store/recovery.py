"""After a power cut: a commit that was not on the disk yet goes, as if it had never begun.

LanceDB does not synchronise its files, so that the list of files of the last commit may be there and not what it names,
or be empty. No such commit was acknowledged, since those are synchronised first: an earlier version of the table under
the log is what was acknowledged, and the log says which one it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from attnflow.knowledge.store.compaction import version
from attnflow.knowledge.store.durable import sync
from attnflow.knowledge.store.errors import NewerFormat, NotAStore, StoreError
from attnflow.knowledge.store.table import ENTRIES

_ASIDE: Final = ".torn"
_LOG = logging.getLogger(__name__)


def at_agreed_version(directory: Path, attach: Callable[[], None]) -> None:
    """Attach to the newest version of a table that agrees with the log; where none does, raise as for the newest."""
    versions = directory / f"{ENTRIES}.lance" / "_versions"
    for path in versions.glob(f"*{_ASIDE}"):
        path.rename(path.with_suffix(".manifest"))  # this was cut short itself
    try:
        return attach()
    except (NewerFormat, NotAStore):
        raise
    except StoreError as error:
        first = error
    aside: list[Path] = []
    try:
        for manifest in sorted(versions.glob("*.manifest"), key=version, reverse=True)[:-1]:
            aside.append(manifest.rename(manifest.with_suffix(_ASIDE)))
            (versions / "latest_version_hint.json").unlink(missing_ok=True)
            try:
                attach()
                break
            except StoreError:
                continue
        else:
            raise first
    except BaseException:
        for path in aside:
            path.rename(path.with_suffix(".manifest"))
        raise
    for path in aside:
        path.unlink()
    sync(versions)
    _LOG.warning("%s: a commit that a crash of the machine had cut short was dropped (%s)", directory, first)
    return None
