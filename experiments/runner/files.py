"""Files of a study: JSON and CSV, each written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnflow._core.files import write_atomically


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, content: Mapping[str, object]) -> None:
    _replace(path, json.dumps(content, indent=1) + "\n")


def write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    _replace(path, text.getvalue())


def _replace(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write(text.encode())
