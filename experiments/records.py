"""Files of a study: written whole, and never mixed with those of other settings."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def describe(path: Path, about: Mapping[str, object], packages: Sequence[str]) -> None:
    """Write the settings of a study with versions and device; those that are there must be the same.

    Raises:
        ValueError: the folder holds a study with other settings.
    """
    plain: dict[str, Any] = json.loads(json.dumps(about))
    if path.is_file():
        held = read(path)
        if {key: held.get(key) for key in plain} != plain:
            raise ValueError(f"{path.parent} holds a study with other settings: choose another folder")
        return
    plain["versions"] = {name: metadata.version(name) for name in packages} | {"python": platform.python_version()}
    plain["device"] = f"{platform.machine()}, {torch.get_num_threads()} threads a process"
    write(path, plain)


def read(path: Path) -> Any:
    """What a file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, content: Mapping[str, object]) -> None:
    """Whole or not at all."""
    _replace(path, json.dumps(content, indent=1) + "\n")


def write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """As CSV, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    _replace(path, text.getvalue())


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8", newline="")
    part.replace(path)
