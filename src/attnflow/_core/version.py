"""The package's version, read by the build, and the newest releases of other packages that its tests were run with."""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib import metadata
from typing import Final

__version__ = "0.1.0"

# By minor release. `make newest` tries what came since: once it passes, renew this table and that of docs/support.md.
NEWEST_TRIED: Final = {
    "torch": "2.13",
    "numpy": "2.4",
    "scipy": "1.17",
    "transformers": "5.24",
    "accelerate": "1.15",
    "trl": "1.16",
    "peft": "0.21",
    "lancedb": "0.40",
    "pyarrow": "26.0",
}


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def untried() -> dict[str, str]:
    versions = {name: installed(name) for name in NEWEST_TRIED}
    return {name: v for name, v in versions.items() if v is not None and _minor(v) > _minor(NEWEST_TRIED[name])}


@cache
def warn_of_untried() -> None:
    """Log packages that are newer than any tried, once per process: a warning of Python could end an import."""
    if newer := untried():
        logging.getLogger("attnflow").warning(
            "%s: newer than attnflow %s was tried with. If something fails, install %s; `attnflow doctor` lists all. "
            "To silence this: logging.getLogger('attnflow').setLevel('ERROR')",
            ", ".join(f"{name} {version}" for name, version in newer.items()),
            __version__,
            " ".join(f"'{name}=={NEWEST_TRIED[name]}.*'" for name in newer),
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
